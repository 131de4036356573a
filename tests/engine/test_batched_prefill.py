"""Prompts of a batch share one prefill where that is faster, and are answered as if they were alone."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from blendrag.engine import Answer, BlendEngine, Options, packing_rule
from blendrag.errors import InvalidInputError
from blendrag.fusor import BlendCache, Fusor
from blendrag.planning.controller import Controller
from blendrag.planning.plan import Plan
from blendrag.store.base import KVReader
from blendrag.store.identity import chunk_key

LEAD = "Answer the question from the context.\n\n"
REUSE = Options(mode="reuse")


@contextmanager
def made_in(folder: Path) -> Iterator[BlendEngine]:
    with tiny.engine(tiny.llama(), folder / "store", ram_bytes=0) as made:
        made.ingest([tiny.document(i) for i in range(4)])
        for _ in range(2):  # the leading part is stored once it comes back
            made.generate(prompt(made, 3), REUSE)
            made.drain()
        yield made


def prompt(engine: BlendEngine, *numbers: int, ask: str = "What did the company do?") -> str:
    texts = [text for number in numbers for text in tiny.chunk_texts(engine, number)]
    return LEAD + "\n\n".join(texts) + f"\n\nQuestion: {ask}"


@contextmanager
def prefills(engine: BlendEngine) -> Iterator[list[int]]:
    """Rows that the third layer computes, whenever more than one: a token's own forward is not one."""
    rows: list[int] = []

    def note(module: Any, args: Any, out: Any) -> None:
        if out.shape[1] > 1:
            rows.append(out.shape[1])

    hook = engine.adapter.stack.layers[2].register_forward_hook(note)
    try:
        yield rows
    finally:
        hook.remove()


pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    with made_in(tmp_path_factory.mktemp("together")) as made:
        yield made


def varied(engine: BlendEngine) -> list[str]:
    """Of different lengths, one without a known chunk."""
    return [
        prompt(engine, 0),
        prompt(engine, 1, 2, ask="Who wrote about the town?"),
        "Where was it built?",
        prompt(engine, 2, 0),
        prompt(engine, 0, ask="Why?"),
    ]


def essence(answer: Answer) -> tuple[Any, ...]:
    """All of it but times and what it was prefilled with."""
    same = replace(answer.metrics, ttft_s=0.0, load_s=0.0, total_s=0.0, batch_size=1)
    logprobs = [entry.id for entry in answer.logprobs or ()]
    return answer.text, answer.texts, answer.finish_reason, same, logprobs


