"""Batches: answers in order, errors by prompt, and one prefill for several prompts where that is faster."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import scripted
import tiny
from blendrag.engine import Answer, BlendEngine, Options, packing_rule, rendering, roads
from blendrag.engine.batched_prefill import RequestBatch
from blendrag.engine.packing_rule import ROWS, Load, PackingRule
from blendrag.errors import (
    ContextOverflowError,
    InvalidInputError,
    RequestCancelled,
    RequestTimeout,
)
from blendrag.fusor import BlendCache, Fusor
from blendrag.fusor.selection import Blending, Schedule
from blendrag.model import ModelAdapter
from blendrag.planning.controller import Controller
from blendrag.planning.plan import Plan, PlannedChunk, Reason
from blendrag.planning.profile import Curve
from blendrag.text.prompt import Segment, SegmentedPrompt
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


# -- one prefill for several prompts ------------------------------------------------------------


def prompts_of(engine: BlendEngine, count: int) -> list[str]:
    """Prompts of one document each."""
    return [tiny.prompt(engine, i) for i in range(count)]


def sizes(answers: list[Answer]) -> list[int]:
    return [answer.metrics.batch_size for answer in answers]


def texts(answers: list[Answer]) -> list[str]:
    return [answer.text for answer in answers]


@contextmanager
def prefills(engine: BlendEngine) -> Iterator[list[int]]:
    """Rows that the third layer computes in each prefill."""
    rows: list[int] = []

    def note(module: Any, args: Any, out: Any) -> None:
        if out.shape[1] > 1 and not tiny.is_background():  # else a step of decoding
            rows.append(out.shape[1])

    with engine.adapter.stack.layers[2].register_forward_hook(note):
        yield rows


def essence(answer: Answer) -> tuple[Any, ...]:
    """Everything but times and the number of prompts in its prefill."""
    zero = {"ttft_s": 0.0, "load_s": 0.0, "total_s": 0.0, "opening_s": 0.0, "queued_s": 0.0}
    same = replace(answer.metrics, batch_size=1, **zero)
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
def test_answers_of_a_batch_are_those_of_each_prompt_alone(engine, kind, monkeypatch):
    monkeypatch.setitem(packing_rule.ROWS, "cpu", 10_000)
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
    assert sizes(alone) == [1] * len(prompts)
    assert sizes(found) == [1 if kind in ("full", "beams") else len(prompts)] * len(prompts)


def test_a_batch_is_one_prefill_of_all_rows(engine, caplog):
    prompts = prompts_of(engine, 4)
    with prefills(engine) as rows, caplog.at_level("INFO", "blendrag"):
        alone = [engine.generate(text, REUSE) for text in prompts]
        assert len(rows) == 4
        found = engine.batch(prompts, REUSE)
    assert rows[4:] == [sum(rows[:4])]
    assert sizes(found) == [4] * 4
    assert texts(found) == texts(alone)
    lines = [r.message for r in caplog.records if "prompt tokens" in r.message]
    assert not any("together" in line for line in lines[:4])
    assert all("prefilled together with 3 of its batch" in line for line in lines[4:])
    assert sizes(asyncio.run(engine.abatch(prompts[:3], REUSE))) == [3] * 3
    engine.drain()
    gc.collect()
    assert not [one for one in gc.get_objects() if isinstance(one, BlendCache)], "all is released"


@pytest.mark.parametrize("reason", ["the budget is spent", "the prefill fails"])
def test_without_memory_for_all_prompts_are_prefilled_one_by_one(
    engine, monkeypatch, caplog, reason
):
    prompts = prompts_of(engine, 3)
    expected = texts(engine.batch(prompts, REUSE))

    def without_memory(self: Fusor, prompts: Any) -> Any:
        raise MemoryError("none left")

    if reason == "the prefill fails":
        monkeypatch.setattr(Fusor, "batched_prefill", without_memory)
    else:
        monkeypatch.setattr(engine.scheduler.budget, "limit_bytes", 0)
    with prefills(engine) as rows:
        answers = engine.batch(prompts, REUSE)
    assert len(rows) == 3
    assert sizes(answers) == [1] * 3
    assert texts(answers) == expected
    assert ("one after another: none left" in caplog.text) == (reason == "the prefill fails")


def test_prompts_of_many_rows_or_without_chunks_are_prefilled_alone(engine, monkeypatch):
    monkeypatch.setitem(packing_rule.ROWS, "cpu", 192)
    prompts = prompts_of(engine, 4)
    prompts[1] += "What do you know of the harbour and of the town? " * 30
    assert sizes(engine.batch(prompts, REUSE)) == [1, 1, 2, 2]
    assert sizes(engine.batch(["Where is it?", "Who was it?"])) == [1, 1]


def test_models_whose_attention_takes_masks_are_prefilled_one_by_one(tmp_path):
    model = tiny.family("gemma2", attn_implementation="eager")
    with tiny.engine(model, tmp_path / "store") as engine:
        engine.ingest([tiny.document(0, 2)])
        answers = engine.batch([tiny.prompt(engine, 0)] * 2, REUSE)
    assert sizes(answers) == [1, 1]
    assert all(answer.metrics.reused_tokens > 0 for answer in answers)


def test_a_prompt_past_the_limit_of_the_rotary_table_goes_alone(tmp_path):
    """The longest prompt of a forward decides how the rows of all its prompts are rotated."""
    limit, rope = 300, {"rope_type": "longrope", "rope_theta": 10000.0}
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 4.0}
    model = tiny.llama(
        rope_parameters={**rope, **factors, "original_max_position_embeddings": limit}
    )
    with tiny.engine(model, tmp_path / "store") as engine:
        assert engine.adapter.blend_limit_tokens == limit
        engine.ingest([tiny.document(0, 7)])
        long = "Where was it built? " * 45
        prompts = [tiny.prompt(engine, 0), long, tiny.prompt(engine, 0, ask="Why?")]
        lengths = [len(engine.segments(text).ids) for text in prompts]
        assert lengths[0] < limit < lengths[1]
        alone = [engine.generate(text, REUSE) for text in prompts]
        found = engine.batch(prompts, REUSE)
    assert sizes(found) == [2, 1, 2]
    assert texts(found) == texts(alone)


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
    assert sizes(answers) == [3, 1, 3]
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
    first, second = batch.result()
    assert done
    assert sizes([first, second]) == [2, 1]
    assert second.metrics.reused_tokens == 0  # nothing is stored for these weights
    assert second.text == own.generate(prompts[1], Options(mode="full")).text
    own.drain()
    assert own.scheduler.budget.size_bytes == 0


def test_a_prompt_refused_after_its_prefill_holds_no_memory(engine, monkeypatch):
    prompts, checked = prompts_of(engine, 3), roads.checked

    def refusing(request, *args):
        if request.prompt.ids == refused.ids and engine.scheduler.budget.size_bytes:
            raise InvalidInputError("not now")
        return checked(request, *args)

    refused = engine.segments(prompts[1], REUSE)
    monkeypatch.setattr(roads, "checked", refusing)
    with pytest.raises(InvalidInputError, match="not now"):
        engine.batch(prompts, REUSE)
    engine.drain()
    assert engine.scheduler.budget.size_bytes == 0


def test_a_prompt_cancelled_before_its_turn_is_left_out(engine):
    asked = partial(engine.batch, prompts_of(engine, 3), REUSE, return_exceptions=True)
    with engine.scheduler.held():  # nothing has begun
        batch, pending = tiny.submitted(engine, asked, 3)
        pending[1].stream.cancel()
    first, cancelled, last = batch.result()
    assert sizes([first, last]) == [2, 2]
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
    engine.batch([*prompts[:2], prompts[2] + "What do you know of the harbour? " * 40], REUSE)
    with engine.scheduler.held():
        asked = partial(engine.batch, prompts, REUSE, return_exceptions=True)
        batch, pending = tiny.submitted(engine, asked, 4)
        pending[0].future.add_done_callback(lambda _: pending[1].stream.cancel())
    found = batch.result()
    assert sizes([found[i] for i in (0, 2, 3)]) == [4] * 3
    engine.drain()
    assert len(opened) > 10


def test_a_request_that_is_cancelled_as_its_turn_begins_closes_its_readers(
    engine, opened, monkeypatch
):
    def taken(batch: RequestBatch, number: int) -> Any:
        ahead = take(batch, number)
        batch.entries[number].stream.cancel()
        return ahead

    take = RequestBatch.take
    monkeypatch.setattr(RequestBatch, "take", taken)
    for error in engine.batch(prompts_of(engine, 2), REUSE, return_exceptions=True):
        assert isinstance(error, RequestCancelled)
    assert len(opened) == 2


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


# -- the packing rule ---------------------------------------------------------------------------


class Profiled:
    """The part of a profile that the rule reads: a layer takes a millisecond up to 100 rows, and ten
    microseconds for each one beyond."""

    layer = Curve((1.0, 100.0), (1e-3, 1e-3), 1e-5)


@pytest.mark.parametrize(
    ("packed", "load", "is_profiled", "admitted"),
    [
        ([Load(ROWS["cpu"] / 2, 0)], Load(ROWS["cpu"] / 2, 0), False, True),
        ([Load(ROWS["cpu"] / 2, 0)], Load(ROWS["cpu"] / 2 + 1, 0), False, False),
        ([Load(50, 0)], Load(50, 0), True, True),  # one for the price of two
        ([Load(100, 0)], Load(50, 0), True, True),  # 1.5 for 2
        ([Load(1000, 0)], Load(100, 0), True, False),  # 11 for 11
        ([Load(1000, 0)], Load(1000, 0), True, False),
        ([Load(1, 400), Load(1, 300)], Load(1, 300), False, True),
        ([Load(1, 400), Load(1, 300)], Load(1, 301), False, False),
        ([Load(1, 1)], Load(1, 1000), True, False),
        ([Load(1, 0, 4), Load(1, 0, 3)], Load(1, 0, 3), False, True),
        ([Load(1, 0, 4), Load(1, 0, 3)], Load(1, 0, 4), False, False),
    ],
)
def test_rows_or_measured_times_memory_and_files_limit_a_pack(packed, load, is_profiled, admitted):
    profile: Any = Profiled() if is_profiled else None
    rule = PackingRule(torch.device("cpu"), limit_bytes=1000, profile=profile, limit_files=10)
    assert rule.admits(packed, load) == admitted


def test_a_gpu_takes_more_rows_and_half_of_the_allowed_files():
    rule = PackingRule(torch.device("cuda"), 1000)
    assert rule.admits([Load(ROWS["cpu"], 0)], Load(ROWS["cpu"], 0))
    assert 0 < rule.limit_files <= os.sysconf("SC_OPEN_MAX") // 2


def planned(adapter: ModelAdapter, policy: str, ratio: float) -> Plan:
    """100 tokens, of which 60 are in two blended chunks and 10 are exact."""
    ids = tiny.random_ids(100)
    spans = (
        tiny.span(adapter, ids, 0, 10, exact=True),
        tiny.span(adapter, ids, 10, 40, stored_at=1),
        tiny.span(adapter, ids, 50, 80, stored_at=1),
    )
    asked = SegmentedPrompt((Segment("", tuple(ids[0].tolist()), 0, None, ()),))
    schedule, why = Schedule("constant"), Reason("")
    chunks = tuple(PlannedChunk(Segment("", (), span.start), why, span) for span in spans)
    return Plan(asked, chunks, Blending.of(policy, schedule, ratio))


@pytest.mark.parametrize(
    ("policy", "ratio", "rows"),
    [
        ("reuse", 0.0, 30),
        ("random", 0.5, 30 + 30),
        ("blend", 0.5, 30 + 30 + 30),  # the scout computes the fresh tokens, too
        ("query", 0.5, 30 + 30 + 30 * 2 / 4),  # in the first two thirds of four layers
        ("hkvd", 0.5, 30 + (60 + 3 * 30) / 4),  # all candidates enter
        ("boundary(5)", 0.9, 30 + 2 * 5),
        ("full", 0.5, 30 + 60),
    ],
)
@pytest.mark.usefixtures("ends_early")
def test_rows_are_those_that_the_policy_computes_in_a_layer(adapter, policy, ratio, rows):
    load = Load.of(planned(adapter, policy, ratio), 6, adapter)
    assert load.rows == pytest.approx(rows)
    assert load.files == 3
    without_chunks = replace(planned(adapter, policy, ratio), chunks=())
    assert Load.of(without_chunks, 6, adapter).rows == 100


def test_memory_grows_with_the_answer_and_with_the_rows_of_the_fullest_layer(adapter):
    small = Load.of(planned(adapter, "reuse", 0.0), 6, adapter).size_bytes
    kv_bytes = sum(2 * la.kv_heads * la.head_dim * 4 for la in adapter.layout.layers)
    longer = Load.of(planned(adapter, "reuse", 0.0), 106, adapter).size_bytes
    assert longer - small == 100 * kv_bytes
    looking = Load.of(planned(adapter, "hkvd", 0.1), 6, adapter).size_bytes
    assert looking > Load.of(planned(adapter, "random", 0.1), 6, adapter).size_bytes > small
