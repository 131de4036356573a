"""Engines over several stores and models, whose requests one scheduler orders."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import tiny
from blendrag.engine import BlendEngine
from blendrag.errors import InvalidInputError
from blendrag.model.adapter import ModelAdapter
from blendrag.serving import decode_step
from blendrag.serving.kv_budget import KVBudget

QUESTION = "What did the company of Place700 build?"


@pytest.fixture(autouse=True)
def blended_as_alone() -> None:
    """Not here."""


@pytest.fixture(scope="module")
def models() -> list[Any]:
    """One that two stores use, and another."""
    shared = ModelAdapter(tiny.llama(num_hidden_layers=3, eos_token_id=639), tiny.tokenizer())
    return [shared, shared, tiny.llama(num_hidden_layers=2, hidden_size=96, eos_token_id=639)]


def opened(models: list[Any], root: Path, stack: ExitStack, together: bool) -> list[BlendEngine]:
    made: list[BlendEngine] = []
    for number, model in enumerate(models):
        beside = made[0] if together and made else None
        given = {"beside": beside, "max_new_tokens": 24, "dtype": "float32"}
        engine = stack.enter_context(tiny.engine(model, root / str(number), **given))
        engine.ingest([tiny.document(number + 1), tiny.document(7)]).whole()
        made.append(engine)
    return made


@pytest.fixture
def engines(models: list[Any], tmp_path: Path) -> Iterator[list[BlendEngine]]:
    with ExitStack() as stack:
        yield opened(models, tmp_path / "together", stack, together=True)


def test_answers_of_several_stores_and_models_at_once_are_those_of_each_alone(
    engines: list[BlendEngine], models: list[Any], tmp_path: Path
) -> None:
    assert len({id(engine.scheduler) for engine in engines}) == 1
    with ExitStack() as stack:
        alone = opened(models, tmp_path / "alone", stack, together=False)
        expected = [engine.ask(QUESTION, 3) for engine in alone]
    for _ in range(2):
        with ThreadPoolExecutor(6) as pool:
            asked = [pool.submit(engine.ask, QUESTION, 3) for engine in engines * 2]
            answers = [each.result(60) for each in asked]
        for answer, of_one in zip(answers, expected * 2, strict=True):
            assert answer.text == of_one.text
            assert [s.source for s in answer.sources] == [s.source for s in of_one.sources]
            assert answer.metrics.new_tokens == 24


def test_stores_of_one_model_decode_together_and_other_models_in_turn(
    engines: list[BlendEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, rows = decode_step.decoded_together, list[tuple[int, int]]()

    def noted(steps: Any, pool: Any) -> Any:
        rows.append((id(pool.adapter), len(steps)))
        return stock(steps, pool)

    monkeypatch.setattr("blendrag.serving.scheduler.decoded_together", noted)
    for engine in engines:
        engine.open()
    with engines[0].scheduler.held():
        streams = [engine.ask_stream(QUESTION, 3) for engine in engines]
        assert len(engines[0].scheduler.waiting) == 3
    for stream in streams:
        assert [*stream]
    assert max(number for _, number in rows) == 2
    assert len({adapter for adapter, _ in rows}) == 2


def test_closing_one_ends_all(engines: list[BlendEngine]) -> None:
    engines[1].close()
    with pytest.raises(InvalidInputError, match="closed"):
        engines[0].ask(QUESTION)
    assert all(engine.closed for engine in engines)


def test_what_several_keep_is_dropped_in_equal_shares_if_memory_is_short() -> None:
    budget, kept = KVBudget(100), [60, 70]

    def keeper(number: int) -> Any:
        def shrink(most: int) -> int:
            kept[number] = min(kept[number], most)
            return kept[number]

        return shrink

    for number in range(2):
        budget.add_keeper(keeper(number))
    assert budget.free_bytes == 0
    assert kept == [50, 50]


def test_only_prompts_of_one_store_share_what_is_computed_once(
    models: list[Any], tmp_path: Path
) -> None:
    """Another store's prompts, which begin alike, would not find it."""
    with ExitStack() as stack:
        first, second = opened(models[:2], tmp_path, stack, together=True)
        for engine in (first, second):
            engine.ingest([tiny.document(8), tiny.document(9)]).whole()
        for mine, documents in ((3, (7, 8, 9)), (6, (9, 8, 7))):
            asked = [tiny.prompt(first, *documents, ask=f"What is {i}?") for i in range(6)]
            with first.scheduler.held():
                of_store = [first] * mine + [second] * (6 - mine)
                pairs = zip(of_store, asked, strict=True)
                streams = [engine.stream(text, mode="blend", ratio=0.3) for engine, text in pairs]
            notes = [note for each in streams for note in each.answer.metrics.notes]
            assert sum("were computed once for" in note for note in notes) == (mine == 6)