OPTIONS = {
    "default": Options(),
    "reuse": REUSE,
    "blend": Options(ratio=0.3, policy="hkvd", schedule="geometric"),
    "boundary": Options(policy="boundary(4)"),
    "prefix": Options(mode="prefix"),
    "full": Options(mode="full"),
    "sampling": Options(mode="reuse", temperature=1.0, seed=7, max_new_tokens=12),
    "logprobs": Options(mode="reuse", logprobs=2),
    "stop": Options(mode="reuse", stop=("e", "t"), max_new_tokens=30),
    "beams": Options(mode="reuse", generate={"num_beams": 2}),
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_answers_of_a_batch_are_those_of_each_prompt_alone(
    engine: BlendEngine, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(packing_rule.ROWS, "cpu", 10_000)
    prompts = varied(engine)
    engine.generate(prompts[0], OPTIONS[kind])  # the first notes that no schedule is calibrated
    alone = [engine.generate(text, OPTIONS[kind]) for text in prompts]
    engine.drain()
    together = engine.batch(prompts, OPTIONS[kind])
    assert [essence(answer) for answer in together] == [essence(answer) for answer in alone]
    sizes = [answer.metrics.batch_size for answer in together]
    assert all(answer.metrics.batch_size == 1 for answer in alone)
    assert sizes == [1 if kind in ("full", "beams") else len(prompts)] * len(prompts)


def test_a_batch_is_one_prefill_of_all_rows(engine: BlendEngine) -> None:
    prompts = [prompt(engine, i, ask=f"Why {i}?") for i in range(4)]
    with prefills(engine) as rows:
        alone = [engine.generate(text, REUSE) for text in prompts]
        assert len(rows) == 4
        together = engine.batch(prompts, REUSE)
    assert rows[4:] == [sum(rows[:4])]
    assert [answer.metrics.batch_size for answer in together] == [4] * 4
    assert [a.text for a in together] == [a.text for a in alone]


def test_the_log_says_that_a_prompt_was_prefilled_with_others(
    engine: BlendEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "blendrag"):
        engine.batch([prompt(engine, i) for i in range(3)], REUSE)
        engine.generate(prompt(engine, 0), REUSE)
    *together, alone = [r.message for r in caplog.records if "prompt tokens" in r.message]
    assert all("prefilled together with 2 of its batch" in line for line in together)
    assert "together" not in alone


def test_abatch_prefills_together_too(engine: BlendEngine) -> None:
    prompts = [prompt(engine, i) for i in range(3)]
    answers = asyncio.run(engine.abatch(prompts, REUSE))
    assert [answer.metrics.batch_size for answer in answers] == [3] * 3


def test_no_memory_for_it_means_one_after_another(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt(engine, i) for i in range(3)]
    expected = [answer.text for answer in engine.batch(prompts, REUSE)]
    without = engine.settings.model_copy(update={"batch_bytes": 0})
    monkeypatch.setattr(engine, "settings", without)
    with prefills(engine) as rows:
        answers = engine.batch(prompts, REUSE)
    assert len(rows) == 3
    assert [answer.metrics.batch_size for answer in answers] == [1] * 3
    assert [answer.text for answer in answers] == expected


def test_a_prompt_of_many_rows_goes_alone(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(packing_rule.ROWS, "cpu", 192)
    many = "What do you know of the harbour and of the town? " * 30
    prompts = [prompt(engine, 0), prompt(engine, 1, ask=many), prompt(engine, 2), prompt(engine, 3)]
    sizes = [answer.metrics.batch_size for answer in engine.batch(prompts, REUSE)]
    assert sizes == [1, 1, 2, 2]


def test_prompts_without_any_chunk_are_ordinary_prefills(engine: BlendEngine) -> None:
    answers = engine.batch(["Where is it?", "Who was it?"])
    assert [answer.metrics.batch_size for answer in answers] == [1, 1]


def test_models_whose_attention_takes_masks_answer_one_after_another(tmp_path: Path) -> None:
    model = tiny.family("gemma2", attn_implementation="eager")
    with tiny.engine(model, tmp_path / "store") as engine:
        engine.ingest([tiny.document(0)])
        answers = engine.batch([prompt(engine, 0), prompt(engine, 0, ask="Why?")], REUSE)
    assert [answer.metrics.batch_size for answer in answers] == [1, 1]
    assert all(answer.metrics.reused_tokens > 0 for answer in answers)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[BlendEngine]:
    """An engine that may be spoilt."""
    with made_in(tmp_path) as made:
        yield made


def test_a_corrupt_chunk_of_one_prompt_is_computed_and_the_others_notice_nothing(
    own: BlendEngine,
) -> None:
    engine = own
    prompts = [prompt(engine, 0), prompt(engine, 1), prompt(engine, 2)]
    expected = [answer.text for answer in engine.batch(prompts, REUSE)]
    victim = engine.resources.text_ids(tiny.chunk_texts(engine, 1)[0])
    key = chunk_key(engine.adapter.identity.namespace, engine.resources.prefix_ids, victim)
    root = engine.resources.root
    (file,) = [p for p in root.rglob("*") if p.is_file() and p.name.startswith(key)]
    data = bytearray(file.read_bytes())
    data[-100] ^= 0x40
    file.write_bytes(bytes(data))
    answers = engine.batch(prompts, REUSE)
    assert [answer.metrics.batch_size for answer in answers] == [3, 1, 3]
    assert [answers[0].text, answers[2].text] == [expected[0], expected[2]]
    (computed,) = [c for c in answers[1].metrics.chunks if c.outcome == "computed"]
    assert "verification" in computed.reason


def test_a_prompt_that_was_abandoned_before_its_turn_is_left_out(engine: BlendEngine) -> None:
    prompts = [prompt(engine, i) for i in range(3)]
    expected = [engine.generate(text, REUSE).text for text in prompts]
    with engine.adapter.lock:  # nothing is begun yet
        started = engine._start_batch(prompts, REUSE, False, 0.0)
        started[1].stream.cancel()  # type: ignore[union-attr]
    first, third = (started[i].wait() for i in (0, 2))  # type: ignore[union-attr]
    assert [first.text, third.text] == [expected[0], expected[2]]
    assert [first.metrics.batch_size, third.metrics.batch_size] == [2, 2]


def test_if_they_cannot_be_prefilled_together_they_are_answered_one_after_another(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = [prompt(engine, i) for i in range(3)]
    expected = [answer.text for answer in engine.batch(prompts, REUSE)]

    def without_memory(self: Fusor, prompts: Any) -> Any:
        raise MemoryError("none left")

    monkeypatch.setattr(Fusor, "batched_prefill", without_memory)
    answers = engine.batch(prompts, REUSE)
    assert [answer.text for answer in answers] == expected
    assert [answer.metrics.batch_size for answer in answers] == [1] * 3
    assert "one after another: none left" in caplog.text


def test_kv_is_computed_again_if_the_model_changed_before_its_turn(own: BlendEngine) -> None:
    engine = own
    prompts = [prompt(engine, i) for i in range(2)]
    model = engine.adapter.model
    with engine.adapter.lock:
        started = engine._start_batch(prompts, Options(), False, 0.0)
        done: list[Any] = []

        def change(future: Any) -> None:  # on the worker, between the first answer and the second
            with torch.no_grad():
                model.lm_head.weight.mul_(-1.0)
            done.append(future)

        started[0].future.add_done_callback(change)  # type: ignore[union-attr]
    first, second = (one.wait() for one in started)  # type: ignore[union-attr]
    assert done
    assert first.metrics.batch_size == 2
    assert second.metrics.batch_size == 1
    assert second.metrics.reused_tokens == 0  # nothing is stored for these weights
    assert second.text == engine.generate(prompts[1], Options(mode="full")).text


class Loads:
    """What was opened for requests, and what of it was closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened: list[Plan] = []
        self.closed: list[KVReader] = []
        plan, close = Controller.plan, Plan.close

        def planned(controller: Controller, *args: Any, **kwargs: Any) -> Plan:
            self.opened.append(plan(controller, *args, **kwargs))
            return self.opened[-1]

        def closing(made: Plan) -> None:
            self.closed += [span.reader for span in made.spans]
            close(made)

        monkeypatch.setattr(Controller, "plan", planned)
        monkeypatch.setattr(Plan, "close", closing)

    def are_closed(self) -> bool:
        closed = {id(reader) for reader in self.closed}
        return all(id(span.reader) in closed for plan in self.opened for span in plan.spans)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    return Loads(monkeypatch)


def test_every_reader_is_closed(engine: BlendEngine, loads: Loads) -> None:
    prompts = [prompt(engine, i) for i in range(4)]
    engine.batch(prompts, REUSE)
    many = "What do you know of the harbour? " * 40
    engine.batch([*prompts[:2], prompt(engine, 2, ask=many)], REUSE)
    with engine.adapter.lock:
        started = engine._start_batch(prompts, REUSE, False, 0.0)
        started[0].future.add_done_callback(  # type: ignore[union-attr]
            lambda _: [one.stream.cancel() for one in started]  # type: ignore[union-attr]
        )
    engine.drain()
    assert len(loads.opened) > 10
    assert loads.are_closed()


def test_where_not_all_can_be_submitted_those_that_were_are_left_and_nothing_stays_open(
    engine: BlendEngine, loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, answered = engine._worker.submit, []
    submitted: list[Any] = []

    def failing(call: Any, background: bool = False) -> Any:
        if len(submitted) == 2:
            answering.wait(60)  # the first is answered, and all four are prefilled
            raise KeyboardInterrupt
        submitted.append(submit(call, background))
        return submitted[-1]

    answering = threading.Event()
    hook = engine.adapter.model.lm_head.register_forward_pre_hook(lambda *_: answering.set())
    monkeypatch.setattr(engine._worker, "submit", failing)
    monkeypatch.setattr("blendrag.engine.engine.log_answer", answered.append)
    with pytest.raises(KeyboardInterrupt):
        engine.batch([prompt(engine, i) for i in range(4)], REUSE)
    hook.remove()
    monkeypatch.undo()
    assert len(loads.opened) == 4
    assert loads.are_closed()
    assert len(answered) < 2
    assert engine.generate(prompt(engine, 0), REUSE).text


def test_a_prompt_that_is_left_while_it_waits_releases_what_is_there_of_it(
    engine: BlendEngine, loads: Loads
) -> None:
    answering, go_on = threading.Event(), threading.Event()

    def hold(module: Any, args: Any) -> None:
        answering.set()
        assert go_on.wait(60)

    hook = engine.adapter.model.lm_head.register_forward_pre_hook(hold)
    started = engine._start_batch([prompt(engine, i) for i in range(3)], REUSE, False, 0.0)
    assert answering.wait(60)
    assert len(loads.opened) == 3  # all are prefilled, and the first is answered

    async def leave() -> None:
        waiting = asyncio.create_task(started[1].awaited())  # type: ignore[union-attr]
        await asyncio.sleep(0)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting

    asyncio.run(leave())
    hook.remove()
    go_on.set()
    engine.drain()
    assert started[2].wait().metrics.batch_size == 3  # type: ignore[union-attr]
    assert loads.are_closed()


def test_a_schedule_that_fits_no_model_is_no_error_of_a_prompt_that_needs_none(
    engine: BlendEngine, loads: Loads
) -> None:
    options = Options(policy="hkvd", ratio=0.3, schedule="0.9,0.5")
    prompts = ["Where was it built?", prompt(engine, 0), prompt(engine, 1)]
    plain, *failed = engine.batch(prompts, options, return_exceptions=True)
    assert isinstance(plain, Answer)
    assert plain.text == engine.generate(prompts[0], options).text
    for i, error in enumerate(failed):
        assert isinstance(error, InvalidInputError)
        assert "2 entries" in str(error)
        assert error.__notes__ == [f"prompt {i + 2} of 3 of this batch"]
    assert len(loads.opened) >= 2
    assert loads.are_closed()


def test_a_prompt_past_the_limit_of_the_rotary_table_goes_alone(tmp_path: Path) -> None:
    """The length of the longest prompt in a forward decides how the rows of all are rotated."""
    limit, rope = 300, {"rope_type": "longrope", "rope_theta": 10000.0}
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 4.0}
    model = tiny.llama(
        rope_parameters={**rope, **factors, "original_max_position_embeddings": limit}
    )
    with tiny.engine(model, tmp_path / "store") as engine:
        assert engine.adapter.blend_limit_tokens == limit
        engine.ingest([tiny.document(0)])
        prompts = [prompt(engine, 0), "Where was it built? " * 45, prompt(engine, 0, ask="Why?")]
        lengths = [len(engine.plan(text).ids) for text in prompts]
        assert lengths[0] < limit < lengths[1]
        alone = [engine.generate(text, REUSE) for text in prompts]
        together = engine.batch(prompts, REUSE)
    assert [answer.metrics.batch_size for answer in together] == [2, 1, 2]
    assert [answer.text for answer in together] == [answer.text for answer in alone]


def test_what_was_prefilled_ahead_is_not_kept_once_all_is_answered(engine: BlendEngine) -> None:
    engine.batch([prompt(engine, i) for i in range(3)], REUSE)
    engine.drain()
    gc.collect()
    assert not [one for one in gc.get_objects() if isinstance(one, BlendCache)]
