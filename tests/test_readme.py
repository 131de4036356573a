"""Every block of the pages for newcomers runs, in order, in one directory, as a reader would paste them.

The text is run as printed: the named model is a tiny one in a directory of that name, and the folders that
the pages mention are there. Only the benchmark gets a smaller geometry. ``make``, ``pip`` and
``python3 -m venv`` lines are checked but not run.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from packaging.requirements import Requirement

import blendrag
import tiny
from blendrag.config import settings
from blendrag.frameworks.engines import close_shared_engines
from blendrag.store.encodings import stored_chunk_bytes
from blendrag.store.kv import KVLayout, LayerShape
from cli.commands import invoke
from embedding_once import each_text_is_embedded_once
from few_documents import few_documents
from lab.tests.bench.small import no_peak_bytes

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    name: (ROOT / name).read_text(encoding="utf-8")
    for name in (
        "README.md",
        "docs/quickstart.md",
        "integrations/langchain-blendrag/README.md",
        "integrations/llama-index-llms-blendrag/README.md",
    )
}
PYPROJECTS = [
    ROOT / "pyproject.toml",
    ROOT / "lab/pyproject.toml",
    *ROOT.glob("integrations/*/pyproject.toml"),
]
#: The benchmarks of README.md take minutes, and a model of billions of parameters all memory.
SMALLER = {
    r"bench (answer|ttft)": r"bench \1 --rounds 1",
    "bench answer": "bench answer --new-tokens 8",
    r"--geometry \S+": "--geometry tiny",
    "Qwen2.5-Coder-0.5B": "Qwen2.5-0.5B",
    "--chunk-tokens 512": "--chunk-tokens 64",
}
#: Of the pages that the commands ingest; the rest is more of the same.
DOCUMENT_CHARS = 3000


@pytest.fixture(scope="module", autouse=True)
def _each_text_is_embedded_once():
    with each_text_is_embedded_once():
        yield


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """A directory with the model and the folders that the pages name, offline."""
    model = tmp_path / "Qwen" / "Qwen2.5-0.5B-Instruct"
    tiny.llama().save_pretrained(model)
    tiny.tokenizer().save_pretrained(model)
    (tmp_path / "docs").mkdir()
    for page in ("evaluation.md", "quickstart.md"):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        (tmp_path / "docs" / page).write_text(text[:DOCUMENT_CHARS], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BLENDRAG_EMBEDDER", "minilm-offline")
    monkeypatch.setenv("BLENDRAG_MAX_NEW_TOKENS", "32")  # the tiny model ends no answer
    monkeypatch.setattr("blendrag_lab.bench.ttft.peak_bytes", no_peak_bytes)
    settings.cache_clear()
    with few_documents(tmp_path / "src/blendrag/demo/corpus"):
        yield tmp_path
    close_shared_engines()
    settings.cache_clear()


def run_in_shell(line):
    command = line.split("  #")[0]
    for text, smaller in SMALLER.items():
        command = re.sub(text, smaller, command) if "bench" in command else command
    program, *arguments = shlex.split(command)
    if program == "make":
        assert re.search(rf"^{arguments[0]}:.*##", (ROOT / "Makefile").read_text(), re.M), line
    elif program not in ("pip", "python3"):
        assert program == "blendrag", line
        asked = "Which sport does Anna Bell enjoy?\n" * (arguments[0] == "chat")
        result = invoke(*arguments, stdin=asked)
        assert result.exit_code == 0, (line, result.stderr)
        assert result.stdout.strip(), line


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES)
def test_every_block_runs_in_order(page, reader, capsys):
    found = re.findall(r"```(\w+)\n(.*?)```", PAGES[page], flags=re.DOTALL)
    assert {language for language, _ in found} <= {"console", "python"}
    assert found
    names = {"__name__": "__main__"}
    for language, block in found:
        if language == "console":
            for line in block.splitlines():
                assert line.startswith("$ "), line
                run_in_shell(line[2:])
            continue
        capsys.readouterr()
        exec(compile(block, page, "exec"), names)
        printed = capsys.readouterr().out
        if "Anna Bell" in block:
            assert "skating" in printed, block  # only a paragraph that says "she" has it
        if "tokens reused" in block:
            assert int(re.search(r"(\d+) tokens reused", printed)[1]) > 0


def test_sizes_of_kv_are_those_that_a_store_takes():
    rows = re.findall(
        r"^\| .* \| (\d+) × (\d+) × (\d+) \| (\S+) KiB \| (\S+) KiB \| (\S+) GiB",
        PAGES["README.md"],
        re.M,
    )
    assert len(rows) >= 4
    for layers, heads, width, *sizes in rows:
        shapes = (LayerShape(int(heads), int(width)),) * int(layers)
        native, int8 = (
            stored_chunk_bytes(KVLayout(shapes, "bfloat16", encoding), 512) / 512 / 1024
            for encoding in ("native", "int8")
        )
        expected = (native, int8, native * 200_000 / 1024**2)
        assert [float(size) for size in sizes] == pytest.approx(expected, rel=0.03)


def test_files_that_the_pages_name_exist():
    for page, text in PAGES.items():
        for link in re.findall(r"\]\((?!http)([^)#]+)", text):
            assert (ROOT / page).parent.joinpath(link).exists(), (page, link)


def test_modules_that_the_architecture_page_names_exist():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+\.py)`", page))
    ends = [
        path.as_posix()
        for top in ("src", "integrations", "lab", "tests")
        for path in (ROOT / top).rglob("*.py")
    ]
    ends.append("/conftest.py")
    assert len(named) > 50
    assert [
        name for name in sorted(named) if not any(end.endswith(f"/{name}") for end in ends)
    ] == []


@pytest.mark.slow
def test_the_site_has_no_broken_link_and_the_reference(tmp_path, monkeypatch):
    """As ``make docs`` builds it; with ``strict`` a broken link is an error."""
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path))
    build(config)
    engine = (tmp_path / "reference/engine.html").read_text(encoding="utf-8")
    assert "Retrieve the nearest chunks" in engine
    assert "max_new_tokens" in engine
    assert ":class:" not in engine
    assert "ChatBlend" in (tmp_path / "reference/langchain.html").read_text(encoding="utf-8")
    assert "Try it" in (tmp_path / "index.html").read_text(encoding="utf-8")


def extras() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return set(project["optional-dependencies"])


def test_what_the_pages_install_with_pip_is_there():
    pages = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        ROOT / "lab/README.md",
        *ROOT.glob("integrations/*/README.md"),
    ]
    lines = [
        shlex.split(line)
        for page in pages
        for line in re.findall(r"pip install ([^`\n]+?)(?:  #.*)?[`\n]", page.read_text("utf-8"))
    ]
    words = [word for line in lines for word in line]
    named = [extra for word in words for extra in re.findall(r"^(?:\.|blendrag)\[(.*)\]", word)]
    assert len(named) > 8
    assert {extra for each in named for extra in each.split(",")} <= extras()
    projects = {ROOT / word for word in words if word.startswith("./")}
    assert projects == {path.parent for path in PYPROJECTS} - {ROOT}
    assert {line[line.index("-c") + 1] for line in lines if "-c" in line} == {"constraints.txt"}


def test_the_quick_start_lists_every_extra():
    install = PAGES["docs/quickstart.md"].partition("## Install")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", install, re.M)) == extras()


def test_the_constraints_satisfy_what_the_packages_require_and_the_frameworks_of_their_users():
    pinned = dict(
        line.lower().replace("_", "-").split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    )
    required = []
    for path in PYPROJECTS:
        project = tomllib.loads(path.read_text())["project"]
        required += project.get("dependencies", [])
        required += [
            each for of in project.get("optional-dependencies", {}).values() for each in of
        ]
    required += re.findall(r"^[\w-]+$", (ROOT / "integrations/newest.txt").read_text(), re.M)
    own = {tomllib.loads(path.read_text())["project"]["name"] for path in PYPROJECTS}
    for requirement in map(Requirement, required):
        name = requirement.name.lower().replace("_", "-")
        assert name in own or requirement.specifier.contains(pinned[name]), requirement


def test_the_page_of_versions_names_what_the_packages_require():
    projects = "\n".join(path.read_text() for path in PYPROJECTS)
    page = (ROOT / "docs/versions.md").read_text(encoding="utf-8")
    named = re.findall(r"^\|[^|]*\| `([^`]+)` \|", page, re.M)
    assert len(named) > 5
    assert [requirement for requirement in named if requirement not in projects] == []


def test_all_packages_have_one_version():
    texts = {path: path.read_text() for path in PYPROJECTS}
    versions = {path: re.search(r'^version = "(.*)"', text, re.M) for path, text in texts.items()}
    assert {found[1] for found in versions.values() if found} == {blendrag.__version__}


def test_what_users_install_has_no_exact_pins_and_a_bound_for_what_is_reached_into():
    lists = []
    for path in PYPROJECTS:
        project = tomllib.loads(path.read_text())["project"]
        extras = project.get("optional-dependencies", {})
        lists += [project.get("dependencies", []), *(extras[name] for name in {*extras} - {"dev"})]
    required = [requirement for each in lists for requirement in each]
    assert [requirement for requirement in required if "==" in requirement] == []
    reached_into = re.compile(r"(torch|transformers|jinja2|accelerate|diskcache|ray)(\[.*\])?>=")
    bounds = [requirement for requirement in required if reached_into.match(requirement)]
    assert len({reached_into.match(requirement)[1] for requirement in bounds}) == 6
    assert [requirement for requirement in bounds if ",<" not in requirement] == []
