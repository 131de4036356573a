"""Invalid input to ``BlendLLM`` and ``BlendRetriever`` is refused in one sentence in every call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, ImageBlock
from llama_index.core.query_engine import RetrieverQueryEngine
from pydantic import ValidationError

import tiny
from blendrag.engine import BlendEngine
from blendrag.errors import BlendragError, ContextOverflowError, InvalidInputError
from llama_index.llms.blendrag import BlendLLM, BlendRetriever

QUESTION = "Where is Place32?"
ASKED = [ChatMessage(role="user", content=QUESTION)]


async def refusals(llm: BlendLLM, messages: list[ChatMessage], **options: Any) -> list[str]:
    """The error in each way of calling."""
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


async def test_invalid_messages_are_refused_without_the_template_too(llm: BlendLLM) -> None:
    image = ChatMessage(role="user", blocks=[ImageBlock(url="http://localhost/x.png")])
    for messages, sentence in (
        ([ChatMessage(content="")], "the message is empty, expected some text; ask something"),
        ([image], "a content block of type 'image', expected text only"),
        ([], "no messages; send at least one"),
    ):
        for said in await refusals(llm, messages, apply_chat_template=False):
            assert said.startswith(sentence)
            assert tiny.one_sentence(said)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"temperatur": 0.5}, "Extra inputs are not permitted"),
        ({"ratio": 1.5}, r"ratio 1.5 must be a number in \[0, 1\]"),
        ({"mode": "fast"}, "'blend', 'full', 'prefix' or 'reuse'"),
        ({"model": "demo"}, "leave model out"),
    ],
)
def test_a_wrong_field_is_refused(
    engine: BlendEngine, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValidationError, match=sentence):
        BlendLLM(engine=engine, **options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_length": 3}, "max_length: not an option of a call; expected"),
        ({"max_new_tokens": 0}, "max_new_tokens 0 is not 1 or more"),
        ({"stop": ""}, "stop holds an empty text"),
    ],
)
async def test_a_wrong_option_of_a_call_is_refused(
    llm: BlendLLM, options: dict[str, Any], sentence: str
) -> None:
    for said in await refusals(llm, ASKED, **options):
        assert said.startswith(sentence)
        assert tiny.one_sentence(said)


def test_an_error_does_not_name_options_of_the_command_line(
    llm: BlendLLM,
) -> None:
    with pytest.raises(ContextOverflowError, match="over the model's context of 4096") as raised:
        llm.complete("Place32 " * 3000)
    assert "--" not in str(raised.value)


async def test_an_empty_corpus_is_an_error(tmp_path: Path) -> None:
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
