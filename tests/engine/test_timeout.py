"""A timeout counts from being asked, ends the computation wherever it is, and leaves the model free."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

import scripted
import tiny
from blendrag.engine import BlendEngine, Options
from blendrag.engine.rendering import Rendered
from blendrag.errors import InvalidInputError, RequestTimeout

pytestmark = [pytest.mark.timeout(60), pytest.mark.alone]
LONG = "one two three four five six seven eight nine ten " * 6


@pytest.fixture
def engine(tmp_path: Any) -> Iterator[BlendEngine]:
    """Talks for many seconds unless it is stopped: every token takes a twentieth of one."""
    with scripted.engine([("short", "Yes.")], tmp_path / "s", default=LONG) as made:
        made.generate("short")
        made.adapter.model.pause_s = 0.05
        yield made


@contextmanager
def slow_layers(engine: BlendEngine) -> Iterator[list[float]]:
    """Every layer takes a fifth of a second; the times at which one was entered."""
    entered: list[float] = []

    def enter(*_: Any) -> None:
        entered.append(time.perf_counter())
        time.sleep(0.2)

    hooks = [layer.register_forward_pre_hook(enter) for layer in engine.adapter.decoder_layers]
    try:
        yield entered
    finally:
        for hook in hooks:
            hook.remove()


def assert_free(engine: BlendEngine) -> None:
    """Nothing runs, and the next request is answered at once."""
    model = engine.adapter.model
    model.pause_s = 0.0
    began = time.perf_counter()
    assert engine.generate("short").text == "Yes."
    assert time.perf_counter() - began < 2.0
    forwards = model.forwards
    time.sleep(0.15)
    assert model.forwards == forwards


def test_a_timeout_in_decoding_stops_it(engine: BlendEngine) -> None:
    before, began = engine.adapter.model.forwards, time.perf_counter()
    with pytest.raises(RequestTimeout, match=r"timeout of 0\.4 s") as raised:
        engine.generate("talk", Options(timeout_s=0.4))
    assert 0.35 < time.perf_counter() - began < 1.5
    assert tiny.one_sentence(str(raised.value))
    assert isinstance(raised.value, TimeoutError)
    assert_free(engine)
    assert engine.adapter.model.forwards - before < 20


def test_a_timeout_in_the_prefill_ends_it_at_the_next_layer(engine: BlendEngine) -> None:
    with slow_layers(engine) as entered:
        with pytest.raises(RequestTimeout):
            engine.generate("talk", Options(timeout_s=0.3))
        time.sleep(0.4)
    assert 1 <= len(entered) <= 2  # of four
    assert_free(engine)


@pytest.mark.parametrize("generate", [{}, {"num_beams": 2}])
def test_a_timeout_in_a_blended_prefill_ends_it_at_the_next_layer(
    engine: BlendEngine, generate: dict[str, Any]
) -> None:
    engine.ingest([tiny.document(0)])
    text = "\n\n".join(tiny.chunk_texts(engine, 0)) + "\n\nshort?"
    assert engine.generate(text, Options(mode="reuse")).metrics.reused_tokens > 0
    with slow_layers(engine) as entered:
        with pytest.raises(RequestTimeout):
            engine.generate(text, Options(timeout_s=0.3, mode="reuse", generate=generate))
        time.sleep(0.4)
    assert 1 <= len(entered) <= 2
    assert_free(engine)


def test_a_request_that_waits_in_the_queue_counts_its_timeout(engine: BlendEngine) -> None:
    talking = engine.stream("talk")
    next(talking)
    prompts = len(engine.adapter.model.prompts)
    began = time.perf_counter()
    with pytest.raises(RequestTimeout):
        engine.generate("short", Options(timeout_s=0.3))
    assert time.perf_counter() - began < 1.5
    assert next(talking)  # the one before it goes on
    talking.close()
    assert_free(engine)
    assert len(engine.adapter.model.prompts) == prompts + 1  # what was late was never begun


def test_a_stream_gives_what_there_was_and_then_says_that_it_is_late(engine: BlendEngine) -> None:
    pieces = engine.stream("talk", Options(timeout_s=0.5))
    heard: list[str] = []
    with pytest.raises(RequestTimeout):
        heard.extend(iter(pieces.__next__, None))
    assert heard
    assert LONG.startswith("".join(heard))
    with pytest.raises(StopIteration):
        next(pieces)
    with pytest.raises(RequestTimeout):
        _ = pieces.answer
    assert_free(engine)


async def test_timeouts_on_an_event_loop(engine: BlendEngine) -> None:
    with pytest.raises(RequestTimeout):
        await engine.agenerate("talk", Options(timeout_s=0.3))
    heard: list[str] = []

    async def listen() -> None:
        async for piece in engine.astream("talk", Options(timeout_s=0.5)):
            heard.append(piece)

    with pytest.raises(RequestTimeout):
        await listen()
    assert heard
    await asyncio.to_thread(assert_free, engine)


async def test_a_timeout_while_the_prompt_is_planned_frees_the_caller_and_starts_nothing(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan_slowly(*args: Any) -> Rendered:
        time.sleep(0.6)
        return "talk"

    monkeypatch.setattr("blendrag.engine.engine.render", plan_slowly)
    prompts, began = len(engine.adapter.model.prompts), time.perf_counter()
    with pytest.raises(RequestTimeout):
        await engine.agenerate("talk", Options(timeout_s=0.2))
    assert time.perf_counter() - began < 0.55
    await asyncio.sleep(0.8)
    assert len(engine.adapter.model.prompts) == prompts


@pytest.mark.parametrize("way", ["agenerate", "astream", "abatch"])
async def test_waiting_for_a_thread_to_plan_in_counts(engine: BlendEngine, way: str) -> None:
    """A busy default executor does not give a request its time anew."""

    async def ask() -> None:
        if way == "astream":
            _ = [piece async for piece in engine.astream("talk", options)]
        elif way == "abatch":
            await engine.abatch(["talk"], options)
        else:
            await engine.agenerate("talk", options)

    loop, options = asyncio.get_running_loop(), Options(timeout_s=1.5)
    loop.set_default_executor(ThreadPoolExecutor(1))
    busy = loop.run_in_executor(None, time.sleep, 1.2)
    began = time.perf_counter()
    with pytest.raises(RequestTimeout):
        await ask()
    assert time.perf_counter() - began < 2.4  # 2.7 with its time given anew
    await busy
    await asyncio.to_thread(assert_free, engine)


def test_a_batchs_timeout_counts_from_before_its_first_prompt_was_planned(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan_slowly(*args: Any) -> Rendered:
        time.sleep(0.1)
        return Rendered("short")

    monkeypatch.setattr("blendrag.engine.engine.render", plan_slowly)
    found = engine.batch(["short"] * 4, Options(timeout_s=0.35), return_exceptions=True)
    assert [type(one) for one in found] == [RequestTimeout] * 4


def test_an_error_that_is_a_timeout_of_something_else_stays_what_it_is(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """filelock's, for one, is a ``TimeoutError`` too."""

    def locked(*args: Any, **kwargs: Any) -> None:
        raise TimeoutError("the lock of the store")

    monkeypatch.setattr(engine.adapter.model, "generate", locked)
    with pytest.raises(TimeoutError, match="lock of the store"):
        engine.generate("talk", Options(timeout_s=30))
    with pytest.raises(TimeoutError, match="lock of the store"):
        asyncio.run(engine.agenerate("talk", Options(timeout_s=30)))


def test_a_request_in_time_does_not_notice_its_timeout(engine: BlendEngine) -> None:
    assert engine.generate("short", Options(timeout_s=30)).text == "Yes."


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan")])
def test_a_timeout_must_be_more_than_nothing(timeout_s: float) -> None:
    with pytest.raises(InvalidInputError, match="timeout_s") as raised:
        Options(timeout_s=timeout_s)
    assert tiny.one_sentence(str(raised.value))
