"""Batches: answers in order and errors by prompt."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import scripted
import tiny
from blendrag.engine import Answer, BlendEngine, Options, rendering
from blendrag.errors import (
    ContextOverflowError,
    InvalidInputError,
    RequestCancelled,
    RequestTimeout,
)
from blendrag.planning.controller import Controller
from blendrag.planning.plan import Plan
from loops import BLOCKED_S

REUSE = Options(mode="reuse")

# -- answers and errors -------------------------------------------------------------------------

SCRIPT = [(f"say {word}", word) for word in ("one", "two", "three")]
PROMPTS = [f"say {word}" for word in ("two", "three", "one", "two")]


@pytest.fixture
def says(tmp_path: Path) -> Iterator[BlendEngine]:
    """An engine with scripted answers."""
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
def test_answers_come_in_the_order_of_their_prompts(says, way):
    pieces = says.stream("say three")
    assert [a.text for a in run(says, way, PROMPTS)] == ["two", "three", "one", "two"]
    assert "".join(pieces) == "three"
    assert run(says, way, []) == []


@WAYS
@pytest.mark.parametrize("bad", ["", "word " * 9000])
def test_a_bad_prompt_is_named_before_anything_is_computed(says, way, bad):
    with pytest.raises(InvalidInputError) as raised:
        run(says, way, [*PROMPTS, bad])
    assert raised.value.__notes__ == ["prompt 5 of 5 of this batch"]
    assert isinstance(raised.value, ContextOverflowError) == bool(bad)
    says.drain()
    assert says.adapter.model.prompts == []


@WAYS
def test_an_error_ends_the_batch_or_is_returned_in_place(says, way, monkeypatch):
    model, go_on = says.adapter.model, threading.Event()
    real = model.generate
    go_on.set()

    def generate(inputs: Any, **kwargs: Any) -> Any:
        prompt = model.words.decode(inputs[0])
        if "say three" in prompt:
            raise MemoryError("none left")
        assert "say one" not in prompt or go_on.wait(BLOCKED_S)
        return real(inputs, **kwargs)

    monkeypatch.setattr(model, "generate", generate)
    found = run(says, way, ["say two", "", "say three", "say one"], return_exceptions=True)
    assert [a.text if isinstance(a, Answer) else type(a) for a in found] == [
        "two", InvalidInputError, MemoryError, "one",
    ]  # fmt: skip
    says.scheduler.max_running = 1
    model.prompts.clear()
    go_on.clear()
    with pytest.raises(MemoryError) as raised:
        run(says, way, ["say two", "say three", *["say one"] * 20])
    assert raised.value.__notes__ == ["prompt 2 of 22 of this batch"]
    go_on.set()
    says.drain()
    assert len(model.prompts) <= 2  # the rest was cancelled
    assert says.generate("say one").text == "one"


@WAYS
def test_the_timeout_applies_to_the_whole_batch(says, way, monkeypatch):
    def all_are_late(_: Any) -> None:
        for pending in (*says.scheduler.waiting, *says.scheduler.running):
            pending.stream.timeout_s = 0.0

    monkeypatch.setattr("blendrag.engine.answering.log_answer", all_are_late)
    found = run(says, way, PROMPTS * 10, Options(timeout_s=600), return_exceptions=True)
    assert found[0].text == "two"
    assert isinstance(found[-1], RequestTimeout)


@WAYS
def test_a_timeout_while_rendering_is_returned_for_every_prompt(says, way, monkeypatch):
    def slow(*args: Any) -> str:
        time.sleep(0.06)
        return rendering.render(*args)

    monkeypatch.setattr("blendrag.engine.prompts.render", slow)
    found = run(says, way, PROMPTS, Options(timeout_s=0.1), return_exceptions=True)
    assert [type(one) for one in found] == [RequestTimeout] * 4
    notes = [[f"prompt {i} of 4 of this batch"] for i in (1, 2, 3, 4)]
    assert [one.__notes__ for one in found] == notes
    monkeypatch.undo()
    assert run(says, way, PROMPTS[:1])[0].text == "two"


async def test_a_cancelled_batch_stops(says):
    model = says.adapter.model
    go_on = threading.Event()
    with model.register_forward_pre_hook(lambda *_: go_on.wait(BLOCKED_S) and None):
        task = asyncio.create_task(says.abatch(PROMPTS * 10))
        while not model.prompts:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        await asyncio.to_thread(says.drain)
    assert len(model.prompts) == 1


# -- prompts over stored KV ---------------------------------------------------------------------


def prompts_of(engine: BlendEngine, count: int) -> list[str]:
    """Prompts of one document each."""
    return [tiny.prompt(engine, i) for i in range(count)]


def texts(answers: list[Answer]) -> list[str]:
    return [answer.text for answer in answers]


def essence(answer: Answer) -> tuple[Any, ...]:
    """Everything but times."""
    zero = {"ttft_s": 0.0, "load_s": 0.0, "total_s": 0.0, "opening_s": 0.0, "queued_s": 0.0}
    same = replace(answer.metrics, **zero)
    logprobs = [entry.id for entry in answer.logprobs or ()]
    return answer.text, answer.texts, answer.finish_reason, same, logprobs


OPTIONS = {
    "default": Options(),
    "blend": Options(ratio=0.3, policy="hkvd", schedule="geometric"),
    "prefix": Options(mode="prefix"),
    "full": Options(mode="full"),
    "sampling": Options(mode="reuse", temperature=1.0, seed=7, max_new_tokens=12),
    "logprobs": Options(mode="reuse", logprobs=2),
    "stop": Options(mode="reuse", stop=("e", "t"), max_new_tokens=30),
    "beams": Options(mode="reuse", generate_kwargs={"num_beams": 2}),
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_answers_of_a_batch_are_those_of_each_prompt_alone(engine, kind):
    prompts = [
        tiny.prompt(engine, 0),
        tiny.prompt(engine, 1, 2, ask="Who wrote about the town?"),
        "Where was it built?",
        tiny.prompt(engine, 0, ask="Why?"),
    ]
    alone = [engine.generate(text, OPTIONS[kind]) for text in prompts]
    engine.drain()
    found = engine.batch(prompts, OPTIONS[kind])
    assert [essence(answer) for answer in found] == [essence(answer) for answer in alone]


@pytest.fixture
def own(tmp_path: Path) -> Iterator[BlendEngine]:
    """An engine that a test may damage."""
    with tiny.engine(tiny.llama(), tmp_path / "store", ram_bytes=0) as made:
        made.ingest([tiny.document(i) for i in range(3)])
        yield made


def test_a_corrupt_chunk_affects_only_its_own_prompt(own):
    prompts = prompts_of(own, 3)
    for _ in range(2):  # the leading part is stored when it comes back
        expected = texts(own.batch(prompts, REUSE))
        own.drain()
    tiny.damage(own, tiny.chunk_keys(own, 1)[0])
    answers = own.batch(prompts, REUSE)
    assert texts(answers)[::2] == expected[::2]
    (computed,) = [c for c in answers[1].metrics.chunks if c.outcome == "computed"]
    assert "verification" in computed.reason


def test_kv_is_computed_again_if_the_model_changed_before_its_turn(own):
    own.scheduler.max_running = 1
    prompts = prompts_of(own, 2)
    model = own.adapter.model
    done: list[Any] = []

    def change(future: Any) -> None:  # between the first answer and the second
        with torch.no_grad():
            model.lm_head.weight.mul_(-1.0)
        done.append(future)

    with own.scheduler.held():
        batch, pending = tiny.submitted(own, lambda: own.batch(prompts), 2)
        pending[0].future.add_done_callback(change)
    _, second = batch.result()
    assert done
    assert second.metrics.reused_tokens == 0  # nothing is stored for these weights
    assert second.text == own.generate(prompts[1], Options(mode="full")).text
    own.drain()
    assert own.scheduler.budget.size_bytes == 0


def test_a_prompt_cancelled_before_its_turn_is_left_out(engine):
    asked = partial(engine.batch, prompts_of(engine, 3), REUSE, return_exceptions=True)
    with engine.scheduler.held():  # nothing has begun
        batch, pending = tiny.submitted(engine, asked, 3)
        pending[1].stream.cancel()
    first, cancelled, last = batch.result()
    assert isinstance(first, Answer)
    assert isinstance(last, Answer)
    assert isinstance(cancelled, RequestCancelled)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Plan]]:
    """Every plan that opened stored KV; afterwards all of their readers must be closed."""
    plans: list[Plan] = []
    closed: set[int] = set()
    plan, close = Controller.plan, Plan.close

    def planned(controller: Controller, *args: Any, **kwargs: Any) -> Plan:
        plans.append(plan(controller, *args, **kwargs))
        return plans[-1]

    def closing(made: Plan) -> None:
        closed.update(id(span.reader) for span in made.spans)
        close(made)

    with monkeypatch.context() as patch:
        patch.setattr(Controller, "plan", planned)
        patch.setattr(Plan, "close", closing)
        yield plans
    assert all(id(span.reader) in closed for made in plans for span in made.spans)


def test_every_reader_is_closed(engine, opened):
    prompts = prompts_of(engine, 4)
    engine.batch(prompts, REUSE)
    with engine.scheduler.held():
        asked = partial(engine.batch, prompts, REUSE, return_exceptions=True)
        batch, pending = tiny.submitted(engine, asked, 4)
        pending[0].future.add_done_callback(lambda _: pending[1].stream.cancel())
    found = batch.result()
    assert all(isinstance(found[i], Answer) for i in (0, 2, 3))
    engine.drain()
    assert len(opened) >= 7


def test_an_interrupt_while_submitting_cancels_the_batch(engine, opened, monkeypatch):
    submit, submitted = engine.scheduler.submit, []

    def interrupted(*pending: Any) -> None:
        submitted.extend(pending)
        submit(*pending)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.scheduler, "submit", interrupted)
    with engine.scheduler.held(), pytest.raises(KeyboardInterrupt):
        engine.batch(prompts_of(engine, 4), REUSE)
    monkeypatch.undo()
    engine.drain()
    for pending in submitted:
        assert isinstance(pending.future.exception(), RequestCancelled)
    assert not opened
    assert engine.generate(tiny.prompt(engine, 0), REUSE).text


def test_a_schedule_of_the_wrong_length_fails_only_prompts_that_need_it(engine, opened):
    options = Options(policy="hkvd", ratio=0.3, schedule="0.9,0.5")
    prompts = ["Where was it built?", *prompts_of(engine, 2)]
    plain, *failed = engine.batch(prompts, options, return_exceptions=True)
    assert isinstance(plain, Answer)
    assert plain.text == engine.generate(prompts[0], options).text
    for i, error in enumerate(failed):
        assert isinstance(error, InvalidInputError)
        assert "2 entries" in str(error)
        assert error.__notes__ == [f"prompt {i + 2} of 3 of this batch"]
    assert len(opened) >= 2
