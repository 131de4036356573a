"""Calls are read in the form the model's own template writes them, and nothing else is taken for one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import scripted
import tiny
from blendrag.engine import BlendEngine, Options
from blendrag.errors import InvalidInputError
from blendrag.frameworks.tools import Parsed, has_tools, parse
from blendrag.model.tokens import Tokens

SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches the corpus.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    },
}


def tokens(template: str | dict[str, str] | None, *special: str) -> Tokens:
    made = tiny.tokenizer()
    if special:
        made.add_special_tokens({"extra_special_tokens": ["<|start|>", *special]})
    made.chat_template = template
    return Tokens(made)


HERMES = Tokens(scripted.tokenizer())
LLAMA = tokens("{{ tools }}{{ messages }}", "<|python_tag|>")
MISTRAL = tokens("[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]{{ messages }}", "[TOOL_CALLS]")

CALL = {"name": "search", "arguments": {"query": "ships"}}
AS_JSON = json.dumps(CALL)
PARAMETERS = json.dumps({"name": "search", "parameters": {"query": "ships"}})


@pytest.mark.parametrize(
    ("model", "text", "said"),
    [
        (HERMES, f"<tool_call>\n{AS_JSON}\n</tool_call>", ""),
        (HERMES, f"<tool_call>{AS_JSON}</tool_call>", ""),
        (HERMES, f"Let me look.\n<tool_call>\n{AS_JSON}\n</tool_call>", "Let me look."),
        (HERMES, f"<tool_call>\n{AS_JSON}\n", ""),
        (LLAMA, PARAMETERS, ""),
        (LLAMA, f"<|python_tag|>{PARAMETERS}", ""),
        (LLAMA, f"  {AS_JSON}\n", ""),
        (LLAMA, json.dumps({"type": "function", "function": CALL}), ""),
        (MISTRAL, f"[TOOL_CALLS][{AS_JSON}]", ""),
        (MISTRAL, f"[TOOL_CALLS] {AS_JSON}", ""),
        (MISTRAL, '[TOOL_CALLS]search[ARGS]{"query": "ships"}', ""),
        (MISTRAL, '[TOOL_CALLS]search[CALL_ID]abc123def[ARGS]{"query": "ships"}', ""),
        (MISTRAL, f"I look.[TOOL_CALLS][{AS_JSON}]", "I look."),
    ],
)
def test_a_call_is_read(model: Tokens, text: str, said: str) -> None:
    found = parse(text, model)
    (call,) = found.calls
    assert (call.name, call.arguments) == ("search", {"query": "ships"})
    assert found.invalid == ()
    assert found.text == said


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (HERMES, f"<tool_call>\n{AS_JSON}\n</tool_call>\n" * 2),
        (HERMES, f"<tool_call>{AS_JSON}<tool_call>{AS_JSON}</tool_call>"),
        (LLAMA, f"{PARAMETERS}; {PARAMETERS}"),
        (LLAMA, f"{PARAMETERS}\n{PARAMETERS}"),
        (MISTRAL, f"[TOOL_CALLS][{AS_JSON}, {AS_JSON}]"),
        (MISTRAL, '[TOOL_CALLS]search[ARGS]{"query": "ships"}' * 2),
    ],
)
def test_several_calls_are_read_and_told_apart(model: Tokens, text: str) -> None:
    found = parse(text, model)
    assert [call.arguments for call in found.calls] == [{"query": "ships"}] * 2
    assert found.calls[0].id != found.calls[1].id
    assert all(
        len(c.id) == 9 and c.id.isalnum() for c in found.calls
    )  # as Mistral's template wants
    assert found.invalid == ()


@pytest.mark.parametrize(
    ("model", "text", "says"),
    [
        (HERMES, '<tool_call>\n{"name": "search", "arguments": {"que', "no JSON"),
        (HERMES, '<tool_call>{"arguments": {}}</tool_call>', "no name"),
        (HERMES, '<tool_call>{"name": "search", "arguments": [1]}</tool_call>', "a list"),
        (HERMES, '<tool_call>{"name": "search", "arguments": "ships"}</tool_call>', "no JSON"),
        (HERMES, "<tool_call>7</tool_call>", "no name"),
        (LLAMA, '{"name": "search", "parameters": {"que', "no JSON"),
        (LLAMA, "<|python_tag|>search(ships)", "no JSON"),
        (MISTRAL, '[TOOL_CALLS][{"name": "se', "no JSON"),
        (MISTRAL, '[TOOL_CALLS]search[ARGS]{"que', "no JSON"),
    ],
)
def test_what_was_meant_to_be_a_call_is_invalid_with_the_reason(
    model: Tokens, text: str, says: str
) -> None:
    found = parse(text, model)
    assert found.calls == ()
    (invalid,) = found.invalid
    assert says in invalid.error
    assert invalid.text
    assert tiny.one_sentence(invalid.error)


@pytest.mark.parametrize("model", [HERMES, LLAMA, MISTRAL])
@pytest.mark.parametrize(
    "text",
    [
        "It built ships in 1874.",
        'The answer is {"name": "search"}.',
        '{"name": "Place", "built": 1874}',
        '["search", {"query": "ships"}]',
        "",
        "  two  spaces are kept\n",
    ],
)
def test_an_answer_is_not_taken_for_a_call(model: Tokens, text: str) -> None:
    assert parse(text, model) == Parsed(text)


def test_one_call_that_cannot_be_read_does_not_hide_the_others() -> None:
    text = f"<tool_call>{AS_JSON}</tool_call><tool_call>{{oops</tool_call>"
    found = parse(text, HERMES)
    assert len(found.calls) == len(found.invalid) == 1


def test_arguments_may_be_left_out_or_come_as_text() -> None:
    assert parse('<tool_call>{"name": "now"}</tool_call>', HERMES).calls[0].arguments == {}
    text = json.dumps({"name": "search", "arguments": json.dumps({"query": "ships"})})
    assert parse(f"<tool_call>{text}</tool_call>", HERMES).calls[0].arguments == {"query": "ships"}


def test_control_tokens_are_no_part_of_what_is_said() -> None:
    assert parse(f"I look.<|start|>[TOOL_CALLS][{AS_JSON}]<|end|>", MISTRAL).text == "I look."
    assert parse("It built ships.<|end|>", LLAMA).text == "It built ships."


# -- tokenizers that read answers themselves ----------------------------------------------------

RESPONSE = {
    "start_anchor": "<|start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<call>",
            "close": "</call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {},
    },
}


@pytest.fixture
def own() -> Tokens:
    made = tokens("{{ tools }}<|start|>assistant\n")
    made.tokenizer.response_template = RESPONSE
    return made


def test_a_tokenizer_that_reads_answers_itself_is_believed(own: Tokens) -> None:
    found = parse(f"I look.<call>{AS_JSON}</call>", own)
    (call,) = found.calls
    assert (call.name, call.arguments) == ("search", {"query": "ships"})
    assert found.text == "I look."
    other_form = parse(f"<tool_call>{AS_JSON}</tool_call>", own)
    assert other_form.calls == ()


def test_it_is_told_what_the_prompt_has_begun(own: Tokens) -> None:
    text = f"hm</think>I look.<call>{AS_JSON}</call>"
    assert parse(text, own, prompt="<|start|>assistant\n<think>").text == "I look."
    assert parse(text, own).text.startswith("hm")


def test_what_it_cannot_read_is_invalid(own: Tokens) -> None:
    found = parse('<call>{"name": </call>', own)
    assert found.calls == ()
    assert found.invalid[0].text
    assert tiny.one_sentence(found.invalid[0].error)


# -- whether there are tools --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (scripted.TEMPLATE, True),
        (tiny.CHAT_TEMPLATE, False),
        (None, False),
        ("{% if tools %}{{ raise_exception('no tools here') }}{% endif %}{{ messages }}", False),
        ("{% set n = tools | length if tools else 0 %}{{ messages }}", False),
        ({"default": tiny.CHAT_TEMPLATE, "tool_use": scripted.TEMPLATE}, True),
        ({"default": tiny.CHAT_TEMPLATE, "rag": tiny.CHAT_TEMPLATE}, False),
    ],
)
def test_a_model_has_tools_if_its_template_shows_them(template: Any, expected: bool) -> None:
    assert has_tools(tokens(template)) == expected


def test_a_template_that_is_replaced_is_looked_at_again() -> None:
    made = tokens(tiny.CHAT_TEMPLATE)
    assert not has_tools(made)
    made.tokenizer.chat_template = scripted.TEMPLATE
    assert has_tools(made)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    script = [
        ("<tool_response>", "It built ships."),
        ("What did", "I look. " + scripted.call("search", query="Schiffe früher 日本")),
    ]
    with scripted.engine(script, tmp_path_factory.mktemp("tools") / "s") as made:
        yield made


def test_a_call_goes_through_the_engine_and_its_result_back(engine: BlendEngine) -> None:
    tokens = engine.resources.tokens
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What did they do?"}]
    options = Options(tools=(SEARCH,))
    first = parse(engine.generate(messages, options).text, tokens)
    assert first.text == "I look."
    (call,) = first.calls
    assert call.arguments == {"query": "Schiffe früher 日本"}
    shown = engine.adapter.model.prompts[-1]
    assert "Searches the corpus." in shown
    function = {"name": call.name, "arguments": call.arguments}
    messages += [
        {"role": "assistant", "content": first.text, "tool_calls": [{"function": function}]},
        {"role": "tool", "content": "ships", "tool_call_id": call.id},
    ]
    assert engine.generate(messages, options).text == "It built ships."


def test_control_tokens_that_calls_are_written_with_stay_in_the_text(tmp_path: Any) -> None:
    said = f"[TOOL_CALLS][{AS_JSON}]"
    words = tiny.tokenizer()
    words.add_special_tokens({"extra_special_tokens": ["<|start|>", "[TOOL_CALLS]"]})
    words.chat_template = "<|bos|>{{ tools }}[TOOL_CALLS]{{ messages[0]['content'] }}"
    model = scripted.model(default=said)
    model.words = words
    with tiny.engine(model, tmp_path / "s", tokenizer=words, max_new_tokens=100) as engine:
        with_tools = engine.generate("find", Options(tools=(SEARCH,)))
        assert with_tools.text == said  # and not the end token
        assert len(parse(with_tools.text, engine.resources.tokens).calls) == 1
        assert "[TOOL_CALLS]" not in engine.generate("find").text
        pieces = engine.stream("find", Options(tools=(SEARCH,)))
        assert "".join(pieces) == said


def test_tools_for_a_model_without_are_one_sentence(tmp_path: Any) -> None:
    with tiny.engine(tiny.llama(), tmp_path / "s") as plain:
        with pytest.raises(InvalidInputError, match="does not support tools") as raised:
            plain.generate("find", Options(tools=(SEARCH,)))
        assert tiny.one_sentence(str(raised.value))
        assert plain.generate("find").text


def test_tools_for_raw_text_are_one_sentence(engine: BlendEngine) -> None:
    with pytest.raises(InvalidInputError, match="only a chat template shows them") as raised:
        engine.generate("find", Options(tools=(SEARCH,), apply_chat_template=False))
    assert tiny.one_sentence(str(raised.value))
