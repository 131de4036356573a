"""Names mean one thing."""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: Both frameworks' packages have names of one meaning, such as ``BlendLLM``; no other two places do.
FRAMEWORKS = ("integrations/langchain-blendrag", "integrations/llama-index-llms-blendrag")


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text("utf-8"))))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_class_has_a_name_of_its_own(framework: str) -> None:
    roots = ("src", "lab", "integrations/blendrag-ray", framework)
    places = defaultdict(set)
    for path in [path for root in roots for path in (ROOT / root).rglob("*.py")]:
        if "tests" not in path.relative_to(ROOT).parts:
            for node in nodes(path):
                if isinstance(node, ast.ClassDef):
                    places[node.name].add(path.relative_to(ROOT).as_posix())
    assert {name: sorted(found) for name, found in places.items() if len(found) > 1} == {}


#: Private names of blendrag in files of tests outside of the rooms without any. Lower it with each that goes.
MOST_PRIVATE_NAMES = 91
WITHOUT_PRIVATE_NAMES = (
    "tests/planning",
    "tests/schema",
    "tests/server",
    "tests/serving",
    "integrations/blendrag-ray",
)


@cache
def our_private_names() -> frozenset[str]:
    """Names that begin with an underscore and that blendrag gives to something."""
    ours = set[str]()
    for path in (
        path for root in (ROOT / "src", ROOT / "integrations") for path in root.rglob("*.py")
    ):
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                ours.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                ours.add(node.id if isinstance(node, ast.Name) else node.attr)
    # named tuples have a _replace, too
    return frozenset(name for name in ours if re.match("_[a-zA-Z]", name)) - {"_replace"}


#: Of Python itself.
PRIVATE_OF_PYTHON = {"_asdict", "_exit", "_fields", "_getframe", "_parser", "_replace"}


def test_only_compat_uses_private_parts_of_other_packages():
    known = our_private_names() | PRIVATE_OF_PYTHON
    found = {
        f"{path.relative_to(ROOT).as_posix()}: {name}"
        for root in ("src", "integrations")
        for path in (ROOT / root).rglob("*.py")
        if "tests" not in path.relative_to(ROOT).parts and path.name != "compat.py"
        for node in nodes(path)
        for name in _taken(node, of_self=root == "src")
        if re.match("_[a-zA-Z]", name) and name not in known
    }
    assert not found, "give it a function and a test in model/compat.py"


def _taken(node: ast.AST, of_self: bool) -> list[str]:
    """The names that ``node`` takes from something else; also, ``of_self``, those that may be inherited, as
    classes of frameworks are only in the integrations."""
    if isinstance(node, ast.Attribute):
        return [node.attr] if of_self or _is_foreign(node.value) else []
    if isinstance(node, ast.Import | ast.ImportFrom):
        module = getattr(node, "module", None) or ""
        if module.startswith(("blendrag", "langchain_blendrag", "llama_index.llms.blendrag")):
            return []
        parts = [part for each in node.names for part in f"{module}.{each.name}".split(".")]
        return [part for part in parts if part != "_typeshed"]  # only for mypy
    return []


def test_tests_ask_for_behaviour_or_public_names():
    private = {name for name in our_private_names() if name[1].islower()}
    found = {
        f"{path.relative_to(ROOT).as_posix()}: {node.attr}"
        for root in ("tests", "integrations", "lab")
        for path in (ROOT / root).rglob("*.py")
        if "tests" in path.relative_to(ROOT).parts
        if re.search(
            r"\.\s*_[a-z]", path.read_text("utf-8")
        )  # most have none, and parsing takes seconds
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and node.attr in private and _is_foreign(node.value)
    }
    assert not sorted(each for each in found if each.startswith(WITHOUT_PRIVATE_NAMES))
    assert len(found) <= MOST_PRIVATE_NAMES, sorted(found)


def _is_foreign(owner: ast.expr) -> bool:
    """Whether it is neither the object of the method that names it nor what it inherits from."""
    is_self = isinstance(owner, ast.Name) and owner.id in ("self", "cls")
    return not is_self and not isinstance(owner, ast.Call)
