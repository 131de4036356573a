"""Tool calls are parsed and begun in the form of the model's own template."""

from __future__ import annotations

import json
from typing import Any

import pytest

import scripted
import tiny
from blendrag.engine import Options
from blendrag.errors import InvalidInputError
from blendrag.frameworks.tools import (
    CallForm,
    Parsed,
    call_form,
    chosen_tool,
    opening_for,
    parse,
)
from blendrag.model.tokens import Tokens
from scripted import tokens

SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches the corpus.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    },
}
HERMES = Tokens(scripted.tokenizer())
LLAMA = tokens("{{ tools }}{{ messages }}", "<|python_tag|>")
MISTRAL = tokens("[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]{{ messages }}", "[TOOL_CALLS]")
CALL = {"name": "search", "arguments": {"query": "ships"}}
AS_JSON = json.dumps(CALL)
PARAMETERS = json.dumps({"name": "search", "parameters": {"query": "ships"}})

# -- parsing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "text", "rest", "count"),
    [
        (HERMES, f"<tool_call>\n{AS_JSON}\n</tool_call>", "", 1),
        (HERMES, f"Let me look.\n<tool_call>\n{AS_JSON}\n</tool_call>", "Let me look.", 1),
        (HERMES, f"<tool_call>\n{AS_JSON}\n", "", 1),
        (HERMES, f"<tool_call>\n{AS_JSON}\n</tool_call>\n" * 2, "", 2),
        (HERMES, f"<tool_call>{AS_JSON}<tool_call>{AS_JSON}</tool_call>", "", 2),
        (LLAMA, PARAMETERS, "", 1),
        (LLAMA, f"<|python_tag|>{PARAMETERS}", "", 1),
        (LLAMA, f"  {AS_JSON}\n", "", 1),
        (LLAMA, json.dumps({"type": "function", "function": CALL}), "", 1),
        (LLAMA, f"{PARAMETERS}; {PARAMETERS}", "", 2),
        (LLAMA, f"{PARAMETERS}\n{PARAMETERS}", "", 2),
        (MISTRAL, f"[TOOL_CALLS][{AS_JSON}]", "", 1),
        (MISTRAL, f"[TOOL_CALLS] {AS_JSON}", "", 1),
        (MISTRAL, '[TOOL_CALLS]search[ARGS]{"query": "ships"}', "", 1),
        (MISTRAL, '[TOOL_CALLS]search[CALL_ID]abc123def[ARGS]{"query": "ships"}', "", 1),
        (MISTRAL, f"I look.[TOOL_CALLS][{AS_JSON}]", "I look.", 1),
        (MISTRAL, f"[TOOL_CALLS][{AS_JSON}, {AS_JSON}]", "", 2),
        (MISTRAL, '[TOOL_CALLS]search[ARGS]{"query": "ships"}' * 2, "", 2),
    ],
)
def test_calls_are_parsed_with_different_ids(model, text, rest, count):
    found = parse(text, model)
    assert [(c.name, c.arguments) for c in found.calls] == [("search", {"query": "ships"})] * count
    assert len({call.id for call in found.calls}) == count
    assert all(len(call.id) == 9 and call.id.isalnum() for call in found.calls)  # for Mistral
    assert (found.text, found.invalid) == (rest, ())


@pytest.mark.parametrize(
    ("model", "text", "reason"),
    [
        (HERMES, '<tool_call>\n{"name": "search", "arguments": {"que', "not JSON"),
        (HERMES, '<tool_call>{"arguments": {}}</tool_call>', "no name"),
        (HERMES, '<tool_call>{"name": "search", "arguments": [1]}</tool_call>', "a list"),
        (HERMES, "<tool_call>7</tool_call>", "no name"),
        (LLAMA, '{"name": "search", "parameters": {"que', "not JSON"),
        (LLAMA, "<|python_tag|>search(ships)", "not JSON"),
        (MISTRAL, '[TOOL_CALLS][{"name": "se', "not JSON"),
        (MISTRAL, '[TOOL_CALLS]search[ARGS]{"que', "not JSON"),
    ],
)
def test_a_malformed_call_is_invalid_with_a_reason(model, text, reason):
    found = parse(text, model)
    (invalid,) = found.invalid
    assert found.calls == ()
    assert reason in invalid.error
    assert invalid.text
    assert tiny.one_sentence(invalid.error)


