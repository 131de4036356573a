"""Who goes away stops the work, however they go; who stays is never left hanging."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import scripted
import tiny
from blendrag.engine import BlendEngine, Options
from blendrag.engine.worker import Worker
from blendrag.errors import InvalidInputError, RequestCancelled
from blendrag.frameworks.shared import astream_pieces, stream_pieces

pytestmark = [pytest.mark.timeout(60), pytest.mark.alone]
LONG = "one two three four five six seven eight nine ten " * 6


@pytest.fixture
def engine(tmp_path: Any) -> Iterator[BlendEngine]:
    """Talks for many seconds unless it is stopped."""
    with scripted.engine([("short", "Yes, it is.")], tmp_path / "s", default=LONG) as made:
        made.generate("short")
        made.adapter.model.pause_s = 0.03
        yield made


def assert_stopped(engine: BlendEngine) -> None:
    """No more forwards than the one at hand, and the model is free."""
    model = engine.adapter.model
    time.sleep(0.1)
    forwards = model.forwards
    time.sleep(0.2)
    assert model.forwards == forwards
    assert engine.generate("short", Options(timeout_s=5)).text == "Yes, it is."


# -- going away ---------------------------------------------------------------------------------


def close(pieces: Iterator[Any]) -> None:
    pieces.close()  # type: ignore[attr-defined]


def drop(pieces: Iterator[Any]) -> None:
    """The caller keeps no reference; nothing else may."""


def throw(pieces: Iterator[Any]) -> None:
    with pytest.raises(ZeroDivisionError):
        pieces.throw(ZeroDivisionError)  # type: ignore[attr-defined]


@pytest.mark.parametrize("leave", [close, drop])
def test_leaving_a_stream_stops_it(engine: BlendEngine, leave: Callable[..., None]) -> None:
    pieces = engine.stream("talk")
    next(pieces)
    leave(pieces)
    del pieces
    gc.collect()
    assert_stopped(engine)


@pytest.mark.parametrize("leave", [close, drop, throw])
def test_leaving_the_pieces_of_a_plug_stops_them(
    engine: BlendEngine, leave: Callable[..., None]
) -> None:
    pieces = stream_pieces(engine, "talk", Options())
    next(pieces)
    leave(pieces)
    del pieces
    gc.collect()
    assert_stopped(engine)


def test_an_error_of_the_consumer_stops_the_stream(engine: BlendEngine) -> None:
    def consume() -> None:
        for _ in engine.stream("talk"):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        consume()
    assert_stopped(engine)


async def test_leaving_an_async_stream_stops_it_with_or_without_aclose(engine: BlendEngine) -> None:
    async for _ in engine.astream("talk"):
        break
    await asyncio.to_thread(assert_stopped, engine)
    pieces = astream_pieces(engine, "talk", Options())
    async for _ in pieces:
        break
    await pieces.aclose()
    await asyncio.to_thread(assert_stopped, engine)


async def test_a_cancelled_task_stops_an_async_stream_before_its_first_piece(
    engine: BlendEngine,
) -> None:
    engine.adapter.model.pause_s = 0.5

    async def consume() -> None:
        async for _ in astream_pieces(engine, "talk", Options()):
            raise AssertionError("it was cancelled before")

    task = asyncio.create_task(consume())
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    engine.adapter.model.pause_s = 0.0
    await asyncio.sleep(0.5)
    await asyncio.to_thread(assert_stopped, engine)


async def test_a_request_cancelled_in_the_queue_is_never_begun(engine: BlendEngine) -> None:
    talking = engine.stream("talk")
    next(talking)
    prompts = len(engine.adapter.model.prompts)
    waiting = asyncio.create_task(engine.agenerate("short"))
    await asyncio.sleep(0.1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    talking.close()
    await asyncio.to_thread(engine.drain)
    assert len(engine.adapter.model.prompts) == prompts


async def test_wait_for_of_asyncio_works_as_a_timeout_too(engine: BlendEngine) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.agenerate("talk"), 0.2)
    await asyncio.to_thread(assert_stopped, engine)


# -- staying ------------------------------------------------------------------------------------


def test_an_exhausted_iterator_stays_exhausted_and_keeps_its_answer(engine: BlendEngine) -> None:
    pieces = engine.stream("short")
    assert "".join(pieces) == "Yes, it is."
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(pieces)
    assert pieces.answer.text == "Yes, it is."
    assert pieces.answer is not None
    pieces.close()
    assert pieces.answer.text == "Yes, it is."


def test_a_closed_iterator_ends_at_once_and_has_no_answer(engine: BlendEngine) -> None:
    pieces = engine.stream("talk")
    next(pieces)
    pieces.close()
    pieces.close()
    with pytest.raises(StopIteration):
        next(pieces)
    with pytest.raises(RequestCancelled):
        _ = pieces.answer


def test_a_stream_closed_in_the_queue_waits_for_nobody(engine: BlendEngine) -> None:
    talking, waiting = engine.stream("talk"), engine.stream("talk")
    next(talking)
    waiting.close()
    began = time.perf_counter()
    assert list(waiting) == []
    with pytest.raises(RequestCancelled):
        _ = waiting.answer
    assert time.perf_counter() - began < 0.5
    talking.close()


def test_closing_from_another_thread_wakes_who_waits(engine: BlendEngine) -> None:
    engine.adapter.model.pause_s = 1.0
    pieces = engine.stream("talk")
    threading.Timer(0.1, pieces.close).start()
    began = time.perf_counter()
    assert list(pieces) == []
    assert time.perf_counter() - began < 0.9
    engine.adapter.model.pause_s = 0.0


async def test_an_async_iterator_ends_once_and_has_its_answer_only_then(
    engine: BlendEngine,
) -> None:
    pieces = engine.astream("short")
    with pytest.raises(RequestCancelled, match="iterate to the end"):
        _ = pieces.answer
    assert "".join([piece async for piece in pieces]) == "Yes, it is."
    with pytest.raises(StopAsyncIteration):
        await anext(pieces)
    assert pieces.answer.text == "Yes, it is."
    closed = engine.astream("talk")
    await anext(closed)
    await closed.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(closed)


async def test_an_async_iterator_that_was_never_begun_asks_for_nothing(engine: BlendEngine) -> None:
    prompts = len(engine.adapter.model.prompts)
    pieces = engine.astream("talk")
    await pieces.aclose()
    assert [piece async for piece in pieces] == []
    assert len(engine.adapter.model.prompts) == prompts


async def test_generate_may_block_inside_a_running_event_loop(engine: BlendEngine) -> None:
    assert engine.generate("short").text == "Yes, it is."
    assert "".join(engine.stream("short")) == "Yes, it is."
    assert (await engine.agenerate("short")).text == "Yes, it is."


def test_one_engine_serves_one_event_loop_after_another(engine: BlendEngine) -> None:
    for _ in range(2):
        assert asyncio.run(engine.agenerate("short")).text == "Yes, it is."


def test_a_loop_that_ends_in_the_middle_leaves_nothing_running(engine: BlendEngine) -> None:
    async def leave() -> None:
        pieces = engine.astream("talk")
        await anext(pieces)
        keep.append(pieces)

    keep: list[Any] = []
    asyncio.run(leave())
    time.sleep(0.1)  # the worker goes on telling a loop that is closed
    keep.clear()
    gc.collect()
    assert_stopped(engine)


async def test_waiting_streams_take_no_threads_from_the_event_loop(engine: BlendEngine) -> None:
    """As many as the default executor has threads wait, and others still get one at once."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    engine.adapter.model.pause_s = 0.1

    async def first(pieces: Any) -> str:
        return await anext(pieces)

    streams = [engine.astream("short") for _ in range(6)]
    waiting = [asyncio.create_task(first(pieces)) for pieces in streams]
    await asyncio.sleep(0.2)
    began = time.perf_counter()
    await asyncio.to_thread(lambda: None)
    assert time.perf_counter() - began < 0.1
    assert await asyncio.gather(*waiting) == ["Y"] * 6
    for pieces in streams:
        await pieces.aclose()


