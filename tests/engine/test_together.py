"""The prompts of a batch are prefilled together where that is faster, and answered as if they were not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tiny
from blendrag.engine import Answer, BlendEngine, Options, packing_rule
from engine.batch_lab import REUSE, made_in, prefills, prompt

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
