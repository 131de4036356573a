"""What the models cannot answer is refused in one sentence, in every way of asking."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from pydantic import ValidationError

import tiny
from blendrag.engine import BlendEngine
from blendrag.errors import BlendragError, ContextOverflowError, InvalidInputError
from langchain_blendrag import BlendLLM, BlendRetriever, BlendVectorStore, ChatBlend

TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
IMAGE = [{"type": "image_url", "image_url": {"url": "data:,x"}}]


@pytest.fixture(params=[ChatBlend, BlendLLM], ids=lambda kind: kind.__name__)
def either(request: Any, engine: BlendEngine) -> Any:
    return request.param(engine=engine)


async def refusals(llm: Any, asked: Any, **options: Any) -> list[str]:
    """What is said in each way of asking."""
    said = []
    with pytest.raises(InvalidInputError) as raised:
        llm.invoke(asked, **options)
    said.append(str(raised.value))
    with pytest.raises(InvalidInputError) as raised:
        list(llm.stream(asked, **options))
    said.append(str(raised.value))
    with pytest.raises(InvalidInputError) as raised:
        await llm.ainvoke(asked, **options)
    said.append(str(raised.value))
    with pytest.raises(InvalidInputError) as raised:
        _ = [piece async for piece in llm.astream(asked, **options)]
    said.append(str(raised.value))
    return said


@pytest.mark.parametrize("template", [True, False])
@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([HumanMessage("")], "the message is empty"),
        ([SystemMessage(" "), HumanMessage("\n")], "all 2 messages are empty"),
        (
            [HumanMessage(IMAGE)],
            "a HumanMessage has a content part of type 'image_url', and only text can be read; say it in "
            "words or leave it out",
        ),
        (
            [HumanMessage("x"), ToolMessage([{"type": "image", "url": "u"}], tool_call_id="1")],
            "a ToolMessage has a content part of type 'image'",
        ),
    ],
)
async def test_messages_that_cannot_be_read_are_refused(
    either: Any, messages: Any, sentence: str, template: bool
) -> None:
    for said in await refusals(either, messages, apply_chat_template=template):
        assert said.startswith(sentence)
        assert tiny.one_sentence(said)


@pytest.mark.parametrize("asked", ["", " \n", []])
async def test_nothing_at_all_is_refused(either: Any, asked: Any) -> None:
    for said in await refusals(either, asked):
        assert "empty" in said or said == "no messages; send at least one"
        assert tiny.one_sentence(said)


def test_an_empty_message_among_others_is_answered(llm: ChatBlend) -> None:
    call = {"name": "look_up", "args": {}, "id": "1", "type": "tool_call"}
    assert llm.invoke([SystemMessage(""), HumanMessage("Where?")]).content
    assert llm.invoke([AIMessage("", tool_calls=[call])]).content


async def test_a_prompt_longer_than_the_context_says_by_how_much_and_nothing_else(
    either: Any, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    either.engine.resources.tokens.tokenizer.deprecation_warnings.clear()  # transformers warns once
    with pytest.raises(ContextOverflowError, match=r"\d+ over the model's context of 4096"):
        either.invoke("Place32 " * 3000)
    for said in await refusals(either, "Place32 " * 3000):
        assert tiny.one_sentence(said)
        assert "--" not in said  # which is how the shell spells options
    assert "Token indices" not in caplog.text + "".join(capfd.readouterr())


async def test_tools_on_a_model_without_tools_are_refused(llm: ChatBlend) -> None:
    for said in await refusals(llm, "Where?", tools=[TOOL]):
        assert (
            "tools given (1) to a model whose chat template does not support tools; use a model"
            in said
        )
        assert tiny.one_sentence(said)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"temperatur": 0.5}, "Extra inputs are not permitted"),
        ({"ratio": 1.5}, r"ratio 1.5 must be a number in \[0, 1\]"),
        ({"min_ratio": 1.5}, r"min_ratio 1.5 must be a number in \[0, 1\]"),
        ({"mode": "fast"}, "'blend', 'full', 'prefix' or 'reuse'"),
        ({"policy": "best"}, "policy 'best' is not one of"),
        ({"timeout": 0}, "timeout 0.0 must be above 0"),
        ({"max_tokens": 0}, "max_tokens 0 is not 1 or more"),
        ({"max_tokens": "many"}, "max_tokens\n"),
        ({"temperature": -1}, "temperature -1.0 is not 0 or more"),
        ({"stop": [""]}, "stop holds an empty text"),
        ({"top_logprobs": 3}, "top_logprobs 3 without logprobs"),
        ({"logprobs": True, "top_logprobs": 30}, r"top_logprobs 30 must be a number in \[0, 20\]"),
        ({"model": "demo"}, "leave model out"),
    ],
)
def test_a_wrong_option_is_refused_when_the_wrapper_is_made(
    engine: BlendEngine, options: dict[str, Any], sentence: str
) -> None:
    for kind in (ChatBlend, BlendLLM):
        with pytest.raises(ValidationError, match=sentence):
            kind(engine=engine, **options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_length": 3}, "max_length: not an option of a call; expected"),
        ({"max_tokens": 0}, "max_tokens 0 is not 1 or more"),
        ({"max_new_tokens": 0}, "max_new_tokens 0 is not 1 or more"),
        ({"timeout": -1}, "timeout -1 must be above 0"),
        ({"stop": [""]}, "stop holds an empty text"),
        ({"stop": ["x", ""]}, "stop holds an empty text"),
    ],
)
async def test_a_wrong_option_of_a_call_is_named_as_the_call_does(
    either: Any, options: dict[str, Any], sentence: str
) -> None:
    for said in await refusals(either, "Where?", **options):
        assert said.startswith(sentence)
        assert tiny.one_sentence(said)


def test_searching_after_a_given_engine_was_closed_is_one_sentence(tmp_path: Any) -> None:
    engine = tiny.engine(tiny.llama(), tmp_path / "kv")
    store, retriever = BlendVectorStore(engine=engine), BlendRetriever(engine=engine)
    store.add_texts(["The ships that were built here in the year 1874 are in the harbour."])
    assert retriever.invoke("ships")
    engine.close()
    for search in (
        lambda: retriever.invoke("ships"),
        lambda: store.similarity_search("ships"),
        lambda: store.max_marginal_relevance_search("ships"),
        lambda: store.add_texts(["Another text, which is long enough to be recognised."]),
        lambda: store.get_by_ids(["1"]),
        lambda: store.delete(["1"]),
    ):
        with pytest.raises(BlendragError) as raised:
            search()
        assert str(raised.value) == "this engine is closed; make a new BlendEngine"