def test_an_abandoned_stream_keeps_nothing_of_what_was_computed(engine: BlendEngine) -> None:
    """Although its iterator is kept, and with it the error that ended the request."""
    made: list[weakref.ref[Any]] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        made.append(weakref.ref(kwargs["past_key_values"]))

    hook = engine.adapter.model.model.register_forward_pre_hook(note, with_kwargs=True)
    pieces = engine.stream("talk")
    next(pieces)
    pieces.close()
    hook.remove()
    engine.drain()
    gc.collect()
    assert made
    assert [cache() for cache in made if cache() is not None] == []
    with pytest.raises(RequestCancelled):
        _ = pieces.answer


def test_an_idle_worker_holds_on_to_nothing_of_a_call_that_failed() -> None:
    class Computed:
        pass

    made: list[weakref.ref[Computed]] = []

    def fail() -> None:
        computed = Computed()
        made.append(weakref.ref(computed))
        raise MemoryError("none left")

    worker = Worker("test")
    with pytest.raises(MemoryError):
        worker.run(fail)
    time.sleep(0.1)
    gc.collect()
    assert made[0]() is None
    worker.close()


def test_draining_while_a_queued_request_is_cancelled_is_no_error() -> None:
    worker = Worker("test")
    gate, started = threading.Event(), threading.Event()
    worker.submit(lambda: (started.set(), gate.wait(5)))
    assert started.wait(5)
    queued = worker.submit(lambda: None)
    threading.Timer(0.1, lambda: (queued.cancel(), gate.set())).start()
    worker.drain()
    worker.close()


def test_a_closed_engine_ends_its_streams_and_refuses_more(engine: BlendEngine) -> None:
    engine.adapter.model.pause_s = 0.0
    pieces = engine.stream("short")
    engine.close()
    assert "".join(pieces) == "Yes, it is."
    with pytest.raises(InvalidInputError, match="closed"):
        asyncio.run(engine.agenerate("short"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_child_is_told_to_make_its_own_engine_and_does_not_hang() -> None:
    worker = Worker("test")
    worker.run(lambda: None)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            worker.run(lambda: None)
        except InvalidInputError as exc:
            code = 0 if tiny.one_sentence(str(exc)) and "spawn" in str(exc) else 2
        finally:
            worker.close()
            sys.stdout.flush()
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert worker.run(lambda: 7) == 7
    worker.close()