@pytest.mark.parametrize("model", [HERMES, LLAMA, MISTRAL])
@pytest.mark.parametrize(
    "text",
    [
        'The answer is {"name": "search"}.',
        '{"name": "Place", "built": 1874}',
        '["search", {"query": "ships"}]',
        "",
        "  two  spaces are kept\n",
    ],
)
def test_other_answers_are_not_calls(model, text):
    assert parse(text, model) == Parsed(text)


def test_parsing_details():
    found = parse(f"<tool_call>{AS_JSON}</tool_call><tool_call>{{oops</tool_call>", HERMES)
    assert len(found.calls) == len(found.invalid) == 1
    assert parse('<tool_call>{"name": "now"}</tool_call>', HERMES).calls[0].arguments == {}
    text = json.dumps({"name": "search", "arguments": json.dumps({"query": "ships"})})
    assert parse(f"<tool_call>{text}</tool_call>", HERMES).calls[0].arguments == {"query": "ships"}
    # control tokens are not part of the text
    assert parse(f"I look.<|start|>[TOOL_CALLS][{AS_JSON}]<|end|>", MISTRAL).text == "I look."
    assert parse("It built ships.<|end|>", LLAMA).text == "It built ships."


RESPONSE_TEMPLATE = {
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


def test_a_tokenizer_that_parses_answers_itself_is_used():
    model = tokens("{{ tools }}<|start|>assistant\n")
    model.tokenizer.response_template = RESPONSE_TEMPLATE
    found = parse(f"I look.<call>{AS_JSON}</call>", model)
    (call,) = found.calls
    assert (call.name, call.arguments) == ("search", {"query": "ships"})
    assert found.text == "I look."
    assert parse(f"<tool_call>{AS_JSON}</tool_call>", model).calls == ()
    # the prompt may have begun the answer
    text = f"hm</think>I look.<call>{AS_JSON}</call>"
    assert parse(text, model, prompt="<|start|>assistant\n<think>").text == "I look."
    assert parse(text, model).text.startswith("hm")
    (invalid,) = parse('<call>{"name": </call>', model).invalid
    assert invalid.text
    assert tiny.one_sentence(invalid.error)


# -- beginning a call --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "opening", "arguments"),
    [
        (scripted.TEMPLATE, '<tool_call>\n{"name": "', '", "arguments":'),
        (scripted.LLAMA, '{"name": "', '", "parameters":'),
        (scripted.MISTRAL, '[TOOL_CALLS][{"name": "', '", "arguments":'),
    ],
    ids=["hermes", "llama", "mistral"],
)
def test_a_call_is_begun_as_the_template_writes_it(template, opening, arguments):
    made = tokens(template)
    named = f"{opening}search{arguments}"
    assert opening_for(made, "any", ()) == opening
    assert opening_for(made, "search", ()) == named
    rest = ' {"q": "x"}}]' if "TOOL_CALLS" in named else ' {"q": "x"}}'
    call = parse(named + rest, made).calls[0]
    assert (call.name, call.arguments) == ("search", {"q": "x"})


@pytest.mark.parametrize(
    "template",
    [
        tiny.CHAT_TEMPLATE,  # writes no calls
        "{% for m in messages %}{{ m.tool_calls[0] }}{% endfor %}",  # fails without a call
        "{{ messages | length }}",  # shows nothing
    ],
)
def test_a_call_cannot_be_begun_if_the_template_writes_none(template):
    assert call_form(tokens(template)) is None
    with pytest.raises(InvalidInputError, match="does not show how a tool call begins"):
        opening_for(tokens(template), "any", ())
    # arguments that are not JSON: only the name is begun
    assert call_form(tokens(scripted.XML)) == CallForm("<function=", "")
    assert opening_for(tokens(scripted.XML), "search", ()) == "<function=search"


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, None), (False, None), (True, "any"), ("required", "any"), ("any", "any"),
        ("auto", "auto"), ("none", "none"), ("search", "search"), ({"name": "search"}, "search"),
        ({"type": "function", "function": {"name": "search"}}, "search"),
    ],
)  # fmt: skip
def test_tool_choices_of_the_frameworks(choice, expected):
    assert chosen_tool(choice, [SEARCH]) == expected


