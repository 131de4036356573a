"""What of a streamed answer is said at once, and what is held back because it may become a call."""

from __future__ import annotations

import pytest

import scripted
from blendrag.frameworks.said import Said
from blendrag.frameworks.tool_choice import call_form, forced_opening
from blendrag.frameworks.tools import parse
from templates import LLAMA, MISTRAL, XML, tokens

TEMPLATES = {"hermes": scripted.TEMPLATE, "llama": LLAMA, "mistral": MISTRAL, "xml": XML}
CALLS = {
    "hermes": '<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>',
    "llama": '{"name": "search", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "search", "arguments": {}}]',
    "xml": "<function=search>\n</function>",
}
PLAIN = "See [1] and [TOOL_BOX], {braces} and a < b.  Done"


def told(said: Said, text: str) -> list[str]:
    """What each character of ``text`` adds."""
    return [said.add(character) for character in text]


@pytest.mark.parametrize("template", TEMPLATES)
def test_text_is_told_as_it_comes(template: str) -> None:
    said = Said(tokens(TEMPLATES[template]))
    pieces = told(said, PLAIN)
    assert "".join(pieces) == PLAIN == said.text
    assert max(map(len, pieces)) <= len(" [TOOL_B")
    assert said.rest(PLAIN) == ""


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_call_is_held_back(template: str) -> None:
    said = Said(tokens(TEMPLATES[template]))
    assert "".join(told(said, CALLS[template])) == ""
    assert said.rest("") == ""


@pytest.mark.parametrize("template", ["hermes", "mistral", "xml"])
def test_text_before_a_call_is_told_without_the_white_space_between(template: str) -> None:
    said = Said(tokens(TEMPLATES[template]))
    assert "".join(told(said, f"I will look. \n\n{CALLS[template]}")) == "I will look."


def test_no_text_is_told_twice_where_an_answer_begins_with_white_space() -> None:
    """Text beside calls is stripped once they are read, after it was told as it came."""
    made = tokens(scripted.TEMPLATE)
    said, answer = Said(made), f"\n\nI will look.\n{CALLS['hermes']}\nSoon."
    began = "".join(told(said, answer))
    parsed = parse(answer, made)
    assert parsed.calls
    assert (began + said.rest(parsed.text)).strip() == parsed.text
    assert parsed.text.startswith("I will look.")


@pytest.mark.parametrize("template", TEMPLATES)
def test_nothing_is_said_in_a_call_that_was_begun_for_the_model(template: str) -> None:
    made = tokens(TEMPLATES[template])
    said = Said(made, forced_opening(made, "search"))
    assert "".join(told(said, ' {"q": "x"}} and so on')) == ""


def test_control_tokens_are_never_said() -> None:
    said = Said(tokens(scripted.TEMPLATE))
    assert "".join(told(said, "Yes.<|end|>")) == "Yes."


def test_without_tools_all_is_said() -> None:
    said = Said()
    text = f"  {CALLS['hermes']}<|end|> "
    assert told(said, text) == list(text)
    assert said.rest(text) == ""


def test_a_template_is_asked_once_how_it_writes_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tokens(scripted.TEMPLATE)
    rendered: list[object] = []
    real = made.render
    monkeypatch.setattr(made, "render", lambda *a, **k: rendered.append(a) or real(*a, **k))
    first = call_form(made)
    assert rendered
    rendered.clear()
    assert call_form(made) == first
    Said(made)
    assert not rendered
    made.tokenizer.chat_template = LLAMA
    assert call_form(made) != first
