"""``ChatBlend`` when things go on at once, or wrong: async, cancelling, timeouts, bad input."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from pydantic import ValidationError

from blendrag.engine import BlendEngine
from blendrag.errors import ContextOverflowError, InvalidInputError, RequestTimeout
from langchain_blendrag import ChatBlend

MESSAGES = [SystemMessage("Be brief."), HumanMessage("Where is Place32?")]


@pytest.fixture
def llm(engine: BlendEngine) -> ChatBlend:
    return ChatBlend(engine=engine)


# -- async, cancelling, timeouts ---------------------------------------------------------------------


async def test_async_answers_equal_sync_answers_inside_a_running_loop(llm: ChatBlend) -> None:
    expected = llm.invoke(MESSAGES).content  # sync, with a loop already running
    assert (await llm.ainvoke(MESSAGES)).content == expected
    assert "".join([str(chunk.content) async for chunk in llm.astream(MESSAGES)]) == expected
    assert [a.content for a in await llm.abatch([MESSAGES, MESSAGES])] == [expected, expected]


async def test_the_event_loop_turns_while_the_model_works(llm: ChatBlend) -> None:
    turns = 0

    async def tick() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.005)
            turns += 1

    ticking = asyncio.create_task(tick())
    began = time.perf_counter()
    await llm.ainvoke("Where is Place32?", max_tokens=150)
    elapsed = time.perf_counter() - began
    ticking.cancel()
    assert turns > elapsed / 0.005 / 5


async def test_a_cancelled_call_frees_the_model(llm: ChatBlend) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(llm.ainvoke("Where is Place32?", max_tokens=3000), 0.3)
    assert await asyncio.wait_for(llm.ainvoke("And Place11?", max_tokens=2), 2)


async def test_an_abandoned_stream_frees_the_model(llm: ChatBlend) -> None:
    async for _ in (stream := llm.astream("Where is Place32?", max_tokens=3000)):
        break
    await stream.aclose()  # type: ignore[attr-defined]
    assert await asyncio.wait_for(llm.ainvoke("And Place11?", max_tokens=2), 2)
    for _ in llm.stream("Where is Place32?", max_tokens=3000):
        break
    assert await asyncio.wait_for(llm.ainvoke("And Place11?", max_tokens=2), 2)


async def test_a_timeout_ends_the_request(llm: ChatBlend, engine: BlendEngine) -> None:
    limited = ChatBlend(engine=engine, timeout=0.2, max_tokens=3000)
    with pytest.raises(RequestTimeout, match=r"within the timeout of 0.2 s"):
        limited.invoke("Where is Place32?")
    with pytest.raises(RequestTimeout):
        list(limited.stream("Where is Place32?"))
    with pytest.raises(RequestTimeout):
        await limited.ainvoke("Where is Place32?")
    assert await asyncio.wait_for(llm.ainvoke("And Place11?", max_tokens=2), 2)


def test_an_exhausted_stream_ends_and_stays_ended(llm: ChatBlend) -> None:
    stream = llm.stream("Where is Place32?")
    assert list(stream)
    assert list(stream) == []


def test_calls_from_many_threads_get_their_own_answers(llm: ChatBlend) -> None:
    questions = [f"Where is Place{i}1?" for i in range(4)]
    expected = [llm.invoke(q).content for q in questions]
    answers: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda i=i: answers.update({i: llm.invoke(questions[i]).content}))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[i] for i in range(4)] == expected
    assert [a.content for a in llm.batch(questions)] == expected


def test_one_bad_prompt_of_a_batch_does_not_lose_the_others(llm: ChatBlend) -> None:
    out = llm.batch(["Where?", "", "There?"], return_exceptions=True)
    assert [type(o) for o in out] == [AIMessage, InvalidInputError, AIMessage]
    with pytest.raises(InvalidInputError, match="empty"):
        llm.batch(["Where?", "", "There?"])


# -- bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([], "no messages; send at least one"),
        ([HumanMessage("")], "all 1 messages are empty"),
        ([SystemMessage(" "), HumanMessage("\n")], "all 2 messages are empty"),
        (
            [HumanMessage([{"type": "image_url", "image_url": {"url": "data:,x"}}])],
            "a HumanMessage has a content part of type 'image_url', and only text can be read",
        ),
        (
            [HumanMessage("x"), ToolMessage([{"type": "image", "url": "u"}], tool_call_id="1")],
            "a ToolMessage has a content part of type 'image'",
        ),
    ],
)
def test_messages_that_cannot_be_read_are_refused(
    llm: ChatBlend, messages: Any, sentence: str
) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        llm.invoke(messages)
    with pytest.raises(InvalidInputError, match=sentence):
        list(llm.stream(messages))


def test_a_prompt_longer_than_the_context_says_by_how_much(llm: ChatBlend) -> None:
    with pytest.raises(ContextOverflowError, match=r"\d+ over the model's context of 4096"):
        llm.invoke("Place32 " * 3000)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"temperatur": 0.5}, "Extra inputs are not permitted"),
        ({"ratio": 1.5}, r"ratio 1.5 is outside \[0, 1\]"),
        ({"timeout": 0}, "timeout_s 0.0 is not more than 0"),
        ({"top_logprobs": 3}, "top_logprobs 3 without logprobs"),
        ({"model": "demo"}, "leave model out"),
    ],
)
def test_a_wrong_option_is_refused_when_the_wrapper_is_made(
    engine: BlendEngine, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValidationError, match=sentence):
        ChatBlend(engine=engine, **options)


def test_a_wrong_option_of_a_call_is_named(llm: ChatBlend) -> None:
    with pytest.raises(InvalidInputError, match=r"max_length: not an option of a call; expected"):
        llm.invoke("Where?", max_length=3)
