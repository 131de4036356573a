"""Both models on event loops and threads, cancelled, timed out and in batches."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.messages import HumanMessage, SystemMessage

import loops
from blendrag.errors import InvalidInputError, RequestTimeout

QUESTION = "Where is Place32?"
MESSAGES = [SystemMessage("Be brief."), HumanMessage(QUESTION)]
DICTS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
LONG = {"max_tokens": 3000}


def text_of(answer: Any) -> str:
    return answer if isinstance(answer, str) else str(answer.content)


async def assert_free(llm: Any) -> None:
    """The model answers another request."""
    assert await asyncio.wait_for(llm.ainvoke(QUESTION, max_tokens=2), 120)


async def test_all_ways_of_calling_give_the_answer_of_the_engine(either: Any) -> None:
    expected = either.engine.generate(DICTS).text
    assert text_of(either.invoke(MESSAGES)) == expected  # sync, inside a running loop
    assert text_of(await either.ainvoke(MESSAGES)) == expected
    assert "".join([text_of(piece) async for piece in either.astream(MESSAGES)]) == expected
    assert "".join(text_of(piece) for piece in either.stream(MESSAGES)) == expected
    assert [text_of(a) for a in await either.abatch([MESSAGES, MESSAGES])] == [expected] * 2
    assert [text_of(a) for a in either.batch([MESSAGES, MESSAGES])] == [expected] * 2


async def test_the_event_loop_runs_while_the_model_works(either: Any) -> None:
    model = either.engine.adapter.model

    async def streamed() -> None:
        _ = [piece async for piece in either.astream(QUESTION)]

    assert await loops.turns_while(model, either.ainvoke(QUESTION))
    assert await loops.turns_while(model, streamed())


def test_stop_ends_the_answer_in_every_way_of_calling(either: Any, seen: Any) -> None:
    whole, config = text_of(either.invoke(QUESTION)), {"callbacks": [seen]}
    stop = whole[2:4]
    given = type(either)(engine=either.engine, stop=[stop])
    answers = [
        either.invoke(QUESTION, config, stop=[stop]),
        either.bind(stop=[stop]).invoke(QUESTION, config),
        given.invoke(QUESTION, config),
    ]
    streamed = "".join(text_of(piece) for piece in either.stream(QUESTION, config, stop=[stop]))
    assert {streamed, *map(text_of, answers)} == {whole[: whole.index(stop)]}
    infos = [result.generations[0][0].generation_info for result in seen.results]
    assert [info["finish_reason"] for info in infos] == ["stop"] * 4


async def test_a_cancelled_call_and_abandoned_streams_free_the_model(
    either: Any, seen: Any
) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(either.ainvoke(QUESTION, **LONG), 0.1)
    await assert_free(either)
    stream = either.astream(QUESTION, **LONG)
    async for _ in stream:
        break
    await stream.aclose()
    await assert_free(either)
    for _ in either.stream(QUESTION, config={"callbacks": [seen]}, **LONG):
        break
    await assert_free(either)
    assert isinstance(seen.errors[0], GeneratorExit)


async def test_a_timeout_ends_the_request(either: Any) -> None:
    late = {**LONG, "timeout": 0.1}
    with pytest.raises(RequestTimeout, match=r"within the timeout of 0.1 s"):
        either.invoke(QUESTION, **late)
    with pytest.raises(RequestTimeout):
        list(either.stream(QUESTION, **late))
    with pytest.raises(RequestTimeout):
        await either.ainvoke(QUESTION, **late)
    with pytest.raises(RequestTimeout):
        _ = [piece async for piece in either.astream(QUESTION, **late)]
    await assert_free(either)


async def test_one_bad_prompt_of_a_batch_does_not_lose_the_others(either: Any) -> None:
    prompts = [QUESTION, "", "And Place11?"]
    kind = type(either.invoke(prompts[0]))
    for out in (
        either.batch(prompts, return_exceptions=True),
        await either.abatch(prompts, return_exceptions=True),
    ):
        assert [type(o) for o in out] == [kind, InvalidInputError, kind]
        assert text_of(out[0]) == text_of(either.invoke(prompts[0]))
    with pytest.raises(InvalidInputError, match="empty"):
        either.batch(prompts)
    with pytest.raises(InvalidInputError, match="empty"):
        await either.abatch(prompts)
