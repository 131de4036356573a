"""Tools and calls that are too deep, too large or not JSON are one sentence, before a template shows them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import scripted
import tiny
from blendrag.engine import BlendEngine, Options
from blendrag.engine.nested import MAX_DEPTH, MAX_VALUES, check_nested


def deep(depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        made = {"a": made}
    return made


def cyclic() -> dict[str, Any]:
    made: dict[str, Any] = {}
    made["a"] = [made]
    return made


def shared() -> list[Any]:
    """2⁶⁰ values."""
    made: list[Any] = [1]
    for _ in range(60):
        made = [made, made]
    return made


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "deep": (lambda: deep(10_000), f"is nested more than {MAX_DEPTH} deep"),
    "deeper than is rendered": (
        lambda: deep(MAX_DEPTH + 1),
        f"is nested more than {MAX_DEPTH} deep",
    ),
    "cyclic": (cyclic, "or contains itself"),
    "shared": (shared, f"holds more than {MAX_VALUES} values"),
    "wide": (lambda: [0] * (MAX_VALUES + 1), f"holds more than {MAX_VALUES} values"),
    "no number": (lambda: {"default": float("nan")}, "holds nan, which JSON has not"),
    "infinite": (lambda: {"default": [float("-inf")]}, "holds -inf, which JSON has not"),
    "a surrogate": (lambda: {"description": "\ud800"}, "lone surrogate"),
    "a surrogate as a name": (lambda: {"\ud800": 1}, "lone surrogate"),
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with scripted.engine(
        (), tmp_path_factory.mktemp("s") / "s", default="Yes.", mode="full"
    ) as made:
        yield made


@pytest.mark.parametrize(("make", "words"), WRONG.values(), ids=WRONG)
def test_a_tool_is_refused_by_its_number(
    engine: BlendEngine, make: Callable[[], Any], words: str
) -> None:
    good = {"type": "function", "function": {"name": "f", "parameters": {}}}
    bad = {"type": "function", "function": {"name": "g", "parameters": {"properties": make()}}}
    with tiny.refuses(rf"^tools\[1\] {words}|^tools\[1\] .*{words}"):
        engine.generate("hello", Options(tools=(good, bad)))


#: In a call, what is no number is a word (tests/chat/test_messages.py). Values are counted as those of tools.
WRONG_CALLS = {
    name: wrong
    for name, wrong in WRONG.items()
    if not re.search("JSON has not|holds more", wrong[1])
}


@pytest.mark.parametrize(("make", "words"), WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_a_call_in_an_earlier_message_is_refused_by_its_number(
    engine: BlendEngine, make: Callable[[], Any], words: str
) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": make()}}}
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "user", "content": "hello"},
    ]
    with tiny.refuses(f"^a tool call in message 1 .*{words}"):
        engine.generate(messages)


def test_what_is_deep_but_allowed_is_rendered(engine: BlendEngine) -> None:
    check_nested(deep(MAX_DEPTH - 2), "it")
    tool = {"type": "function", "function": {"name": "f", "parameters": deep(MAX_DEPTH - 6)}}
    recursive = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "properties": {"x": {"$ref": "#/$defs/a"}}}
    other = {"type": "function", "function": {"name": "g", "parameters": recursive}}
    assert engine.generate("hello", Options(tools=(tool, other))).text == "Yes."
