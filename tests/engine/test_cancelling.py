"""A request that is abandoned, cancelled or late stops, and the model is free for the next one."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import Mock

import pytest

import scripted
import tiny
from blendrag.engine import AnswerIterator, BlendEngine, Options
from blendrag.errors import InvalidInputError, RequestCancelled, RequestTimeout
from blendrag.frameworks.streaming import astream_pieces, stream_pieces
from blendrag.text.rendered import Rendered
from loops import BLOCKED_S
from server.live import until

LONG = "one two three four five six seven eight nine ten " * 100
SHORT = "Yes, it is."


@pytest.fixture
def engine(tmp_path: Any) -> Iterator[BlendEngine]:
    """Answers "talk" for minutes unless it is stopped."""
    given = {"default": LONG, "max_new_tokens": 3000}
    with scripted.engine([("short", SHORT)], tmp_path / "s", **given) as made:
        made.generate("short", Options(max_new_tokens=1))
        made.adapter.model.pause_s = 0.03
        yield made


def assert_free(engine: BlendEngine) -> None:
    """Nothing runs, and the next request is answered before "talk" would be."""
    model = engine.adapter.model
    model.pause_s = 0.0
    assert engine.generate("short", Options(timeout_s=60)).text == SHORT
    engine.drain()
    assert not engine.scheduler.waiting
    assert not engine.scheduler.running


@contextmanager
def held(engine: BlendEngine) -> Iterator[threading.Event]:
    """The model does not go on while the context lasts; the event is set once a forward waits."""
    entered, go_on = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        entered.set()
        go_on.wait(BLOCKED_S)

    with engine.adapter.model.register_forward_pre_hook(wait):
        try:
            yield entered
        finally:
            go_on.set()


def make_late(pieces: AnswerIterator) -> None:
    """As if the time of this request were over."""
    pieces.pending.stream.timeout_s = 0.0


# -- abandoned requests ---------------------------------------------------------------------------


def throw(pieces: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        pieces.throw(ZeroDivisionError)


@pytest.mark.parametrize(
    ("start", "leave"),
    [
        (BlendEngine.stream, AnswerIterator.close),
        (BlendEngine.stream, lambda pieces: None),  # drops the last reference
        (stream_pieces, throw),
    ],
)
def test_leaving_a_stream_stops_it(engine, start, leave):
    pieces = start(engine, "talk", Options())
    next(pieces)
    leave(pieces)
    del pieces
    gc.collect()
    assert_free(engine)


@pytest.mark.parametrize("start", [BlendEngine.astream, astream_pieces])
async def test_leaving_an_async_stream_stops_it(engine, start):
    pieces = start(engine, "talk", Options())
    async for _ in pieces:
        break
    await pieces.aclose()
    await asyncio.to_thread(assert_free, engine)


async def test_cancelling_a_task_stops_its_stream_before_the_first_piece(engine):
    async def consume() -> None:
        async for _ in astream_pieces(engine, "talk", Options()):
            raise AssertionError("it was cancelled before")

    with held(engine) as entered:
        task = asyncio.create_task(consume())
        assert await asyncio.to_thread(entered.wait, BLOCKED_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await asyncio.to_thread(assert_free, engine)


async def test_a_request_cancelled_in_the_queue_never_starts(engine):
    engine.scheduler.max_running = 1
    talking = engine.stream("talk")
    next(talking)
    prompts = len(engine.adapter.model.prompts)
    waiting = asyncio.create_task(engine.agenerate("short"))
    while not engine.scheduler.waiting:
        await asyncio.sleep(0.005)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    while engine.scheduler.waiting:  # it leaves the queue while the other one talks
        await asyncio.sleep(0.005)
    assert not talking.pending.future.done()
    talking.close()
    await asyncio.to_thread(engine.drain)
    assert len(engine.adapter.model.prompts) == prompts


def test_a_loop_that_ends_during_a_stream_leaves_nothing_running(engine):
    async def leave() -> None:
        pieces = engine.astream("talk")
        await anext(pieces)
        keep.append(pieces)

    keep: list[Any] = []
    asyncio.run(leave())
    after = len(keep[0].pending.stream.tokens) + 3
    until(lambda: len(keep[0].pending.stream.tokens) > after)  # they are told to the closed loop
    keep.clear()
    gc.collect()
    assert_free(engine)


def test_an_abandoned_stream_releases_its_kv_cache(engine):
    """The iterator, which keeps the error that ended the request, does not keep the cache."""
    caches: list[weakref.ref[Any]] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        caches.append(weakref.ref(kwargs["past_key_values"]))

    with engine.adapter.model.model.register_forward_pre_hook(note, with_kwargs=True):
        pieces = engine.stream("talk")
        next(pieces)
        pieces.close()
    engine.drain()
    gc.collect()
    assert caches
    assert [cache() for cache in caches if cache() is not None] == []
    with pytest.raises(RequestCancelled):
        _ = pieces.answer


# -- iterators ------------------------------------------------------------------------------------


def test_an_exhausted_iterator_keeps_its_answer(engine):
    pieces = engine.stream("short")
    assert ["".join(pieces), *pieces] == [SHORT]
    pieces.close()
    assert pieces.answer.text == SHORT


def test_a_closed_iterator_ends_at_once_and_has_no_answer(engine):
    talking, queued = engine.stream("talk"), engine.stream("talk")
    next(talking)
    for pieces in (queued, talking):
        pieces.close()
        pieces.close()
        assert list(pieces) == []
        with pytest.raises(RequestCancelled):
            _ = pieces.answer


def test_closing_from_another_thread_wakes_the_reader(engine):
    with held(engine):
        pieces = engine.stream("talk")
        threading.Timer(0.05, pieces.close).start()
        assert list(pieces) == []


async def test_an_async_iterator_has_its_answer_once_exhausted(engine):
    pieces = engine.astream("short")
    with pytest.raises(RequestCancelled, match="iterate to the end"):
        _ = pieces.answer
    assert "".join([piece async for piece in pieces]) == SHORT
    with pytest.raises(StopAsyncIteration):
        await anext(pieces)
    assert pieces.answer.text == SHORT
    prompts = len(engine.adapter.model.prompts)
    unused = engine.astream("talk")
    await unused.aclose()
    assert [piece async for piece in unused] == []
    assert len(engine.adapter.model.prompts) == prompts


async def test_waiting_streams_take_no_threads_of_the_event_loop(engine):
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    with held(engine):
        streams = [engine.astream("short") for _ in range(4)]
        waiting = [asyncio.ensure_future(anext(pieces)) for pieces in streams]
        while len(engine.scheduler.waiting) < 3:
            await asyncio.sleep(0.005)
        await asyncio.wait_for(asyncio.to_thread(lambda: None), BLOCKED_S)
    assert await asyncio.gather(*waiting) == ["Y"] * 4
    for pieces in streams:
        await pieces.aclose()


def test_a_closed_engine_finishes_its_streams_and_refuses_more(engine):
    engine.adapter.model.pause_s = 0.0
    pieces = engine.stream("short")
    engine.close()
    assert "".join(pieces) == SHORT
    with pytest.raises(InvalidInputError, match="closed"):
        asyncio.run(engine.agenerate("short"))


# -- timeouts -------------------------------------------------------------------------------------


def test_a_timeout_stops_decoding(engine):
    before = engine.adapter.model.forwards
    with pytest.raises(RequestTimeout, match=r"timeout of 0\.2 s") as raised:
        engine.generate("talk", Options(timeout_s=0.2))
    assert tiny.one_sentence(str(raised.value))
    assert isinstance(raised.value, TimeoutError)
    assert_free(engine)
    assert engine.adapter.model.forwards - before < 40


@pytest.mark.parametrize(
    "options",
    [{}, {"mode": "reuse"}, {"mode": "reuse", "generate_kwargs": {"num_beams": 2}}],
    ids=str,
)
def test_a_late_or_abandoned_request_stops_its_prefill_at_the_next_layer(engine, options):
    engine.ingest([tiny.document(0, 2)])
    text = tiny.prompt(engine, 0, ask="short?") if options else "talk"
    engine.generate(text, Options(**options, max_new_tokens=1))
    entered, ended = [], threading.Event()

    def enter(*_: Any) -> None:
        entered.append(None)
        assert ended.wait(BLOCKED_S)

    with ExitStack() as hooks:
        for layer in engine.adapter.decoder_layers:
            hooks.enter_context(layer.register_forward_pre_hook(enter))
        for end in (make_late, AnswerIterator.close):
            pieces = engine.stream(text, Options(**options, timeout_s=600))
            while not entered:
                time.sleep(0.005)
            end(pieces)
            ended.set()
            engine.drain()
            assert len(entered) == 1  # of four
            with pytest.raises(RequestTimeout if end is make_late else RequestCancelled):
                _ = pieces.answer
            entered.clear()
            ended.clear()
    assert_free(engine)


def test_time_in_the_queue_counts(engine):
    engine.scheduler.max_running = 1
    talking = engine.stream("talk")
    next(talking)
    prompts = len(engine.adapter.model.prompts)
    with pytest.raises(RequestTimeout):
        engine.generate("short", Options(timeout_s=0.2))
    assert next(talking)  # the request before it goes on
    talking.close()
    assert_free(engine)
    assert len(engine.adapter.model.prompts) == prompts + 1  # the late one never started


def test_a_late_stream_gives_its_pieces_and_then_raises(engine):
    pieces = engine.stream("talk", Options(timeout_s=600))
    heard = [next(pieces)]
    make_late(pieces)
    with pytest.raises(RequestTimeout):
        heard.extend(pieces)
    assert LONG.startswith("".join(heard))
    with pytest.raises(StopIteration):
        next(pieces)
    with pytest.raises(RequestTimeout):
        _ = pieces.answer
    assert_free(engine)


async def heard(engine: BlendEngine, options: Options) -> list[str]:
    return [piece async for piece in engine.astream("talk", options)]


WAYS: dict[str, Callable[[BlendEngine, Options], Any]] = {
    "agenerate": lambda engine, options: engine.agenerate("talk", options),
    "astream": heard,
    "abatch": lambda engine, options: engine.abatch(["talk"], options),
}


@pytest.mark.parametrize("way", WAYS)
async def test_timeouts_on_an_event_loop(engine, way):
    with pytest.raises(TimeoutError):
        await WAYS[way](engine, Options(timeout_s=0.2))
    await asyncio.to_thread(assert_free, engine)


@pytest.mark.parametrize("way", WAYS)
async def test_waiting_for_a_thread_of_the_loop_counts(engine, way):
    loop, go_on = asyncio.get_running_loop(), threading.Event()
    loop.set_default_executor(ThreadPoolExecutor(1))
    busy = loop.run_in_executor(None, go_on.wait, BLOCKED_S)
    with pytest.raises(RequestTimeout):
        await WAYS[way](engine, Options(timeout_s=0.1))
    go_on.set()
    await busy
    await asyncio.to_thread(assert_free, engine)


async def test_a_timeout_while_rendering_frees_the_caller_and_starts_nothing(engine, monkeypatch):
    go_on = threading.Event()

    def render_slowly(*args: Any) -> Rendered:
        assert go_on.wait(BLOCKED_S)
        return Rendered("talk")

    monkeypatch.setattr("blendrag.engine.prompts.render", render_slowly)
    prompts = len(engine.adapter.model.prompts)
    with pytest.raises(RequestTimeout):
        await engine.agenerate("talk", Options(timeout_s=0.1))
    go_on.set()
    await asyncio.sleep(0.2)
    assert len(engine.adapter.model.prompts) == prompts


async def test_other_timeout_errors_are_not_changed(engine, monkeypatch):
    """For example filelock's, which is a ``TimeoutError`` too."""
    locked = TimeoutError("the lock of the store")
    monkeypatch.setattr(engine.adapter.model, "generate", Mock(side_effect=locked))
    with pytest.raises(TimeoutError, match="lock of the store"):
        await asyncio.to_thread(engine.generate, "talk", Options(timeout_s=60))
    with pytest.raises(TimeoutError, match="lock of the store"):
        await engine.agenerate("talk", Options(timeout_s=60))
