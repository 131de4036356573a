"""Many callers, one model: event loops stay free, threads get their own answers."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import tiny
from blendrag.engine import BlendEngine, Options, rendering, resources
from blendrag.errors import BlendragError
from blendrag.model.tokens import Tokens

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    model = tiny.llama()
    model.generation_config.eos_token_id = None
    with tiny.engine(model, tmp_path_factory.mktemp("async") / "store") as made:
        made.ingest([tiny.document(i) for i in range(4)])
        yield made


def prompt(engine: BlendEngine, number: int) -> str:
    return "\n\n".join(tiny.chunk_texts(engine, number)) + f"\n\nQuestion {number}?"


@pytest.fixture
def slow(engine: BlendEngine) -> Iterator[None]:
    """Every forward takes a tenth of a second and lets other threads run."""
    handle = engine.adapter.stack.base.register_forward_pre_hook(lambda *_: time.sleep(0.1))
    yield
    handle.remove()


async def heartbeat(gaps: list[float]) -> None:
    last = time.perf_counter()
    while True:
        await asyncio.sleep(0.005)
        now = time.perf_counter()
        gaps.append(now - last)
        last = now


@pytest.mark.usefixtures("slow")
async def test_agenerate_does_not_block_the_event_loop(engine: BlendEngine) -> None:
    text = prompt(engine, 1)
    gaps: list[float] = []
    beat = asyncio.create_task(heartbeat(gaps))
    began = time.perf_counter()
    answer = await engine.agenerate(text, Options(max_new_tokens=5))
    took = time.perf_counter() - began
    beat.cancel()
    assert answer.metrics.new_tokens == 5
    assert took >= 0.5
    assert max(gaps) < 0.3 * took
    assert len(gaps) > 10


@pytest.mark.usefixtures("slow")
async def test_astream_yields_while_the_loop_runs(engine: BlendEngine) -> None:
    text = prompt(engine, 2)
    expected = await engine.agenerate(text, Options(max_new_tokens=6))
    gaps: list[float] = []
    beat = asyncio.create_task(heartbeat(gaps))
    pieces: list[str] = []
    times: list[float] = []
    async for piece in engine.astream(text, Options(max_new_tokens=6)):
        pieces.append(piece)
        times.append(time.perf_counter())
    beat.cancel()
    assert "".join(pieces) == expected.text
    assert times[-1] - times[0] > 0.1  # they did not come all at once
    assert len(gaps) > 10


async def test_concurrent_tasks_each_get_their_answer(engine: BlendEngine) -> None:
    alone = [engine.generate(prompt(engine, i)).text for i in range(4)]
    assert len(set(alone)) > 1
    together = await asyncio.gather(*(engine.agenerate(prompt(engine, i % 4)) for i in range(12)))
    assert [answer.text for answer in together] == [alone[i % 4] for i in range(12)]


def test_concurrent_threads_each_get_their_answer_in_any_mode(engine: BlendEngine) -> None:
    jobs = [(i % 4, mode) for i in range(8) for mode in ("blend", "full", "reuse")]
    alone = {
        job: engine.generate(prompt(engine, job[0]), Options(mode=job[1])).text for job in jobs
    }

    def ask(job: tuple[int, Any]) -> str:
        pieces = engine.stream(prompt(engine, job[0]), Options(mode=job[1]))
        return "".join(pieces)

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, jobs)) == [alone[job] for job in jobs]


@pytest.mark.usefixtures("slow")
async def test_a_task_cancelled_while_its_prompt_is_planned_frees_the_model(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    planning, go_on = threading.Event(), threading.Event()

    def render_later(*args: Any) -> str:
        planning.set()
        assert go_on.wait(10)
        return rendering.render(*args)

    monkeypatch.setattr("blendrag.engine.engine.render", render_later)
    task = asyncio.create_task(engine.agenerate(prompt(engine, 1), Options(max_new_tokens=1000)))
    assert await asyncio.to_thread(planning.wait, 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
    began = time.perf_counter()
    answer = await engine.agenerate(prompt(engine, 2), Options(max_new_tokens=1))
    assert answer.metrics.new_tokens == 1
    assert time.perf_counter() - began < 2.0


async def test_an_error_reaches_the_awaiting_task(engine: BlendEngine) -> None:
    with pytest.raises(BlendragError, match="over the model's context"):
        await engine.agenerate("word " * 9000)
    with pytest.raises(BlendragError, match="over the model's context"):
        async for _ in engine.astream("word " * 9000):
            pass
    assert (await engine.agenerate("hello there")).metrics.new_tokens == 6


def test_threads_can_ask_before_the_first_ingest(tmp_path: Any) -> None:
    with tiny.engine(tiny.llama(), tmp_path / "nothing") as fresh:
        expected = fresh.generate("hello there").text
        barrier = threading.Barrier(8)

        def ask(_: int) -> list[str]:
            barrier.wait()
            return [fresh.generate("hello there", Options(max_new_tokens=6)).text for _ in range(5)]

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(ask, range(8))) == [[expected] * 5] * 8


def test_many_threads_can_look_up_the_corpus(tmp_path: Any) -> None:
    with tiny.engine(tiny.llama(), tmp_path / "nothing") as fresh:
        used = fresh.resources
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)  # threads fall over each other as often as they can
        try:
            with ThreadPoolExecutor(4) as pool:
                found = list(pool.map(lambda _: used.corpus, range(2000)))
        finally:
            sys.setswitchinterval(interval)
        assert found == [None] * 2000


def test_a_model_asked_for_by_many_threads_is_loaded_once(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[str] = []

    def load(name: str, *args: Any) -> Any:
        loads.append(name)
        time.sleep(0.1)
        return tiny.adapter(tiny.llama())

    monkeypatch.setattr(resources, "load_adapter", load)
    with tiny.engine("some/model", tmp_path / "s", tokenizer=None) as fresh:
        with ThreadPoolExecutor(4) as pool:
            adapters = list(pool.map(lambda _: fresh.adapter, range(4)))
        assert len({id(adapter) for adapter in adapters}) == 1
        assert loads == ["some/model"]


async def test_a_loading_model_does_not_block_the_event_loop(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: Any) -> Any:
        time.sleep(0.5)
        return tiny.adapter(tiny.llama())

    monkeypatch.setattr(resources, "load_adapter", load)
    monkeypatch.setattr(resources, "load_tokens", lambda *args: Tokens(tiny.tokenizer()))
    with tiny.engine("some/model", tmp_path / "s", tokenizer=None) as fresh:
        gaps: list[float] = []
        beat = asyncio.create_task(heartbeat(gaps))
        first = asyncio.create_task(fresh.agenerate("hello there"))
        await asyncio.sleep(0.1)  # the worker is loading
        second = asyncio.create_task(fresh.agenerate("hello there"))
        assert (await first).text == (await second).text
        beat.cancel()
        assert max(gaps) < 0.3
