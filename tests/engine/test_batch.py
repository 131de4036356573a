"""Several prompts of one call: in order, all planned first, and no error or answer is lost unseen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

import scripted
import tiny
from blendrag.engine import Answer, BlendEngine, Options, rendering
from blendrag.errors import ContextOverflowError, InvalidInputError, RequestTimeout

pytestmark = [pytest.mark.timeout(60), pytest.mark.alone]
SCRIPT = [(f"say {word}", word) for word in ("one", "two", "three")]
PROMPTS = [f"say {word}" for word in ("two", "three", "one", "two")]


@pytest.fixture
def engine(tmp_path: Any) -> Iterator[BlendEngine]:
    with scripted.engine(SCRIPT, tmp_path / "s") as made:
        made.generate("hello")
        made.adapter.model.prompts.clear()
        yield made


def run(engine: BlendEngine, way: str, *args: Any, **kwargs: Any) -> list[Any]:
    if way == "batch":
        return engine.batch(*args, **kwargs)
    return asyncio.run(engine.abatch(*args, **kwargs))


WAYS = pytest.mark.parametrize("way", ["batch", "abatch"])


@WAYS
def test_answers_come_in_the_order_of_their_prompts(engine: BlendEngine, way: str) -> None:
    assert [a.text for a in run(engine, way, PROMPTS)] == ["two", "three", "one", "two"]
    assert run(engine, way, []) == []


@WAYS
@pytest.mark.parametrize("bad", ["", "word " * 9000])
def test_a_prompt_that_cannot_be_answered_costs_nothing_and_is_named(
    engine: BlendEngine, way: str, bad: str
) -> None:
    with pytest.raises(InvalidInputError) as raised:
        run(engine, way, [*PROMPTS, bad])
    assert raised.value.__notes__ == ["prompt 5 of 5 of this batch"]
    assert isinstance(raised.value, ContextOverflowError) == bool(bad)
    engine.drain()
    assert engine.adapter.model.prompts == []


@WAYS
def test_errors_can_be_returned_in_place(engine: BlendEngine, way: str) -> None:
    found = run(engine, way, ["say one", "", "say two"], return_exceptions=True)
    assert [a.text if isinstance(a, Answer) else type(a) for a in found] == [
        "one", InvalidInputError, "two",
    ]  # fmt: skip


def failing_on(engine: BlendEngine, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = engine.adapter.model
    real = model.generate

    def generate(inputs: Any, **kwargs: Any) -> Any:
        if f"say {word}" in model.words.decode(inputs[0]):
            raise MemoryError("none left")
        return real(inputs, **kwargs)

    monkeypatch.setattr(model, "generate", generate)


@WAYS
def test_an_error_in_the_middle_ends_the_batch_and_is_named(
    engine: BlendEngine, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_on(engine, "three", monkeypatch)
    model = engine.adapter.model
    model.pause_s = 0.05
    with pytest.raises(MemoryError) as raised:
        run(engine, way, ["say two", "say three", *["say one"] * 20])
    assert raised.value.__notes__ == ["prompt 2 of 22 of this batch"]
    engine.drain()
    assert len(model.prompts) <= 2  # the rest was abandoned
    assert engine.generate("say one").text == "one"


@WAYS
def test_an_error_in_the_middle_can_be_returned_in_place(
    engine: BlendEngine, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_on(engine, "three", monkeypatch)
    found = run(engine, way, PROMPTS, return_exceptions=True)
    assert [a.text if isinstance(a, Answer) else str(a) for a in found] == [
        "two", "none left", "one", "two",
    ]  # fmt: skip


@WAYS
def test_the_timeout_applies_to_the_whole_batch(engine: BlendEngine, way: str) -> None:
    engine.adapter.model.pause_s = 0.05
    began = time.perf_counter()
    found = run(engine, way, PROMPTS * 10, Options(timeout_s=0.5), return_exceptions=True)
    assert time.perf_counter() - began < 2.0
    assert found[0].text == "two"
    assert isinstance(found[-1], RequestTimeout)
    with pytest.raises(RequestTimeout):
        run(engine, way, PROMPTS * 10, Options(timeout_s=0.3))


@WAYS
def test_a_timeout_while_rendering_is_returned_for_every_prompt(
    engine: BlendEngine, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*args: Any) -> str:
        time.sleep(0.2)
        return rendering.render(*args)

    monkeypatch.setattr("blendrag.engine.engine.render", slow)
    options = Options(timeout_s=0.3)
    found = run(engine, way, PROMPTS, options, return_exceptions=True)
    assert [type(one) for one in found] == [RequestTimeout] * 4
    assert [one.__notes__ for one in found] == [
        [f"prompt {i} of 4 of this batch"] for i in (1, 2, 3, 4)
    ]
    with pytest.raises(RequestTimeout):
        run(engine, way, PROMPTS, options)
    monkeypatch.undo()
    assert run(engine, way, PROMPTS[:1], options)[0].text == "two"


async def test_a_cancelled_batch_stops(engine: BlendEngine) -> None:
    model = engine.adapter.model
    model.pause_s = 0.05
    task = asyncio.create_task(engine.abatch(PROMPTS * 10))
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(engine.drain)
    assert len(model.prompts) < 10


def test_requests_of_others_go_in_between_and_get_their_own(engine: BlendEngine) -> None:
    pieces = engine.stream("say three")
    assert [a.text for a in engine.batch(PROMPTS)] == ["two", "three", "one", "two"]
    assert "".join(pieces) == "three"


def test_a_batch_over_chunks_reuses_them(engine: BlendEngine) -> None:
    engine.ingest([tiny.document(0)])
    text = "\n\n".join(tiny.chunk_texts(engine, 0))
    answers = engine.batch([f"{text}\n\nsay one", f"{text}\n\nsay two"])
    assert [a.text for a in answers] == ["one", "two"]
    assert all(a.metrics.reused_tokens > 0 for a in answers)
