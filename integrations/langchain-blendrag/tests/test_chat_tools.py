"""``ChatBlend`` with tools and structured output."""

from __future__ import annotations

import functools
import json
import operator
from typing import Any, Literal

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, HumanMessage
from pydantic import BaseModel, model_validator
from samples import Joke, get_weather, last_prompt, whole

import tiny
from blendrag.errors import InvalidInputError
from chat_forms import ODD
from langchain_blendrag import ChatBlend

#: Renders tools, and nothing of calls.
NO_CALLS = "{{ tools }}" + tiny.CHAT_TEMPLATE
JOKE = {"setup": "Why did the cat sit?", "punchline": "It could."}


def test_a_required_call_is_begun_as_the_template_writes_it(talker: ChatBlend) -> None:
    bound = talker.bind_tools([get_weather, Joke], tool_choice="Joke")
    assert [call["name"] for call in bound.invoke("x").tool_calls] == ["Joke"]
    assert last_prompt(talker.engine).endswith('<tool_call>\n{"name": "Joke", "arguments":')
    assert isinstance(talker.with_structured_output(Joke).invoke("A joke."), Joke)
    assert last_prompt(talker.engine).endswith('{"name": "Joke", "arguments":')
    talker.bind_tools([get_weather, Joke], tool_choice="any").invoke("x")
    assert last_prompt(talker.engine).endswith('<tool_call>\n{"name": "')
    talker.bind_tools([get_weather], tool_choice="auto").invoke("x")
    assert last_prompt(talker.engine).endswith("<|start|>assistant\n")
    talker.bind_tools([get_weather], tool_choice="none").invoke("x")
    assert "get_weather" not in last_prompt(talker.engine)


def test_text_before_a_call_is_streamed_and_the_call_comes_whole(talker: ChatBlend) -> None:
    chunks = list(talker.bind_tools([get_weather]).stream("What is the weather?"))
    assert "".join(str(chunk.content) for chunk in chunks) == "I will look."
    assert not any(chunk.tool_call_chunks for chunk in chunks[:-1])
    assert chunks[-1].tool_call_chunks[0]["args"] == '{"location": "San Francisco, CA"}'
    assert chunks[-1].response_metadata["finish_reason"] == "tool_calls"
    invoked = talker.bind_tools([get_weather]).invoke("What is the weather?")
    assert (invoked.content, invoked.tool_calls[0]["args"]) == (
        "I will look.",
        {"location": "San Francisco, CA"},
    )


