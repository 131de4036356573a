"""The prompts of a batch are prefilled together where that is faster, and answered as if they were not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from blendrag.controller import Controller, LoadPlan
from blendrag.engine import Answer, BlendEngine, Options, packing_rule
from blendrag.fusor import Fusor
from blendrag.identity import chunk_key

pytestmark = pytest.mark.timeout(120)
LEAD = "Answer the question from the context.\n\n"
REUSE = Options(mode="reuse")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    with made_in(tmp_path_factory.mktemp("together")) as made:
        yield made


@pytest.fixture
def own(tmp_path: Path) -> Iterator[BlendEngine]:
    """An engine that may be spoilt."""
    with made_in(tmp_path) as made:
        yield made


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


def varied(engine: BlendEngine) -> list[str]:
    """Of different lengths, one without a known chunk."""
    return [
        prompt(engine, 0),
        prompt(engine, 1, 2, ask="Who wrote about the town?"),
        "Where was it built?",
        prompt(engine, 2, 0),
        prompt(engine, 0, ask="Why?"),
    ]


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
    monkeypatch.setattr(engine._requests._stored, "_settings", without)
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


# -- one fails ----------------------------------------------------------------------------------


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
    requests = engine._requests
    with engine.adapter.lock:  # nothing is begun yet
        started = requests.start_all(prompts, REUSE, False, 0.0)
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

    monkeypatch.setattr(Fusor, "prefill_together", without_memory)
    answers = engine.batch(prompts, REUSE)
    assert [answer.text for answer in answers] == expected
    assert [answer.metrics.batch_size for answer in answers] == [1] * 3
    assert "one after another: none left" in caplog.text


def test_kv_of_a_model_that_was_changed_meanwhile_is_computed_again(own: BlendEngine) -> None:
    engine = own
    prompts = [prompt(engine, i) for i in range(2)]
    model = engine.adapter.model
    with engine.adapter.lock:
        started = engine._requests.start_all(prompts, Options(), False, 0.0)
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


def test_every_reader_is_closed_whatever_happens(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[LoadPlan] = []
    closed: list[LoadPlan] = []
    plan, close = Controller.plan, LoadPlan.close

    def planned(self: Controller, *args: Any, **kwargs: Any) -> LoadPlan:
        opened.append(plan(self, *args, **kwargs))
        return opened[-1]

    def closing(self: LoadPlan) -> None:
        closed.append(self)
        close(self)

    monkeypatch.setattr(Controller, "plan", planned)
    monkeypatch.setattr(LoadPlan, "close", closing)
    prompts = [prompt(engine, i) for i in range(4)]
    engine.batch(prompts, REUSE)
    many = "What do you know of the harbour? " * 40
    engine.batch([*prompts[:2], prompt(engine, 2, ask=many)], REUSE)
    with engine.adapter.lock:
        started = engine._requests.start_all(prompts, REUSE, False, 0.0)
        started[0].future.add_done_callback(  # type: ignore[union-attr]
            lambda _: [one.stream.cancel() for one in started]  # type: ignore[union-attr]
        )
    engine.drain()
    assert len(opened) > 10
    assert all(any(one is other for other in closed) for one in opened)


def test_what_was_prefilled_ahead_is_not_kept_once_all_is_answered(engine: BlendEngine) -> None:
    import gc

    from blendrag.fusor import BlendCache

    engine.batch([prompt(engine, i) for i in range(3)], REUSE)
    engine.drain()
    gc.collect()
    assert not [one for one in gc.get_objects() if isinstance(one, BlendCache)]
