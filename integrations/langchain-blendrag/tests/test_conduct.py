"""Both models on event loops and threads, given up, timed out, exhausted; and what is left when they are."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from langchain_core.messages import HumanMessage, SystemMessage

import loops
from blendrag.engine import BlendEngine
from blendrag.errors import InvalidInputError, RequestTimeout
from langchain_blendrag import BlendLLM, ChatBlend

MESSAGES = [SystemMessage("Be brief."), HumanMessage("Where is Place32?")]
QUESTION = "Where is Place32?"
LONG = {"max_tokens": 3000}


@pytest.fixture(params=[ChatBlend, BlendLLM], ids=lambda kind: kind.__name__)
def llm(request: Any, engine: BlendEngine) -> Any:
    return request.param(engine=engine)


def text_of(answer: Any) -> str:
    return answer if isinstance(answer, str) else str(answer.content)


async def assert_free(llm: Any) -> None:
    """The model answers someone else at once."""
    assert await asyncio.wait_for(llm.ainvoke("And Place11?", max_tokens=2), 2)


# -- event loops and threads -------------------------------------------------------------------------


async def test_async_answers_equal_sync_answers_inside_a_running_loop(llm: Any) -> None:
    expected = text_of(llm.invoke(MESSAGES))  # sync, with a loop already running
    assert text_of(await llm.ainvoke(MESSAGES)) == expected
    assert "".join([text_of(piece) async for piece in llm.astream(MESSAGES)]) == expected
    assert "".join(text_of(piece) for piece in llm.stream(MESSAGES)) == expected
    assert [text_of(a) for a in await llm.abatch([MESSAGES, MESSAGES])] == [expected, expected]
    assert [text_of(a) for a in llm.batch([MESSAGES, MESSAGES])] == [expected, expected]


def test_it_serves_one_event_loop_after_another(llm: Any) -> None:
    answers = {text_of(asyncio.run(llm.ainvoke(QUESTION))) for _ in range(2)}
    assert answers == {text_of(llm.invoke(QUESTION))}


async def test_the_event_loop_turns_while_the_model_works(llm: Any) -> None:
    model = llm.engine.adapter.model
    assert await loops.turns_while(model, llm.ainvoke(QUESTION))

    async def streamed() -> None:
        _ = [piece async for piece in llm.astream(QUESTION)]

    async def blocking() -> None:
        llm.invoke(QUESTION)

    assert await loops.turns_while(model, streamed())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops, "BLOCKED_S", 0.2)
        assert not await loops.turns_while(model, blocking())


def test_calls_from_many_threads_get_their_own_answers(llm: Any) -> None:
    questions = [f"Where is Place{i}1?" for i in range(4)]
    expected = [text_of(llm.invoke(q)) for q in questions]
    answers: dict[int, str] = {}
    threads = [
        threading.Thread(target=lambda i=i: answers.update({i: text_of(llm.invoke(questions[i]))}))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[i] for i in range(4)] == expected
    assert [text_of(a) for a in llm.batch(questions)] == expected


# -- given up ----------------------------------------------------------------------------------------


async def test_a_cancelled_call_frees_the_model(llm: Any) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(llm.ainvoke(QUESTION, **LONG), 0.3)
    await assert_free(llm)


async def test_an_abandoned_stream_frees_the_model(llm: Any, seen: Any) -> None:
    stream = llm.astream(QUESTION, **LONG)
    async for _ in stream:
        break
    await stream.aclose()
    await assert_free(llm)
    for _ in llm.stream(QUESTION, config={"callbacks": [seen]}, **LONG):
        break
    await assert_free(llm)
    assert isinstance(seen.errors[0], GeneratorExit)


async def test_a_timeout_ends_the_request(llm: Any) -> None:
    late = {**LONG, "timeout": 0.2}
    with pytest.raises(RequestTimeout, match=r"within the timeout of 0.2 s"):
        llm.invoke(QUESTION, **late)
    with pytest.raises(RequestTimeout):
        list(llm.stream(QUESTION, **late))
    with pytest.raises(RequestTimeout):
        await llm.ainvoke(QUESTION, **late)
    with pytest.raises(RequestTimeout):
        _ = [piece async for piece in llm.astream(QUESTION, **late)]
    await assert_free(llm)


async def test_an_exhausted_stream_ends_and_stays_ended(llm: Any) -> None:
    stream = llm.stream(QUESTION)
    assert list(stream)
    assert list(stream) == []
    with pytest.raises(StopIteration):
        next(stream)
    awaited = llm.astream(QUESTION)
    assert [piece async for piece in awaited]
    assert [piece async for piece in awaited] == []
    with pytest.raises(StopAsyncIteration):
        await anext(awaited)


# -- batches -----------------------------------------------------------------------------------------


async def test_one_bad_prompt_of_a_batch_does_not_lose_the_others(llm: Any) -> None:
    prompts = ["Where is Place32?", "", "And Place11?"]
    kind = type(llm.invoke(prompts[0]))
    for out in (
        llm.batch(prompts, return_exceptions=True),
        await llm.abatch(prompts, return_exceptions=True),
    ):
        assert [type(o) for o in out] == [kind, InvalidInputError, kind]
        assert text_of(out[0]) == text_of(llm.invoke(prompts[0]))
    with pytest.raises(InvalidInputError, match="empty"):
        llm.batch(prompts)
    with pytest.raises(InvalidInputError, match="empty"):
        await llm.abatch(prompts)


async def test_a_timeout_is_left_in_its_place_even_if_it_comes_while_prompts_are_planned(
    llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    anchors = llm.engine.resources.corpus.chunk_index
    find = anchors.find

    def slow(*given: Any) -> Any:
        time.sleep(0.3)
        return find(*given)

    monkeypatch.setattr(anchors, "find", slow)
    late: dict[str, Any] = {"timeout": 0.2, "return_exceptions": True}
    for out in (llm.batch([QUESTION] * 2, **late), await llm.abatch([QUESTION] * 2, **late)):
        assert [type(o) for o in out] == [RequestTimeout] * 2


async def test_a_closed_engine_is_named_in_a_sentence(tmp_path: Any) -> None:
    engine = BlendEngine("demo", tmp_path / "kv", embedder="minilm-offline")
    made = [ChatBlend(engine=engine), BlendLLM(engine=engine)]
    engine.close()
    for llm in made:
        with pytest.raises(
            InvalidInputError, match="this engine is closed; make a new BlendEngine"
        ):
            llm.invoke(QUESTION)
        with pytest.raises(InvalidInputError, match="this engine is closed"):
            list(llm.stream(QUESTION))
        with pytest.raises(InvalidInputError, match="this engine is closed"):
            await llm.ainvoke(QUESTION)