def test_a_malformed_call_is_an_invalid_one(
    talker: ChatBlend, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = '<tool_call>\n{"name": "get_weather", "arguments": {"location": '
    monkeypatch.setattr(talker.engine.adapter.model, "script", lambda prompt: broken)
    bound = talker.bind_tools([get_weather])
    for answer in (bound.invoke("x"), whole(bound.stream("x"))):
        assert not answer.tool_calls
        assert "get_weather" in str(answer.invalid_tool_calls[0]["args"])
    # the model is shown what it wrote
    bound.invoke([HumanMessage("x"), bound.invoke("x"), HumanMessage("That was no JSON.")])
    assert '"arguments": {"location":' in last_prompt(talker.engine)


def test_tools_on_a_model_without_tools_are_refused(llm: ChatBlend) -> None:
    with pytest.raises(
        InvalidInputError, match=r"tools given \(1\) to .* does not render tools; use a model"
    ):
        llm.bind_tools([get_weather])
    with pytest.raises(InvalidInputError, match="chat template does not support tools"):
        llm.invoke("x", tools=[{"type": "function", "function": {"name": "f"}}])


def test_structured_output_without_tools_is_requested_in_words(
    talker: ChatBlend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(talker.engine.tokens), "has_tools", False)
    made = talker.with_structured_output(Joke)
    assert made.invoke("A joke.") == Joke(setup="Why did the cat sit?", punchline="It could.")
    assert '"punchline"' in last_prompt(talker.engine)
    assert "<tool_call>" not in last_prompt(talker.engine)


def test_a_call_that_does_not_follow_the_schema_is_an_error_or_raw(
    talker: ChatBlend, monkeypatch: pytest.MonkeyPatch
) -> None:
    class LongJoke(Joke):
        @model_validator(mode="after")
        def is_long(self) -> LongJoke:
            raise ValueError("the punchline is too short")

    said = ' {"setup": "Why?", "punchline": "It"}}\n</tool_call>'
    monkeypatch.setattr(talker.engine.adapter.model, "script", lambda prompt: said)
    made = talker.with_structured_output(LongJoke, method="function_calling", include_raw=True)
    raw = made.invoke("A joke.")
    assert raw["parsed"] is None
    assert raw["parsing_error"] is not None
    assert isinstance(raw["raw"], AIMessage)
    with pytest.raises(Exception, match="punchline"):
        talker.with_structured_output(LongJoke, method="function_calling").invoke("A joke.")


class Verdict(BaseModel):
    verdict: Literal["yes", "no"]


def test_an_answer_in_json_follows_the_schema_whatever_the_model_would_say(
    talker: ChatBlend, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = '<think>A "verdict" is asked for.</think>' + "I would rather not say. " * 40
    monkeypatch.setattr(talker.engine.adapter.model, "script", lambda prompt: said)
    for _ in range(2):
        found = talker.with_structured_output(Verdict, method="json_schema").invoke("Right?")
        assert found.verdict in ("yes", "no")
    raw = talker.with_structured_output(Verdict, method="json_schema", include_raw=True)
    message = raw.invoke("Right?")["raw"]
    assert message.additional_kwargs["reasoning_content"] == 'A "verdict" is asked for.'


def test_reasoning_is_apart_from_the_content_and_streams(
    talker: ChatBlend, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "<think>Hm, ships.</think>\n\nIt built ships."
    monkeypatch.setattr(talker.engine.adapter.model, "script", lambda prompt: said)
    message = talker.invoke("What?")
    assert message.content == "It built ships."
    assert message.additional_kwargs["reasoning_content"] == "Hm, ships."
    assert [block["type"] for block in message.content_blocks] == ["reasoning", "text"]
    chunks = list(talker.stream("What?"))
    total = functools.reduce(operator.add, chunks)
    assert total.content == "It built ships."
    assert total.additional_kwargs["reasoning_content"] == "Hm, ships."
    assert not any(c.content and c.additional_kwargs.get("reasoning_content") for c in chunks)
    talker.invoke([HumanMessage("What?"), message, HumanMessage("Why?")])
    assert "Hm, ships." not in last_prompt(talker.engine)


def test_a_wrong_method_is_named(talker: ChatBlend) -> None:
    made: Any = talker
    with pytest.raises(InvalidInputError, match="method 'grammar' is not one of"):
        made.with_structured_output(Joke, method="grammar")
    with pytest.raises(InvalidInputError, match="needs a schema"):
        talker.with_structured_output(None, method="json_schema")


@pytest.mark.parametrize("schema", [Joke, Joke.model_json_schema()])
@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_an_answer_that_was_cut_is_an_error_and_never_none(
    talker: ChatBlend, schema: Any, method: Any
) -> None:
    short = ChatBlend(engine=talker.engine, max_new_tokens=8)
    made = short.with_structured_output(schema, method=method)
    with pytest.raises(OutputParserException, match="was cut"):
        made.invoke("A joke.")
    with pytest.raises(OutputParserException, match="was cut"):
        list(made.stream("A joke."))
    raw = short.with_structured_output(schema, method=method, include_raw=True).invoke("A joke.")
    assert raw["parsed"] is None
    assert "was cut" in str(raw["parsing_error"])


@pytest.mark.parametrize("template", [NO_CALLS, ODD])
def test_calls_that_cannot_be_forced_or_read_are_asked_for_as_json(
    talker: ChatBlend, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    """Also without a word about a tool_choice, which the user did not give."""
    tokenizer = talker.engine.tokens.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", template)
    assert talker.engine.tokens.has_tools
    assert talker.with_structured_output(Joke).invoke("A joke.") == Joke(**JOKE)
    if template == ODD:
        with pytest.raises(InvalidInputError, match="cannot read"):
            talker.with_structured_output(Joke, method="function_calling")
        return
    asked = talker.with_structured_output(Joke, method="function_calling")
    monkeypatch.setattr(talker.engine.adapter.model, "script", lambda prompt: "I would not.")
    with pytest.raises(OutputParserException, match="no call; try"):
        asked.invoke("A joke.")
    said = '{"name": "Joke", "arguments": ' + json.dumps(JOKE) + "}"
    monkeypatch.setattr(talker.engine.adapter.model, "script", lambda prompt: said)
    assert asked.invoke("A joke.") == Joke(**JOKE)


def test_a_schema_that_cannot_be_enforced_whole_is_refused_only_if_strict(
    talker: ChatBlend, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tags(BaseModel):
        tags: set[int]

    said = '{"tags": [1, 2]}'
    monkeypatch.setattr(talker.engine.adapter.model, "script", lambda prompt: said)
    answer = talker.with_structured_output(Tags, method="json_schema", include_raw=True).invoke("x")
    assert answer["parsed"] == Tags(tags={1, 2})
    notes = answer["raw"].response_metadata["blendrag"]["notes"]
    assert any("enforced only in part" in note for note in notes)
    for method in ("json_schema", "function_calling"):
        with pytest.raises(InvalidInputError, match="uniqueItems"):
            talker.with_structured_output(Tags, method=method, strict=True).invoke("x")
