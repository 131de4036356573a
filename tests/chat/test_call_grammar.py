"""A call that must be made is complete and follows its tool's schema, whatever the model would have said."""

from __future__ import annotations

import sys
from typing import Any

import jsonschema
import pytest
import torch

import scripted
import tiny
from blendrag.chat.call_grammar import MAX_CALLS, calls_rule
from blendrag.chat.forcing import call_form, opening_for
from blendrag.chat.lark import library, vocabulary
from blendrag.engine import Options
from blendrag.errors import InvalidInputError, InvalidOptionError
from chat_forms import CODER, COMMAND, GLM, GRANITE, HARMONY, KIMI, PHI, QWEN3, QWQ, R1

#: What follows the name in three forms of Mistral's, and a form without a closing tag.
NAMED_MISTRAL = (
    scripted.MISTRAL.replace(
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, '
        '"id": "{{ c.id }}"}',
        "{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}",
    )
    .replace("[TOOL_CALLS][{%", "[TOOL_CALLS]{%")
    .replace("]{% else", "{% else")
)
TAGGED = (
    scripted.XML.replace("<function=", "x<function=")
    .replace("x<", "<")
    .replace(">\n</function>", ">{{ m.tool_calls[0].function.arguments | tojson }}</function>")
)
FORMS = {
    "hermes": scripted.TEMPLATE, "llama": scripted.LLAMA, "mistral": scripted.MISTRAL,
    "mistral named": NAMED_MISTRAL, "functionary": TAGGED, "qwen3": QWEN3, "qwq": QWQ, "coder": CODER,
    "glm": GLM, "phi": PHI, "granite": GRANITE, "harmony": HARMONY, "kimi": KIMI,
    "command": COMMAND, "r1": R1,
}  # fmt: skip
#: Their control tokens; one that a form has not is in none of its calls.
SPECIAL = (
    "<|tool_call|>",
    "<|/tool_call|>",
    "<|call|>",
    "<|tool_call_end|>",
    "<｜tool▁call▁end｜>",
)


def _tool(name: str, properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, **more}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


GUEST = {
    "type": "object",
    "properties": {"vip": {"type": "boolean"}},
    "required": ["vip"],
    "additionalProperties": False,
}
BOOK = _tool(
    "book",
    {
        "town": {"enum": ["Öre", "Ålen"]},
        "nights": {"type": "integer", "minimum": 1, "maximum": 9},
        "note": {"type": "string", "maxLength": 4},
        "guest": {"$ref": "#/$defs/guest"},
    },
    required=["town", "nights", "guest"],
    **{"$defs": {"guest": GUEST}},
)  # fmt: skip
NUMBER = {"type": "integer", "minimum": 1, "maximum": 99}
CANCEL = _tool("cancel", {"number": NUMBER}, required=["number"])
MESSAGES = [{"role": "user", "content": "A room, please."}]


def _engine(template: str, root: Any, default: str = "I do not know. " * 9) -> Any:
    made = tiny.tokenizer()
    made.add_special_tokens({"extra_special_tokens": ["<|start|>", *SPECIAL]})
    made.chat_template = template
    model = scripted.model((), default)
    torch.manual_seed(0)  # for the rows of new tokens
    model.resize_token_embeddings(len(made))
    model.words = made
    return tiny.engine(model, root, tokenizer=made, max_new_tokens=350, mode="full")


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_arguments_follow_the_schema_in_every_form(form, tmp_path, monkeypatch):
    # a random model makes as many as it may
    monkeypatch.setattr("blendrag.chat.call_grammar.MAX_CALLS", 2)
    with _engine(FORMS[form], tmp_path / "s") as engine:
        words = engine.tokens.tokenizer
        no_spaces = {i: -100.0 for i in range(len(words)) if words.decode(i).isspace()}
        tools = [CANCEL, BOOK]
        for choice in ("book", "required") if form in (*FORMS,)[:3] else ("required",):
            answer = engine.generate(
                MESSAGES, tools=tools, tool_choice=choice, logprobs=1, logit_bias=no_spaces
            )
            if answer.finish_reason != "stop":  # of several calls the last may be cut
                assert choice == "required"
            assert answer.text == ""
            assert not answer.replies[0].invalid or answer.finish_reason == "length"
            call = answer.tool_calls[0]
            schema = {t["function"]["name"]: t["function"]["parameters"] for t in tools}[call.name]
            assert choice in (call.name, "required")
            jsonschema.validate(call.arguments, {**schema, "additionalProperties": False})
            assert engine.adapter.model.prompts[-1].count(MESSAGES[0]["content"]) == 1


@pytest.mark.parametrize("form", FORMS)
def test_what_the_model_says_in_its_form_stays(form, tmp_path):
    """The template's own call, from the opening on, is what the grammar allows."""
    with _engine(FORMS[form], tmp_path / "s") as engine:
        tokens = engine.tokens
        found = call_form(tokens)
        assert found is not None
        rule = calls_rule(found, "cancel", [CANCEL], tokens, is_begun=True)
        said = {"json": '{"number": 7}'}.get(str(found.arguments))
        if said is None:
            tags = found.arguments
            said = f"{tags.before_key}number{tags.after_key}7{tags.close}"
        opening = opening_for(tokens, "cancel", [CANCEL])
        begun = f"{found.before}cancel{found.after}"
        rest = begun[len(begun.rstrip()) :] + said + found.close.replace("a1b2c3d4e", "Z9z9Z9z9Z")
        assert len(opening) == len(begun.rstrip())
        matcher = library().LLMatcher(vocabulary(tokens), f"start: {rule}")
        assert matcher.consume_tokens(tokens.encode_prompt(rest, begins=False).ids), rest
        assert matcher.is_accepting()


