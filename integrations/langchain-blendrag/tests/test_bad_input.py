"""Invalid prompts and options are refused in one sentence, in every way of calling."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from pydantic import ValidationError
from samples import SHIPS

import tiny
from blendrag.engine import BlendEngine
from blendrag.errors import ContextOverflowError, CorpusError, InvalidInputError
from langchain_blendrag import BlendLLM, BlendRetriever, BlendVectorStore, ChatBlend
from paragraphs import assert_end_with

IMAGE = [{"type": "image_url", "image_url": {"url": "data:,x"}}]
TOO_LONG = "Place32 " * 3000


async def assert_refused(llm: Any, given: Any, expected: str, **options: Any) -> None:
    """In each way of calling, the error begins with ``expected`` and is one sentence."""
    with pytest.raises(InvalidInputError) as invoked:
        llm.invoke(given, **options)
    with pytest.raises(InvalidInputError) as streamed:
        list(llm.stream(given, **options))
    with pytest.raises(InvalidInputError) as awaited:
        await llm.ainvoke(given, **options)
    with pytest.raises(InvalidInputError) as astreamed:
        _ = [piece async for piece in llm.astream(given, **options)]
    for raised in (invoked, streamed, awaited, astreamed):
        message = str(raised.value)
        assert message.startswith(expected)
        assert tiny.one_sentence(message)
        assert "--" not in message  # the spelling of the command line


RAW = {"apply_chat_template": False}
IS_IMAGE = "messages[0].content[0] is a content part of type 'image_url', expected text"


@pytest.mark.parametrize(
    ("given", "options", "sentence"),
    [
        ([SystemMessage(" "), HumanMessage("\n")], {}, "all 2 messages are empty"),
        ([SystemMessage(" "), HumanMessage("\n")], RAW, "all 2 messages are empty"),
        (" \n", {}, "the "),
        ([], {}, "messages is empty"),
        ([HumanMessage(IMAGE)], {}, IS_IMAGE),
        ([HumanMessage(IMAGE)], RAW, IS_IMAGE),
        ("Where?", {"max_length": 3}, "max_length: not an option of a call; arguments of transformers'"),
    ],
)  # fmt: skip
async def test_empty_messages_images_and_wrong_options_are_refused(
    either: Any, given: Any, options: dict[str, Any], sentence: str
) -> None:
    await assert_refused(either, given, sentence, **options)


def test_an_empty_message_among_others_is_answered(llm: ChatBlend) -> None:
    call = {"name": "look_up", "args": {}, "id": "1", "type": "tool_call"}
    assert llm.invoke([SystemMessage(""), HumanMessage("Where?")]).content
    assert llm.invoke([AIMessage("", tool_calls=[call])]).content


async def test_a_prompt_longer_than_the_context_is_refused_without_warnings(
    either: Any, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    either.engine.tokens.tokenizer.deprecation_warnings.clear()  # transformers warns once
    with pytest.raises(ContextOverflowError, match=r"\d+ over the model's context of 4096"):
        either.invoke(TOO_LONG)
    await assert_refused(either, TOO_LONG, "")
    assert "Token indices" not in caplog.text + "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"temperatur": 0.5}, "temperatur: not a field of .*; did you mean temperature"),
        ({"reranker": "x"}, r"reranker: not a field of .*, but of the engine; give engine=Blend"),
        ({"zzz": 0.5}, "zzz: not a field of .*; expected .*, store, .*, top_p"),
        ({"policy": "best"}, "policy 'best' is not one of"),
        ({"max_tokens": "many"}, "max_new_tokens\n"),
    ],
)
def test_a_wrong_field_is_refused(
    engine: BlendEngine, options: dict[str, Any], sentence: str
) -> None:
    for kind in (ChatBlend, BlendLLM):
        with pytest.raises(ValidationError, match=sentence):
            kind(engine=engine, **options)


async def test_a_closed_engine_is_an_error_in_every_call(own: BlendEngine) -> None:
    store, retriever = BlendVectorStore(engine=own), BlendRetriever(engine=own)
    assert_end_with(
        own,
        lambda: store.add_texts([SHIPS]),
        lambda: retriever.invoke("ships"),
        lambda: store.similarity_search("ships"),
        lambda: store.max_marginal_relevance_search("ships"),
        lambda: store.get_by_ids(["1"]),
        lambda: store.delete(["1"]),
    )
    for llm in (ChatBlend(engine=own), BlendLLM(engine=own)):
        await assert_refused(llm, "Where?", "this engine is closed; make a new BlendEngine")


def test_a_mistyped_store_is_named_and_not_created(tmp_path, caplog):
    store = tmp_path / "stroe"
    settings = {"model": "demo", "store": store, "embedder": "minilm-offline"}
    with pytest.raises(CorpusError, match=r"there is no corpus at .*stroe.* check the spelling"):
        BlendRetriever(**settings).invoke("Where?")
    for wrapper in (BlendRetriever, BlendLLM, BlendVectorStore):
        with pytest.raises(CorpusError, match="check the spelling"):  # nor can it name a model
            wrapper(store=store)
    with BlendVectorStore(**settings) as vectors:
        for _ in range(2):
            assert vectors.similarity_search("Where?") == []
        (warning,) = [record.getMessage() for record in caplog.records]
        assert warning.startswith(f"store {store} does not exist, so searches find nothing")
        assert not store.exists()
        vectors.add_texts(["The town is called Amberley, and it is on the river Wey."])
        assert len(vectors.similarity_search("Where?")) == 1
