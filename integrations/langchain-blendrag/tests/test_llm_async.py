"""``BlendLLM`` on event loops and threads, and what is left when its caller goes."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from langchain_core.messages import HumanMessage, SystemMessage

from blendrag.engine import BlendEngine
from blendrag.errors import InvalidInputError
from langchain_blendrag import BlendLLM

MESSAGES = [SystemMessage("Be brief."), HumanMessage("Where is Place32?")]
RENDERED = "<|bos|><|system|>Be brief.\n<|user|>Where is Place32?\n<|assistant|>"


@pytest.fixture
def llm(engine: BlendEngine) -> BlendLLM:
    return BlendLLM(engine=engine)


def test_an_abandoned_stream_frees_the_model(llm: BlendLLM, seen: Any) -> None:
    for _ in llm.stream("Where is Place32?", config={"callbacks": [seen]}, max_tokens=3000):
        break
    began = time.perf_counter()
    assert llm.invoke("And Place11?", max_tokens=2)
    assert time.perf_counter() - began < 2
    assert isinstance(seen.errors[0], GeneratorExit)


async def test_async_answers_equal_sync_answers_inside_a_running_loop(llm: BlendLLM) -> None:
    expected = llm.invoke(MESSAGES)
    assert await llm.ainvoke(MESSAGES) == expected
    assert "".join([piece async for piece in llm.astream(MESSAGES)]) == expected
    assert await llm.abatch([MESSAGES, MESSAGES]) == [expected, expected]
    assert llm.invoke(MESSAGES) == expected  # sync, with a loop already running


async def test_the_event_loop_turns_while_the_model_works(llm: BlendLLM) -> None:
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


async def test_a_cancelled_call_frees_the_model(llm: BlendLLM) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(llm.ainvoke("Where is Place32?", max_tokens=3000), 0.3)
    assert await asyncio.wait_for(llm.ainvoke("And Place11?", max_tokens=2), 2)


async def test_an_abandoned_async_stream_frees_the_model(llm: BlendLLM) -> None:
    stream = llm.astream("Where is Place32?", max_tokens=3000)
    async for _ in stream:
        break
    await stream.aclose()  # type: ignore[attr-defined]
    assert await asyncio.wait_for(llm.ainvoke("And Place11?", max_tokens=2), 2)


def test_calls_from_many_threads_get_their_own_answers(llm: BlendLLM) -> None:
    questions = [f"Where is Place{i}1?" for i in range(4)]
    expected = [llm.invoke(q) for q in questions]
    answers: dict[int, str] = {}
    threads = [
        threading.Thread(target=lambda i=i: answers.update({i: llm.invoke(questions[i])}))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[i] for i in range(4)] == expected
    assert llm.batch(questions) == expected


async def test_one_bad_prompt_of_a_batch_does_not_lose_the_others(llm: BlendLLM) -> None:
    prompts = ["Where is Place32?", "", "And Place11?"]
    for out in (
        llm.batch(prompts, return_exceptions=True),
        await llm.abatch(prompts, return_exceptions=True),
    ):
        assert [type(o) for o in out] == [str, InvalidInputError, str]
        assert out[0] == llm.invoke(prompts[0])
    with pytest.raises(InvalidInputError, match="the prompt is empty"):
        llm.batch(prompts)
