"""Invalid input to ``BlendLLM`` and ``BlendRetriever`` is refused in one sentence in every call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, ImageBlock
from llama_index.core.query_engine import RetrieverQueryEngine
from llm_standard_tests import LLMTests
from pydantic import ValidationError

import tiny
from blendrag.engine import BlendEngine
from blendrag.errors import BlendragError
from llama_index.llms.blendrag import BlendLLM, BlendRetriever

QUESTION = "Where is Place32?"
ASKED = [ChatMessage(role="user", content=QUESTION)]


IMAGE = ChatMessage(role="user", blocks=[ImageBlock(url="http://localhost/x.png")])
RAW = {"apply_chat_template": False}


@pytest.mark.parametrize(
    ("messages", "options", "sentence"),
    [
        ([ChatMessage(content="")], RAW, "the message is empty, expected some text; ask something"),
        ([IMAGE], RAW, "a content block of type 'image', expected text only"),
        ([], RAW, "no messages; send at least one"),
        (ASKED, {"max_length": 3}, "max_length: not an option of a call; expected"),
        (ASKED, {"max_new_tokens": 0}, "max_new_tokens 0 is not 1 or more"),
        (ASKED, {"stop": ""}, "stop holds an empty text"),
    ],
)
async def test_invalid_messages_and_options_are_refused(
    llm: BlendLLM, messages: list[ChatMessage], options: dict[str, Any], sentence: str
) -> None:
    await LLMTests().assert_refused(llm, messages, f"^{sentence}", **options)


def test_a_wrong_field_is_refused(engine: BlendEngine) -> None:
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        BlendLLM(engine=engine, temperatur=0.5)
    with pytest.raises(ValidationError, match="leave model out"):
        BlendLLM(engine=engine, model="demo")


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
