"""A call that must be made is begun as the model's chat template writes calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

import scripted
import tiny
from blendrag.chat.calls import ToolCall
from blendrag.chat.forcing import (
    CallForm,
    call_form,
    chosen_tool,
    opening_for,
    refuse_unreadable,
)
from blendrag.chat.learned import format_of
from blendrag.chat.reply import take_apart
from blendrag.engine import Options
from blendrag.errors import InvalidInputError
from chat_forms import CODER, GLM, GRANITE, HARMONY, KIMI, ODD, PHI, QWEN3, QWQ, R1
from scripted import tokens

SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches the corpus.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    },
}
CALL = {"name": "search", "arguments": {"query": "ships"}}
AS_JSON = json.dumps(CALL)


@pytest.mark.parametrize(
    ("template", "opening", "rest"),
    [
        (scripted.TEMPLATE, '<tool_call>\n{"name": "search", "arguments":', ' {"q": "x"}}'),
        (scripted.LLAMA, '{"name": "search", "parameters":', ' {"q": "x"}}'),
        (scripted.MISTRAL, '[TOOL_CALLS][{"name": "search", "arguments":', ' {"q": "x"}}]'),
        (scripted.XML, "<function=search", ">{}</function>"),
        (
            QWEN3,
            '<think>\n\n</think>\n\n<tool_call>\n{"name": "search", "arguments":',
            ' {"q": "x"}}',
        ),
        (QWQ, '\n</think>\n\n<tool_call>\n{"name": "search", "arguments":', ' {"q": "x"}}'),
        (CODER, "<tool_call>\n<function=search>", "<parameter=q>\nx\n</parameter></function>"),
        (GLM, "<tool_call>search", "\n<arg_key>q</arg_key><arg_value>x</arg_value></tool_call>"),
        (PHI, '<|tool_call|>[{"name": "search", "arguments":', ' {"q": "x"}}]<|/tool_call|>'),
        (GRANITE, '<|tool_call|>[{"name": "search", "arguments":', ' {"q": "x"}}]'),
        (
            HARMONY,
            " to=functions.search<|channel|>commentary json<|message|>",
            '{"q": "x"}<|call|>',
        ),
        (
            KIMI,
            "<|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>",
            '{"q": "x"}<|tool_call_end|>',
        ),
        (
            R1,
            "\n</think>\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json",
            '\n{"q": "x"}\n```<｜tool▁call▁end｜>',
        ),
    ],
    ids=lambda value: None if len(value) > 60 else "",
)
def test_a_call_is_begun_as_the_template_writes_it(template, opening, rest):
    made = tokens(template)
    assert opening_for(made, "search", ()) == opening
    assert opening_for(made, "any", ()) in (opening, opening.partition("search")[0].rstrip())
    assert opening_for(made, "any", [SEARCH]) == opening
    assert {opening_for(made, choice, ()) for choice in (None, "auto", "none")} == {""}
    form = format_of(made)
    begun = form.begun_by(made.render([{"role": "user", "content": "x"}]))
    reply = take_apart(rest, form, [SEARCH], begun + opening)
    (call,) = reply.calls
    assert isinstance(call, ToolCall)
    assert call.name == "search"
    assert call.arguments in ({"q": "x"}, {})
    assert (reply.text, reply.reasoning, reply.invalid) == ("", "", ())
    refuse_unreadable(made, [SEARCH])


def test_thinking_that_is_turned_off_is_closed_once():
    made = tokens(QWEN3)
    opening = opening_for(made, "search", (), {"enable_thinking": False})
    assert opening == '<tool_call>\n{"name": "search", "arguments":'


def test_ids_in_an_opening_are_new():
    template = scripted.MISTRAL.replace(
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, '
        '"id": "{{ c.id }}"}',
        "{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}",
    ).replace("[TOOL_CALLS][{%", "[TOOL_CALLS]{%")
    one, other = (opening_for(tokens(template), "search", ()) for _ in range(2))
    assert one.startswith("[TOOL_CALLS]search[CALL_ID]")
    assert one != other


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
    refuse_unreadable(tokens(template), [SEARCH])


def test_calls_that_cannot_be_read_are_refused_before_they_are_made():
    made = tokens(ODD)
    form = call_form(made)
    assert form == CallForm("<<", "", is_readable=False)
    with pytest.raises(InvalidInputError, match="cannot read") as raised:
        refuse_unreadable(made, [SEARCH])
    assert tiny.one_sentence(str(raised.value))
    refuse_unreadable(made, [])


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
        (
            "What did",
            "<think>Hm.</think>I look. " + scripted.call("search", query="Schiffe früher 日本"),
        ),
    ]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What did they do?"}]
    options = Options(tools=(SEARCH,))
    with scripted.engine(script, tmp_path / "s") as engine:
        first = engine.generate(messages, options)
        (call,) = first.tool_calls
        assert (first.text, first.reasoning) == ("I look.", "Hm.")
        assert call.arguments == {"query": "Schiffe früher 日本"}
        assert "".join(engine.stream(messages, options)) == "I look."
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


@pytest.mark.parametrize("sequences", [1, 2])
def test_control_tokens_of_calls_and_reasoning_are_read_and_not_shown(tmp_path, sequences):
    reply = f"[THINK]Hm.[/THINK]I look.[TOOL_CALLS][{AS_JSON}]"
    template = "<|bos|>{{ tools }}[TOOL_CALLS]{{ messages[0]['content'] }}"
    marks = ("[TOOL_CALLS]", "[THINK]", "[/THINK]", "<|other|>")
    words = tokens(template, *marks).tokenizer
    model = scripted.model(default=reply)
    model.words = words
    given: dict[str, Any] = {"num_return_sequences": 2, "do_sample": True} if sequences > 1 else {}
    with tiny.engine(model, tmp_path / "s", tokenizer=words, max_new_tokens=100) as engine:
        answer = engine.generate("find", Options(tools=(SEARCH,), generate_kwargs=given))
        assert [each.text for each in answer.replies] == ["I look."] * sequences
        assert (answer.reasoning, answer.tool_calls[0].name) == ("Hm.", "search")
        plain = engine.generate("find")
        assert plain.reasoning == "Hm."
        assert plain.tool_calls == ()


def test_stop_strings_end_the_answer_and_not_the_reasoning(tmp_path):
    reply = "<think>Question: what is asked?</think>It built ships. Question: and then?"
    with scripted.engine([], tmp_path / "s", default=reply) as engine:
        options = Options(stop=("Question:",), logprobs=0)
        answer = engine.generate("What?", options)
        assert (answer.text, answer.finish_reason) == ("It built ships. ", "stop")
        assert answer.reasoning == "Question: what is asked?"
        assert "".join(engine.stream("What?", options)) == answer.text
        said = "".join(each.token for each in answer.logprobs)
        assert said.startswith(reply.rpartition("Question:")[0])
        raw = engine.generate("What?", Options(apply_chat_template=False))
        assert (raw.text, raw.reasoning) == (reply, "")
