"""What ``BlendLLM`` and ``BlendRetriever`` cannot answer is refused in a sentence, however it is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, ImageBlock
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.tools import FunctionTool
from pydantic import ValidationError

import tiny
from blendrag.engine import BlendEngine
from blendrag.errors import BlendragError, ContextOverflowError, InvalidInputError
from llama_index.llms.blendrag import BlendLLM, BlendRetriever

QUESTION = "Where is Place32?"
ASKED = [ChatMessage(role="user", content=QUESTION)]


async def refusals(llm: BlendLLM, messages: list[ChatMessage], **options: Any) -> list[str]:
    """What is said in each way of asking."""
    said = []
    with pytest.raises(InvalidInputError) as raised:
        llm.chat(messages, **options)
    said.append(str(raised.value))
    with pytest.raises(InvalidInputError) as raised:
        list(llm.stream_chat(messages, **options))
    said.append(str(raised.value))
    with pytest.raises(InvalidInputError) as raised:
        await llm.achat(messages, **options)
    said.append(str(raised.value))
    with pytest.raises(InvalidInputError) as raised:
        _ = [response async for response in await llm.astream_chat(messages, **options)]
    said.append(str(raised.value))
    return said


@pytest.mark.parametrize("template", [True, False])
@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([ChatMessage(content="")], "the message is empty, expected some text; ask something"),
        (
            [ChatMessage(role="system", content=" "), ChatMessage(content=None)],
            "all 2 messages are empty",
        ),
        (
            [ChatMessage(role="user", blocks=[ImageBlock(url="http://localhost/x.png")])],
            "a content block of type 'image', expected text only; describe it in words or leave it out",
        ),
        ([], "no messages; send at least one"),
    ],
)
async def test_messages_that_cannot_be_read_are_refused(
    llm: BlendLLM, messages: list[ChatMessage], sentence: str, template: bool
) -> None:
    for said in await refusals(llm, messages, apply_chat_template=template):
        assert said.startswith(sentence)
        assert tiny.one_sentence(said)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"temperatur": 0.5}, "Extra inputs are not permitted"),
        ({"ratio": 1.5}, r"ratio 1.5 must be a number in \[0, 1\]"),
        ({"min_ratio": 1.5}, r"min_ratio 1.5 must be a number in \[0, 1\]"),
        ({"mode": "fast"}, "'blend', 'full', 'prefix' or 'reuse'"),
        ({"policy": "best"}, "policy 'best' is not one of"),
        ({"max_tokens": 0}, "max_tokens 0 is not 1 or more"),
        ({"timeout": 0}, "timeout 0.0 must be above 0"),
        ({"stop": [""]}, "stop holds an empty text"),
        ({"model": "demo"}, "leave model out"),
    ],
)
def test_a_wrong_option_is_refused_when_the_wrapper_is_made(
    engine: BlendEngine, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValidationError, match=sentence):
        BlendLLM(engine=engine, **options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_length": 3}, "max_length: not an option of a call; expected"),
        ({"max_tokens": 0}, "max_tokens 0 is not 1 or more"),
        ({"max_new_tokens": 0}, "max_new_tokens 0 is not 1 or more"),
        ({"timeout": -1}, "timeout -1 must be above 0"),
        ({"stop": [""]}, "stop holds an empty text"),
        ({"stop": ""}, "stop holds an empty text"),
    ],
)
async def test_a_wrong_option_of_a_call_is_named_as_the_call_does(
    llm: BlendLLM, options: dict[str, Any], sentence: str
) -> None:
    for said in await refusals(llm, ASKED, **options):
        assert said.startswith(sentence)
        assert tiny.one_sentence(said)


def test_a_prompt_longer_than_the_context_says_by_how_much_and_names_no_option_of_the_shell(
    llm: BlendLLM,
) -> None:
    with pytest.raises(ContextOverflowError, match="over the model's context of 4096") as raised:
        llm.complete("Place32 " * 3000)
    assert "--" not in str(raised.value)


def test_tools_are_refused_in_a_sentence_and_metadata_said_so(llm: BlendLLM) -> None:
    tool = FunctionTool.from_defaults(fn=lambda q: q, name="look_up", description="Looks up.")
    assert not llm.metadata.is_function_calling_model
    with pytest.raises(InvalidInputError, match=r"takes no tools \(look_up\); use a ReAct"):
        llm.chat_with_tools([tool], QUESTION)


async def test_an_empty_corpus_is_said_to_be_empty(tmp_path: Path) -> None:
    with tiny.engine(tiny.llama(), tmp_path / "store") as engine:
        retriever = BlendRetriever(engine=engine)
        asking = RetrieverQueryEngine.from_args(retriever, llm=BlendLLM(engine=engine))
        with pytest.raises(BlendragError, match="ingest first"):
            retriever.retrieve("Where?")
        with pytest.raises(BlendragError, match="ingest first"):
            await retriever.aretrieve("Where?")
        with pytest.raises(BlendragError, match="ingest first"):
            asking.query("Where?")
        with pytest.raises(BlendragError, match="ingest first"):
            await asking.aquery("Where?")