def test_a_call_of_two_tools_of_one_name_is_named_by_the_grammar(tmp_path):
    with _engine(scripted.TEMPLATE, tmp_path / "s") as engine:
        answer = engine.generate(MESSAGES, tools=[CANCEL, CANCEL], tool_choice="required")
        jsonschema.validate(answer.tool_calls[0].arguments, CANCEL["function"]["parameters"])


def test_what_ends_the_turn_is_no_part_of_a_call():
    assert scripted.tokens(COMMAND).has_tools
    form = call_form(scripted.tokens(COMMAND))
    assert form is not None
    assert form.close == "}\n]<|END_ACTION|>"
    assert form.between == '},\n    {"tool_call_id": "1", "tool_name": "'


def test_a_required_call_may_be_followed_by_further_ones(tmp_path):
    two = ' {"number": 1}}\n</tool_call>' + scripted.call("cancel", number=2)
    with _engine(scripted.TEMPLATE, tmp_path / "s", default=two) as engine:
        answer = engine.generate(MESSAGES, tools=[CANCEL], tool_choice="any")
        assert [call.arguments for call in answer.tool_calls] == [{"number": 1}, {"number": 2}]
        answer = engine.generate(MESSAGES, tools=[CANCEL], tool_choice="cancel")
        assert [call.arguments for call in answer.tool_calls] == [{"number": 1}]


def test_a_model_that_repeats_a_required_call_comes_to_an_end(tmp_path):
    with _engine(FORMS["hermes"], tmp_path / "s") as engine:
        tokens = engine.tokens
        form = call_form(tokens)
        rule = calls_rule(form, "any", [CANCEL], tokens, is_begun=True)
        matcher = library().LLMatcher(vocabulary(tokens), f"start: {rule}")
        arguments = '{"number": 7}'

        def takes(text: str) -> bool:
            ids = tokens.encode_prompt(text, begins=False).ids
            return matcher.try_consume_tokens(ids) == len(ids)

        assert takes(f" {arguments}")
        further = f"{form.between}cancel{form.after}{arguments}"
        assert all(takes(further) for _ in range(MAX_CALLS - 1))
        assert not takes(further)


@pytest.mark.parametrize("form", ["hermes", "qwen3", "phi", "kimi", "coder"])
def test_an_answer_in_a_form_may_call_tools_instead(form, tmp_path):
    wanted = {"type": "object", "properties": {"year": {"type": "integer"}}, "required": ["year"]}
    given = {"type": "json_schema", "json_schema": {"schema": wanted}}
    said = {
        "phi": '<|tool_call|>[{"name": "cancel", "arguments": {"number": 2}}]<|/tool_call|>',
        "kimi": "<|tool_call_begin|>functions.cancel:0<|tool_call_argument_begin|>"
        '{"number": 2}<|tool_call_end|>',
        "coder": "<tool_call>\n<function=cancel>\n<parameter=number>\n2\n</parameter>\n</function>\n"
        "</tool_call>",
    }.get(form, scripted.call("cancel", number=2))
    with _engine(FORMS[form], tmp_path / "s", default=said) as engine:
        called = engine.generate(MESSAGES, tools=[CANCEL], response_format=given)
        assert [call.arguments for call in called.tool_calls] == [{"number": 2}]
        assert called.text == ""
        engine.adapter.model.default = '{"year": 1874}'
        answered = engine.generate(MESSAGES, tools=[CANCEL], response_format=given)
        assert answered.text == '{"year": 1874}'
        assert answered.tool_calls == ()


def test_schemas_of_tools_are_enforced_as_far_as_they_can_be(tmp_path):
    odd = {"tags": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}}
    worse = {"tags": {"type": "string", "pattern": "^(?=a)b"}}
    with _engine(scripted.TEMPLATE, tmp_path / "s") as engine:
        answer = engine.generate(
            MESSAGES, tools=[_tool("tag", odd, required=["tags"])], tool_choice="tag", seed=1
        )
        assert all(isinstance(tag, int) for tag in answer.tool_calls[0].arguments["tags"])
        for properties in (odd, worse):
            strict = _tool("tag", properties)
            engine.generate(MESSAGES, tools=[strict], tool_choice="tag", max_new_tokens=20)
            strict["function"]["strict"] = True
            with pytest.raises(InvalidOptionError, match="tools 'tag' has strict") as raised:
                engine.generate(MESSAGES, tools=[strict], tool_choice="tag")
            assert tiny.one_sentence(str(raised.value))


def test_without_the_library_a_call_is_only_begun(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with _engine(
        scripted.TEMPLATE, tmp_path / "s", default=' {"number": "x"}}\n</tool_call>'
    ) as engine:
        answer = engine.generate(MESSAGES, tools=[CANCEL], tool_choice="any")
        assert answer.tool_calls[0].arguments == {"number": "x"}


def test_choices_of_the_engine(tmp_path):
    with _engine(scripted.TEMPLATE, tmp_path / "s") as engine:
        for choice in ("none", None, "auto"):
            answer = engine.generate(MESSAGES, tools=[CANCEL], tool_choice=choice)
            assert answer.text.startswith("I do not know.")
            assert ("cancel" in engine.adapter.model.prompts[-1]) is (choice != "none")
        with pytest.raises(InvalidInputError, match="tool_choice 'book' is not"):
            engine.generate(MESSAGES, tools=[CANCEL], tool_choice="book")
        asked = engine.segments(tuple(MESSAGES), engine_options(tool_choice="any"))
        plain = engine.segments(tuple(MESSAGES), engine_options())
        assert len(asked.ids) > len(plain.ids)


def engine_options(**given: Any) -> Any:
    return Options(tools=(CANCEL,), **given)
