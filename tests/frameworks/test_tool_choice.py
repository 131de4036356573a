"""How a call is begun for a model: in the words of its own template, whichever these are."""

from __future__ import annotations

from typing import Any

import pytest

import scripted
import tiny
from blendrag.errors import InvalidInputError
from blendrag.frameworks.tool_choice import CallForm, call_form, chosen_tool, forced_opening
from blendrag.frameworks.tools import parse
from templates import LLAMA, MISTRAL, XML, tokens


@pytest.mark.parametrize(
    ("template", "named", "unnamed"),
    [
        (
            scripted.TEMPLATE,
            '<tool_call>\n{"name": "search", "arguments":',
            '<tool_call>\n{"name": "',
        ),
        (LLAMA, '{"name": "search", "parameters":', '{"name": "'),
        (MISTRAL, '[TOOL_CALLS][{"name": "search", "arguments":', '[TOOL_CALLS][{"name": "'),
    ],
    ids=["hermes", "llama", "mistral"],
)
def test_a_call_is_begun_as_the_template_writes_it(template: str, named: str, unnamed: str) -> None:
    made = tokens(template)
    assert forced_opening(made, "search") == named
    assert forced_opening(made) == unnamed
    rest = ' {"q": "x"}}]' if "TOOL_CALLS" in named else ' {"q": "x"}}'
    call = parse(named + rest, made).calls[0]
    assert (call.name, call.arguments) == ("search", {"q": "x"})


@pytest.mark.parametrize(
    "template",
    [
        tiny.CHAT_TEMPLATE,  # writes no calls
        "{% for m in messages %}{{ m.tool_calls[0] }}{% endfor %}",  # refuses a message without any
        "{{ messages | length }}",  # shows nothing
    ],
)
def test_a_template_that_writes_no_calls_is_refused(template: str) -> None:
    assert call_form(tokens(template)) is None
    with pytest.raises(InvalidInputError, match="does not show how a tool call begins"):
        forced_opening(tokens(template))


def test_where_arguments_are_not_json_only_the_name_is_begun() -> None:
    assert call_form(tokens(XML)) == CallForm("<function=", "")
    assert forced_opening(tokens(XML), "search") == "<function=search"


@pytest.mark.parametrize(
    ("choice", "meant"),
    [
        (None, None), (False, None), (True, "any"), ("required", "any"), ("any", "any"),
        ("auto", "auto"), ("none", "none"), ("search", "search"), ({"name": "search"}, "search"),
        ({"type": "function", "function": {"name": "search"}}, "search"),
    ],
)  # fmt: skip
def test_choices_are_spelt_as_the_frameworks_do(choice: Any, meant: str | None) -> None:
    assert chosen_tool(choice, [{"function": {"name": "search"}}]) == meant


@pytest.mark.parametrize("choice", ["find", {"name": "find"}, 3, {}])
def test_a_choice_that_is_no_tool_is_named(choice: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"tool_choice .* \(search\)"):
        chosen_tool(choice, [{"function": {"name": "search"}}])
