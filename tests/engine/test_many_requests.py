"""Requests that run at the same time decode together, and each gets what it gets alone."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import tiny
from blendrag.engine import BlendEngine, Options
from blendrag.errors import RequestCancelled, RequestTimeout
from blendrag.serving import chunk_pool, row_limit, scheduler
from blendrag.serving.chunk_pool import ChunkPool

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    root = tmp_path_factory.mktemp("many")
    with tiny.engine(tiny.llama(initializer_range=0.2), root) as made:
        made.ingest([tiny.document(number) for number in range(4)])
        yield made


def options(number: int) -> Options:
    """Different in every way in which requests differ."""
    ways: list[dict[str, Any]] = [
        {},
        {"mode": "full"},
        {"mode": "reuse"},
        {"policy": "query", "temperature": 0.9, "seed": number},
        {"policy": "query", "logprobs": 2},
        {"policy": "query", "generate_kwargs": {"repetition_penalty": 1.3}},
        {"generate_kwargs": {"num_beams": 2}},
        {"policy": "query", "stop": ("e",)},
    ]
    return Options(max_new_tokens=3 + 5 * number % 17, **ways[number % len(ways)])


def asked(engine: BlendEngine, number: int) -> str:
    return tiny.prompt(engine, number % 4, (number + 1) % 4, ask=f"What happened in {number}?")


def test_10_requests_that_come_and_go_get_the_answers_that_each_gets_alone(engine, sizes):
    alone = [engine.generate(asked(engine, i), options(i)) for i in range(10)]
    assert not sizes

    with engine.scheduler.held():  # none ends before all others are there
        asking = [engine.stream(asked(engine, i), options(i)) for i in range(10)]
    together = [pieces.answer for pieces in asking]
    assert max(sizes) > 4
    assert len(set(sizes)) > 2  # requests joined and left
    for ours, theirs in zip(together, alone, strict=True):
        assert ours.text == theirs.text
        assert ours.finish_reason == theirs.finish_reason
        assert ours.metrics.new_tokens == theirs.metrics.new_tokens
        for one, other in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
            assert one.id == other.id
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert "forward" not in vars(engine.adapter.model)


def test_chunks_that_a_policy_moves_are_not_taken_from_another_request(engine, sizes, monkeypatch):
    """Each request moved them by errors of its own."""
    monkeypatch.setattr(chunk_pool, "MIN_SHARED_TOKENS", 32)
    steady = Options(
        policy="query+shift",
        ratio=0.3,
        max_new_tokens=8,
        logprobs=1,
        generate_kwargs={"min_new_tokens": 8},
    )
    prompts = [tiny.prompt(engine, 0, 1, ask=f"What happened in {i}?") for i in range(3)]
    alone = [engine.generate(prompt, steady) for prompt in prompts]
    together = engine.batch(prompts, steady)
    assert max(sizes) == 3
    for ours, theirs in zip(together, alone, strict=True):
        assert [t.id for t in ours.logprobs] == [t.id for t in theirs.logprobs]
        given, expected = ([t.logprob for t in one.logprobs] for one in (ours, theirs))
        assert given == pytest.approx(expected, abs=1e-5)


def test_a_step_that_fails_is_not_tried_again_for_each_token(engine, monkeypatch, caplog):
    """Half as many requests decode together then."""
    asked_for = [(asked(engine, i), Options(max_new_tokens=12)) for i in range(5)]
    alone = [engine.generate(*each).text for each in asked_for]
    tried, stock = [], scheduler.decoded_together

    def fail(steps: Sequence[Any], pool: ChunkPool) -> list[Any]:
        if len(steps) > 2:
            tried.append(len(steps))
            raise RuntimeError("no memory for all")
        return stock(steps, pool)

    monkeypatch.setattr(scheduler, "decoded_together", fail)
    monkeypatch.setattr(scheduler, "PREFILL_PER_STEP", math.inf)
    for times in (1, 2):
        with engine.scheduler.held():
            asking = [engine.stream(*each) for each in asked_for]
        assert [pieces.answer.text for pieces in asking] == alone
        engine.drain()
        assert tried == [3] * times
    assert caplog.text.count("no memory for all") == 1


def test_more_requests_decode_together_again_while_some_run(engine, monkeypatch):
    """As if memory had been short for one step."""
    tried, stock = [], scheduler.decoded_together

    def fail_once(steps: Sequence[Any], pool: ChunkPool) -> list[Any]:
        tried.append(len(steps))
        if tried.count(3) == 1 and len(steps) == 3:
            raise RuntimeError("no memory for all")
        return stock(steps, pool)

    monkeypatch.setattr(scheduler, "decoded_together", fail_once)
    monkeypatch.setattr(row_limit, "STEPS_TO_TRIAL", 2)
    monkeypatch.setattr(scheduler, "PREFILL_PER_STEP", math.inf)
    engine.drain()  # nothing runs, so all failures are forgotten
    kwargs = {"min_new_tokens": 12}
    with engine.scheduler.held():
        asking = [
            engine.stream(asked(engine, i), Options(max_new_tokens=12, generate_kwargs=kwargs))
            for i in range(3)
        ]
    assert all(pieces.answer.metrics.new_tokens == 12 for pieces in asking)
    assert tried.count(3) > 4


def test_a_lone_request_whose_step_fails_decodes_by_its_own_forward(engine, monkeypatch):
    expected, tried = engine.generate(asked(engine, 0), Options(max_new_tokens=9)).text, []

    def fail(steps: Sequence[Any], pool: ChunkPool) -> list[Any]:
        tried.append(len(steps))
        raise RuntimeError("no")

    monkeypatch.setattr(scheduler, "decoded_together", fail)
    assert engine.generate(asked(engine, 0), Options(max_new_tokens=9)).text == expected
    assert tried == [1]


class Looks(LogitsProcessor):
    """Notes at each token how many hooks precede the first layer."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self.layer = layer
        self.hooks: list[int] = []

    def __call__(self, input_ids: Any, scores: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self.hooks.append(len(self.layer._forward_pre_hooks))
        return scores


def test_layers_of_a_request_are_hooked_for_its_prefill_alone(engine):
    looks = Looks(engine.adapter.stack.layers[0])
    kwargs = {"logits_processor": LogitsProcessorList([looks]), "min_new_tokens": 4}
    engine.generate(
        asked(engine, 0), Options(mode="full", max_new_tokens=4, generate_kwargs=kwargs)
    )
    assert looks.hooks == [1, 0, 0, 0]


class Fails(LogitsProcessor):
    """Fails at its fourth token."""

    calls = 0

    def __call__(self, input_ids: Any, scores: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self.calls += 1
        if self.calls == 4:
            raise RuntimeError("a processor failed")
        return scores


@pytest.mark.parametrize("mode", ["blend", "reuse"])
def test_requests_share_chunks_at_different_positions(engine, moves, mode):
    """Each keeps only its own tokens; a chunk is in memory once, and gone with the last request."""
    prompts = [tiny.prompt(engine, i, (i + 1) % 4, (i + 2) % 4) for i in range(4)]
    ways = {"policy": "query", "ratio": 0.2} if mode == "blend" else {}
    asked = Options(mode=mode, max_new_tokens=12, **ways)
    alone = [engine.generate(prompt, asked).text for prompt in prompts]
    assert not moves
    assert [answer.text for answer in engine.batch(prompts, asked)] == alone
    pools, requests, lengths, own = zip(*moves, strict=True)
    assert len(moves) == 4
    assert len(set(pools)) == 1
    assert sum(own) < (0.35 if mode == "blend" else 0.2) * sum(lengths)
    held = [chunk for request in requests for chunk in request.held]
    assert len({one.chunk for one in held}) < len(held) / 2
    places: dict[Any, set[int]] = {}
    for one in held:
        places.setdefault(one.chunk, set()).add(one.at)
    assert max(map(len, places.values())) > 1
    del one, held, places, requests, moves[:]
    gc.collect()
    assert not pools[0]._chunks
    assert pools[0]._overlays is not None
    assert not pools[0]._overlays._requests


def test_requests_over_special_layers_share_chunks(tmp_path, monkeypatch):
    """Queries are scaled from position 869 on, which one of the answers reaches."""
    shared: list[int] = []
    attention = ChunkPool.attention

    def watched(pool: ChunkPool, requests: Sequence[Any]) -> Any:
        shared.append(sum(one.running is not None for one in requests))
        return attention(pool, requests)

    monkeypatch.setattr(ChunkPool, "attention", watched)
    scaled = {"floor_scale": 870, "attn_scale": 2.0}
    model = tiny.family("llama4_text", initializer_range=0.2, **scaled)
    asked = Options(mode="reuse", max_new_tokens=20, logprobs=1)
    with tiny.engine(model, tmp_path) as made:
        made.ingest([tiny.document(number) for number in range(4)])
        prompts = [tiny.prompt(made, i, (i + 1) % 4, (i + 2) % 4) for i in range(4)]
        alone = [made.generate(prompt, asked) for prompt in prompts]
        together = made.batch(prompts, asked)
    assert max(shared) == 4
    for one, other in zip(alone, together, strict=True):
        assert one.text == other.text
        expected = [token.logprob for token in one.logprobs]
        assert [token.logprob for token in other.logprobs] == pytest.approx(expected, abs=1e-5)


def test_a_request_that_fails_or_is_cancelled_does_not_disturb_the_others(engine, sizes):
    prompts = [asked(engine, i) for i in range(4)]
    long = Options(max_new_tokens=24)
    alone = [engine.generate(prompt, long).text for prompt in prompts]
    failing = {"logits_processor": LogitsProcessorList([Fails()])}
    with engine.scheduler.held():  # none begins before all are there
        good = [engine.stream(prompt, long) for prompt in prompts]
        bad = engine.stream(prompts[0], Options(generate_kwargs=failing))
        late = engine.stream(prompts[1], Options(timeout_s=600))
        left = engine.stream(prompts[2], long)
        late.pending.stream.timeout_s = 0.0
    next(left)
    left.close()
    assert [pieces.answer.text for pieces in good] == alone
    with pytest.raises(RuntimeError, match="a processor failed"):
        _ = bad.answer
    with pytest.raises(RequestTimeout):
        _ = late.answer
    with pytest.raises(RequestCancelled):
        _ = left.answer
    assert max(sizes) >= 4


def test_requests_wait_for_memory(tmp_path: Path, monkeypatch, sizes):
    with tiny.engine(tiny.shared_llama(), tmp_path) as engine:
        question = Options(max_new_tokens=30, mode="full")
        prompts = [f"What happened in {i}?" for i in range(6)]
        engine.batch(prompts, question)
        assert max(sizes) == 6
        sizes.clear()
        tokens = len(engine.segments(prompts[0]).ids) + 31
        limit = 2.5 * engine.adapter.layout.size_bytes(tokens)
        engine.scheduler.budget.limit_bytes = int(limit)
        engine.batch(prompts, question)
        assert max(sizes) == 2