def test_an_unknown_tool_choice_is_refused():
    for choice in ("find", {"name": "find"}, 3, {}):
        with pytest.raises(InvalidInputError, match=r"tool_choice .* \(search\)"):
            chosen_tool(choice, [SEARCH])


# -- through the engine ------------------------------------------------------------------------------


def test_a_call_and_its_result_go_through_the_engine(tmp_path):
    script = [
        ("<tool_response>", "It built ships."),
        ("What did", "I look. " + scripted.call("search", query="Schiffe früher 日本")),
    ]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What did they do?"}]
    options = Options(tools=(SEARCH,))
    with scripted.engine(script, tmp_path / "s") as engine:
        first = parse(engine.generate(messages, options).text, engine.resources.tokens)
        (call,) = first.calls
        assert (first.text, call.arguments) == ("I look.", {"query": "Schiffe früher 日本"})
        assert "Searches the corpus." in engine.adapter.model.prompts[-1]
        function = {"name": call.name, "arguments": call.arguments}
        messages += [
            {"role": "assistant", "content": first.text, "tool_calls": [{"function": function}]},
            {"role": "tool", "content": "ships", "tool_call_id": call.id},
        ]
        assert engine.generate(messages, options).text == "It built ships."
        with pytest.raises(InvalidInputError, match="apply_chat_template") as raised:
            engine.generate("find", Options(tools=(SEARCH,), apply_chat_template=False))
        assert tiny.one_sentence(str(raised.value))


def test_control_tokens_of_calls_stay_in_the_answer_to_tools(tmp_path):
    reply = f"[TOOL_CALLS][{AS_JSON}]"
    template = "<|bos|>{{ tools }}[TOOL_CALLS]{{ messages[0]['content'] }}"
    words = tokens(template, "[TOOL_CALLS]").tokenizer
    model = scripted.model(default=reply)
    model.words = words
    with tiny.engine(model, tmp_path / "s", tokenizer=words, max_new_tokens=100) as engine:
        options = Options(tools=(SEARCH,))
        assert engine.generate("find", options).text == reply  # without the end token
        assert "".join(engine.stream("find", options)) == reply
        assert "[TOOL_CALLS]" not in engine.generate("find").text


@pytest.mark.parametrize(
    ("model", "opening"),
    [(HERMES, "<tool_call>"), (MISTRAL, "[TOOL_CALLS]"), (LLAMA, '{"name": "f", "arguments": ')],
)
def test_calls_that_are_nested_too_deeply_are_invalid(model, opening):
    found = parse(opening + "[" * 100_000, model)
    assert not found.calls
    assert found.invalid


def test_the_text_of_an_answer_of_many_wrong_calls_is_kept_once():
    for model, wrong in (
        (LLAMA, "<|python_tag|>" + '{"a": 1};' * 2000),
        (MISTRAL, "[TOOL_CALLS]" + "{}" * 2000),
    ):
        found = parse(wrong, model)
        assert len(found.invalid) == 2000
        assert sum(len(call.text) for call in found.invalid) <= len(wrong)
    (first, *others) = parse("[TOOL_CALLS]" + json.dumps([{"a": 1}] * 500), MISTRAL).invalid
    assert first.text == json.dumps([{"a": 1}] * 500)
    assert {call.text for call in others} == {""}


@pytest.mark.parametrize(
    ("model", "answer"),
    [
        (MISTRAL, "[TOOL_CALLS]search" + " " * 200_000),  # took quadratic time
        (MISTRAL, "[TOOL_CALLS]" + "a" * 200_000),
        (MISTRAL, "[TOOL_CALLS]a[CALL_ID]" * 20_000),
        (HERMES, "<tool_call>" * 50_000),
        (
            HERMES,
            "<tool_call>" + json.dumps({"name": "search", "arguments": {"q": "x" * 5_000_000}}),
        ),
        (LLAMA, '{"name": "search", "parameters": ' + " " * 1_000_000),
        (LLAMA, "<|python_tag|>" + " ;," * 200_000),
    ],
)
def test_a_long_answer_is_parsed(model, answer):
    found = parse(answer, model)
    assert (
        len(found.calls) + len(found.invalid) <= answer.count("[TOOL") + answer.count("<tool") + 1
    )
