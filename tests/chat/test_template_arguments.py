"""Arguments of a chat template: how each form of template switches thinking, and what it does not read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import scripted
import tiny
from blendrag.chat.template_arguments import template_arguments
from blendrag.errors import InvalidOptionError

_TURNS = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
#: The ways in which templates of published models are told to think.
FORMS = {
    "none": _TURNS,
    "enable_thinking": _TURNS
    + "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>{% endif %}",
    "thinking": "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
    + _TURNS
    + "{{ '<think>' if thinking else '</think>' }}",
    "reasoning": _TURNS + "{% if reasoning is defined and not reasoning %}<|NOTHINK|>{% endif %}",
    "thinking_budget": "{% if thinking_budget is defined and thinking_budget == 0 %}No thoughts.{% endif %}"
    + _TURNS,
    "reasoning_effort": "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}"
    "{% endif %}Reasoning: {{ reasoning_effort }}" + _TURNS,
    "reasoning_effort with none": "{% if (reasoning_effort or 'none') not in ['none', 'high'] %}"
    "{{ raise_exception('none or high') }}{% endif %}[{{ reasoning_effort or 'none' }}]" + _TURNS,
    "two names": _TURNS + "{% if enable_thinking or thinking %}<think>{% endif %}",
}
NOT_OFF = ("thinking was not switched off: the chat template has no switch for it",)
LEAST = (
    "thinking was not switched off: the chat template is asked for the least, reasoning_effort=low",
)
OFF: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "none": ({}, NOT_OFF),
    "enable_thinking": ({"enable_thinking": False}, ()),
    "thinking": ({"thinking": False}, ()),
    "reasoning": ({"reasoning": False}, ()),
    "thinking_budget": ({"thinking_budget": 0}, ()),
    "reasoning_effort": ({"reasoning_effort": "low"}, LEAST),
    "reasoning_effort with none": ({"reasoning_effort": "none"}, ()),
    "two names": ({"enable_thinking": False, "thinking": False}, ()),
}


@pytest.mark.parametrize("form", FORMS)
def test_thinking_is_switched_off_as_the_template_has_it(form: str) -> None:
    tokens = scripted.tokens(FORMS[form])
    assert template_arguments(tokens, {}, False, None) == OFF[form]
    assert template_arguments(tokens, {}, None, "none") == OFF[form]
    assert template_arguments(tokens, {}, None, None) == ({}, ())


def test_an_argument_given_by_its_name_goes_before_the_switch() -> None:
    tokens = scripted.tokens(FORMS["enable_thinking"])
    assert template_arguments(tokens, {"enable_thinking": True}, False, None) == (
        {"enable_thinking": True}, (),
    )  # fmt: skip


def test_an_effort_is_passed_on_and_a_note_says_if_nothing_reads_it() -> None:
    read = scripted.tokens(FORMS["reasoning_effort"])
    assert template_arguments(read, {}, None, "high") == ({"reasoning_effort": "high"}, ())
    assert template_arguments(read, {}, False, "high") == ({"reasoning_effort": "high"}, ())
    unread = scripted.tokens(FORMS["enable_thinking"])
    given, (note,) = template_arguments(unread, {}, None, "high")
    assert given == {"reasoning_effort": "high"}
    assert note == "reasoning_effort has no effect: the chat template does not read it"


def test_a_name_that_no_template_knows_is_refused_with_the_one_that_was_meant() -> None:
    tokens = scripted.tokens(FORMS["thinking"] + "{{ date_string }}")
    assert template_arguments(tokens, {"date_string": "1 May"}, None, None)[0]
    assert template_arguments(tokens, {"continue_final_message": False}, None, None)[0]
    for name, meant in (("dat_string", "did you mean date_string?"), ("flavour", "leave it out")):
        with pytest.raises(
            InvalidOptionError, match=f"^chat_template_kwargs has '{name}', which .*{meant}"
        ):
            template_arguments(tokens, {name: 1}, None, None)


def test_a_request_goes_before_the_defaults_of_its_engine(tmp_path: Path) -> None:
    defaults = {"chat_template_kwargs": {"tone": "dry"}, "enable_thinking": False}
    with scripted.engine([], tmp_path / "store", mode="full", **defaults) as engine:
        template = FORMS["enable_thinking"] + "{{ tone }}"
        engine.tokens.tokenizer.chat_template = template

        def prompt(**options: Any) -> str:
            engine.generate("Why?", **options)
            told: str = engine.adapter.model.prompts[-1]
            return told.rpartition("<|end|>")[2]

        closed = "<think>\n\n</think>"
        assert prompt() == f"{closed}dry"
        assert prompt(chat_template_kwargs={"tone": "warm"}) == f"{closed}warm"
        assert prompt(enable_thinking=True) == "dry"
        assert prompt(chat_template_kwargs={"enable_thinking": True}) == "dry"
        assert prompt(reasoning_effort="none") == f"{closed}dry"
        assert prompt(reasoning_effort="high") == f"{closed}dry"
        answer = engine.generate("Why?", reasoning_effort="high")
        assert "reasoning_effort has no effect: the chat template does not read it" in (
            answer.metrics.notes
        )
        with tiny.refuses("^chat_template_kwargs has 'tune', .*did you mean tone"):
            engine.generate("Why?", chat_template_kwargs={"tune": 1})


def test_a_default_of_an_engine_that_is_no_dictionary_is_refused(tmp_path: Path) -> None:
    with tiny.refuses("^chat_template_kwargs 5 .*a dictionary"):
        scripted.engine([], tmp_path / "store", chat_template_kwargs=5)


@pytest.mark.parametrize("name", ["messages", "tools", "chat_template", "tokenize"])
def test_what_is_no_argument_of_a_template_is_refused(name: str) -> None:
    tokens = scripted.tokens(FORMS["thinking"])
    with pytest.raises(
        InvalidOptionError, match=f"^chat_template_kwargs has '{name}', no argument of "
    ):
        template_arguments(tokens, {name: 1}, None, None)
