"""The KV of an answer grows with it, within the memory for running requests."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from blendrag.engine import BlendEngine, Options
from blendrag.serving import chunk_pool, kv_budget, scheduler
from blendrag.serving.chunk_pool import ChunkPool
from blendrag.serving.kv_room import KVRoom

pytestmark = pytest.mark.timeout(120)

#: No other tensor of a model has this width.
HEAD = 20


def exactly(tokens: int, **more: Any) -> Options:
    """An answer of so many tokens."""
    return Options(max_new_tokens=tokens, generate_kwargs={"min_new_tokens": tokens}, **more)


class Watched:
    """What the turns of all engines did about memory."""

    def __init__(self) -> None:
        self.joint: list[int] = []
        """Requests of each joint step."""
        self.grown = 0
        self.aside = 0
        self.back = 0


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Prefills do not pause, so that requests join in the same order each time."""
    seen = Watched()
    decode, grow = scheduler.decoded_together, ChunkPool.reserve
    put, take = ChunkPool.put_aside, ChunkPool.take_back

    def decoded(steps: Sequence[Any], pool: ChunkPool) -> list[Any]:
        if len(steps) > 1:
            seen.joint.append(len(steps))
        return decode(steps, pool)

    def reserve(self: ChunkPool, *args: Any) -> None:
        seen.grown += 1
        grow(self, *args)

    def put_aside(self: ChunkPool, *args: Any) -> None:
        seen.aside += 1
        put(self, *args)

    def take_back(self: ChunkPool, *args: Any) -> None:
        seen.back += 1
        take(self, *args)

    monkeypatch.setattr(scheduler, "PREFILL_PER_STEP", math.inf)
    monkeypatch.setattr(scheduler, "decoded_together", decoded)
    for watched in (reserve, put_aside, take_back):
        monkeypatch.setattr(ChunkPool, watched.__name__, watched)
    return seen


def said(made: BlendEngine, prompts: Sequence[Any], options: Options) -> list[Any]:
    return [(answer.text, answer.logprobs) for answer in made.batch(prompts, options)]


@pytest.mark.parametrize(("family", "mode"), [("gemma3_text", "full"), ("llama", "blend")])
def test_kv_that_grows_gives_the_answers_of_kv_allocated_at_once(
    family: str, mode: Any, tmp_path: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 3 has windows of 24 tokens.

    Bit for bit where prefills repeat their bits; blended ones, whose chunks are shared, do not.
    """
    monkeypatch.setattr(chunk_pool, "MIN_SHARED_TOKENS", 32)
    monkeypatch.setattr(kv_budget, "STEP_PART", 1000)
    model, options, found = tiny.family(family, initializer_range=0.2), exactly(12, logprobs=2), []
    with tiny.engine(model, tmp_path) as made:
        made.ingest([tiny.document(i, 5) for i in range(3)])
        prompts = [tiny.prompt(made, i, (i + 1) % 3) for i in range(3)]
    for first_tokens in (2, 1000):
        monkeypatch.setattr(kv_budget, "FIRST_TOKENS", first_tokens)
        watched.grown, before = 0, len(watched.joint)
        with tiny.engine(model, tmp_path, ratio=0.2, policy="query", mode=mode) as made:
            found.append([*said(made, prompts[:1], options), *said(made, prompts, options)])
        assert (watched.grown > 9) == (first_tokens == 2)
        assert max(watched.joint[before:]) == 3
    assert [text for text, _ in found[0]] == [text for text, _ in found[1]]
    ours, theirs = ([t.logprob for _, steps in each for t in steps] for each in found)
    assert ours == (theirs if mode == "full" else pytest.approx(theirs, abs=1e-5))


def kv_bytes() -> int:
    """The bytes of all KV on the heap."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor) and each.ndim >= 4 and each.shape[-1] == HEAD:
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.fixture
def crowded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BlendEngine]:
    """An engine with memory for the beginnings of three answers of 60 tokens, but not for their ends."""
    monkeypatch.setattr(kv_budget, "FIRST_TOKENS", 8)
    with tiny.engine(tiny.llama(head_dim=HEAD), tmp_path, mode="full") as made:
        made.open()
        tokens = len(made.segments(question(0)).ids)
        made.scheduler.budget.limit_bytes = made.adapter.layout.size_bytes(3 * (tokens + 40))
        yield made


def question(number: int) -> str:
    return f"What happened in {number}?"


def test_memory_of_growing_answers_stays_within_the_limit(
    crowded: BlendEngine, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest wait for older ones, and every answer is the one that it would be alone."""
    options, prompts = exactly(60, logprobs=0), [question(i) for i in range(4)]
    alone = [said(crowded, [prompt], options)[0] for prompt in prompts]
    held: list[tuple[int, int]] = []
    ready = KVRoom.ready

    def decode(self: KVRoom, running: Any) -> Any:
        found = ready(self, running)
        held.append((kv_bytes(), self.budget.size_bytes))
        return found

    monkeypatch.setattr(KVRoom, "ready", decode)
    gc.freeze()  # only what is made from now on is looked at
    try:
        answers = said(crowded, prompts, options)
    finally:
        gc.collect()
        gc.unfreeze()
        gc.freeze()  # as before: libraries are not searched for garbage
    for (text, ours), (expected, theirs) in zip(answers, alone, strict=True):
        assert text == expected
        assert [t.logprob for t in ours] == pytest.approx([t.logprob for t in theirs], abs=1e-5)
    assert max(watched.joint) > 2
    assert watched.aside
    assert watched.aside == watched.back
    limit = crowded.scheduler.budget.limit_bytes
    assert max(counted for _, counted in held) <= limit
    assert all(real <= counted for real, counted in held)
    assert max(real for real, _ in held) > 0.9 * limit


@pytest.mark.filterwarnings(
    "ignore:Unfeasible length constraints"
)  # so that only the context ends it
def test_a_lone_answer_goes_on_to_the_context_whatever_the_limit(
    crowded: BlendEngine, watched: Watched
) -> None:
    crowded.scheduler.budget.limit_bytes = 1
    crowded.adapter.model.config.max_position_embeddings = 100
    never = {"generate_kwargs": {"min_new_tokens": 100}}
    answers = [crowded.generate(question(0), max_new_tokens=10_000, **never)]
    answers += crowded.batch([question(0), question(1)], max_new_tokens=10_000, **never)
    for answer in answers:
        assert answer.metrics.prompt_tokens + answer.metrics.new_tokens == 100
        assert answer.finish_reason == "length"
        assert answer.metrics.notes[-1].endswith("its context is full")
    assert not watched.joint


def test_unbounded_answers_of_a_long_context_run_together(tmp_path: Path, watched: Watched) -> None:
    model = tiny.llama(head_dim=HEAD, max_position_embeddings=131_072)
    limit = 4 * 2**20
    with tiny.engine(model, tmp_path, mode="full", max_new_tokens=None) as made:
        made.open()
        made.scheduler.budget.limit_bytes = limit
        assert made.adapter.layout.size_bytes(131_072) > 10 * limit
        streams = [
            made.stream(question(i), generate_kwargs={"min_new_tokens": 100_000}) for i in range(6)
        ]
        while max(watched.joint, default=0) < 6:
            next(streams[0])
        assert kv_bytes() < limit
        for stream in streams:
            stream.close()
        made.drain()
        assert not made.scheduler.budget.size_bytes


def test_one_that_waits_can_be_abandoned_and_others_go_on(
    crowded: BlendEngine, watched: Watched
) -> None:
    options = exactly(96)
    alone = crowded.generate(question(0), options).text
    oldest, *others = [crowded.stream(question(i), options) for i in range(3)]
    parts = []
    for part in oldest:
        parts.append(part)
        if watched.aside:
            others[-1].close()
    assert "".join(parts) == alone
    assert others[0].answer.metrics.new_tokens == 96
    crowded.drain()
    assert watched.back < watched.aside
    assert not crowded.scheduler.budget.size_bytes
    assert not crowded.scheduler.budget.is_short
