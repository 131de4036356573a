"""Load: the computed queue, what each way keeps, and that all of them answer the same requests."""

from __future__ import annotations

import statistics
from collections import Counter

import numpy as np
import pytest
import torch

from blendrag.errors import InvalidInputError
from blendrag.lab.bench.geometry import bench_adapter
from blendrag.lab.bench.load import RATES, LoadWorkload, make_requests, run_load
from blendrag.lab.bench.load_servers import BlendServer, FullServer, PrefixServer, Served
from blendrag.lab.bench.queue import Queue
from blendrag.lab.bench.tiers import ON_DISK, tier_store
from blendrag.lab.bench.workload import Workload
from blendrag.model import ModelAdapter
from blendrag.store.encodings import stored_chunk_bytes
from blendrag.text.prompt import PromptPlan, Segment
from cli.commands import invoke, said
from lab.bench.lab import measured
from lab.bench.test_ttft import _let_context_matter

PROMPT = Workload(3, 16, 8, 1.0, "full")
SMALL = (
    "--geometry", "tiny", "--chunks", "2", "--chunk-tokens", "16", "--question-tokens", "4",
    "--requests", "3", "--warm-requests", "1", "--corpus-chunks", "5", "--store-chunks", "4",
)  # fmt: skip


@pytest.fixture(scope="module")
def adapter() -> ModelAdapter:
    made = bench_adapter("tiny", None, "float32", "cpu")
    _let_context_matter(made.model)
    return made


def served(first_s: float) -> Served:
    return Served(0, first_s, 0)


def prompt_of(adapter: ModelAdapter, *chunks: int) -> PromptPlan:
    """Those chunks, and a question."""
    segments = []
    for i, number in enumerate(chunks):
        rng = np.random.default_rng(number)
        ids = tuple(rng.integers(2, 3000, 16).tolist())
        segments.append(Segment("", ids, 16 * i, f"chunk-{number}", ids))
    return PromptPlan((*segments, Segment("", (5, 6, 7, 8), 16 * len(chunks))))


def room(adapter: ModelAdapter, chunks: int) -> int:
    return chunks * stored_chunk_bytes(adapter.layout, 16)


# -- the queue ------------------------------------------------------------------------------------


def test_without_load_a_request_takes_what_it_takes() -> None:
    queue = Queue([served(1.0), served(3.0)])
    assert queue.mean(1e-9) == pytest.approx(2.0)
    assert queue.alone_s == 2.0


def test_poisson_arrivals_wait_as_queueing_theory_says() -> None:
    """M/D/1: the mean wait is ρ / (2 (1 - ρ)) of the service time."""
    means = [Queue([served(1.0)], seed).mean(0.5) for seed in range(20)]
    assert statistics.fmean(means) == pytest.approx(1.5, rel=0.1)


def test_beyond_what_it_can_answer_the_throughput_stays_and_the_ttft_grows() -> None:
    queue = Queue([served(1.0)])
    assert queue.at(0.2)[1] == pytest.approx(0.2, rel=0.1)
    assert queue.at(5.0)[1] == pytest.approx(1.0, rel=0.01)
    assert queue.mean(5.0) > 100


def test_the_rate_at_a_ttft_gives_that_ttft_and_half_the_time_gives_twice_the_rate() -> None:
    slow, fast = Queue([served(1.0)]), Queue([served(0.5)])
    rate = slow.rate_of(2.0)
    assert slow.mean(rate) == pytest.approx(2.0, rel=0.01)
    assert fast.rate_of(1.0) == pytest.approx(2 * rate, rel=0.01)
    assert fast.rate_of(2.0) > 2 * rate
    assert Queue([served(3.0)]).rate_of(2.0) == 0.0


# -- the requests ---------------------------------------------------------------------------------


def test_a_skewed_corpus_is_asked_for_its_first_chunks_most(adapter: ModelAdapter) -> None:
    def asked(skew: float) -> Counter[str]:
        plans = make_requests(adapter, LoadWorkload(PROMPT, 30, 10, skew, 200, 0)).plans
        return Counter(str(segment.chunk_id) for plan in plans for segment in plan.chunks)

    assert asked(1.5)["chunk-0"] > 3 * asked(0.0)["chunk-0"]
    plans = make_requests(adapter, LoadWorkload(PROMPT, 30, 10, 1.0, 20, 5)).plans
    assert len(plans) == 25
    for plan in plans:
        assert len({segment.chunk_id for segment in plan.chunks}) == PROMPT.chunks
    again = make_requests(adapter, LoadWorkload(PROMPT, 30, 10, 1.0, 20, 5)).plans
    assert [plan.ids for plan in plans] == [plan.ids for plan in again]


@pytest.mark.parametrize("skew", [-1.0, float("inf"), float("nan")])
def test_a_skew_that_is_none_is_refused(adapter: ModelAdapter, skew: float) -> None:
    with pytest.raises(InvalidInputError, match="skew"):
        make_requests(adapter, LoadWorkload(PROMPT, 30, 10, skew))


# -- the three ways -------------------------------------------------------------------------------


@torch.inference_mode()
def test_all_ways_choose_the_token_of_a_stock_prefill_where_all_is_computed(
    adapter: ModelAdapter,
) -> None:
    with tier_store(ON_DISK) as there:
        full, prefix = FullServer(adapter), PrefixServer(adapter, room(adapter, 9))
        blend = BlendServer(adapter, there, PROMPT)
        for chunks in ((1, 2, 3), (1, 2, 4), (3, 1, 2), (1, 2, 3)):
            plan = prompt_of(adapter, *chunks)
            token = full.serve(plan).token
            assert prefix.serve(plan).token == token
            assert blend.serve(plan).token == token


@torch.inference_mode()
def test_prefix_reuses_chunks_behind_the_same_chunks_only_and_blend_wherever_they_stand(
    adapter: ModelAdapter,
) -> None:
    with tier_store(ON_DISK) as there:
        prefix = PrefixServer(adapter, room(adapter, 20))
        blend = BlendServer(adapter, there, PROMPT)
        reused = [
            (prefix.serve(plan).reused_tokens // 16, blend.serve(plan).reused_tokens // 16)
            for plan in (
                prompt_of(adapter, *c) for c in ((1, 2, 3), (1, 2, 4), (2, 1, 3), (1, 2, 4))
            )
        ]
    assert reused == [(0, 0), (2, 2), (0, 3), (3, 3)]


@torch.inference_mode()
def test_a_full_prefix_cache_forgets_what_was_used_longest_ago(adapter: ModelAdapter) -> None:
    prefix = PrefixServer(adapter, room(adapter, 4))
    for chunks in ((1, 2), (3, 4), (1, 2)):
        last = prefix.serve(prompt_of(adapter, *chunks))
    assert last.reused_tokens == 32
    prefix.serve(prompt_of(adapter, 5, 6))  # in place of (3, 4)
    assert prefix.serve(prompt_of(adapter, 1, 2)).reused_tokens == 32
    assert prefix.serve(prompt_of(adapter, 3, 4)).reused_tokens == 0


@torch.inference_mode()
def test_a_store_of_the_same_size_forgets_too_and_what_it_misses_is_encoded_before_the_answer(
    adapter: ModelAdapter,
) -> None:
    limit = room(adapter, 5)
    with tier_store(ON_DISK, limit) as there:
        blend = BlendServer(adapter, there, PROMPT)
        for number in range(1, 9, 2):
            missed = blend.serve(prompt_of(adapter, number, number + 1))
            assert missed.reused_tokens == 0
            assert there.store.stats().size_bytes <= limit
        assert there.store.stats().evictions > 0
        assert blend.serve(prompt_of(adapter, 7, 8)).reused_tokens == 32


@torch.inference_mode()
def test_a_corpus_that_was_ingested_is_reused_from_the_first_request_on(
    adapter: ModelAdapter,
) -> None:
    plan = prompt_of(adapter, 1, 2, 3)
    with tier_store(ON_DISK) as there:
        blend = BlendServer(adapter, there, PROMPT)
        blend.ingest(segment.stored_ids for segment in plan.chunks)
        assert blend.serve(plan).reused_tokens == 48


def test_with_room_for_the_corpus_nothing_of_it_is_missed(adapter: ModelAdapter) -> None:
    workload = LoadWorkload(PROMPT, 9, 9, 1.0, 4, 0)
    result = run_load(adapter, workload, ON_DISK)
    blend = next(way for way in result.ways if way.way == "blend")
    tokens = PROMPT.chunks * PROMPT.chunk_tokens
    assert blend.reused == pytest.approx(tokens / (tokens + PROMPT.question_tokens))


# -- the command ----------------------------------------------------------------------------------


def test_one_object_holds_every_way_at_every_rate() -> None:
    fields = measured("load", *SMALL)
    assert [way["way"] for way in fields["ways"]] == ["full", "prefix", "blend"]
    assert len(fields["rows"]) % 3 == 0
    for row in fields["rows"]:
        assert row["p95_ttft_ms"] > 0
        assert row["throughput_per_s"] > 0
    by_way = {way["way"]: way for way in fields["ways"]}
    assert by_way["full"]["reused"] == 0
    assert fields["full_doubles_per_s"] == by_way["full"]["equal_ttft_per_s"] > 0
    ratio = by_way["blend"]["equal_ttft_per_s"] / fields["full_doubles_per_s"]
    assert fields["blend_rate_ratio"] == pytest.approx(ratio)


def test_throughput_by_rate_is_printed_beside_ttft() -> None:
    result = invoke("bench", "load", *SMALL)
    assert result.exit_code == 0, result.stderr
    assert "first tokens/s by rate" in " ".join(result.stdout.split())
    assert result.stdout.count("/s") >= 3 * len(RATES)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [(("--corpus-chunks", "1"), "corpus of 1 chunks"), (("--store-chunks", "2"), "room for 2 chunks"),
     (("--tier", "floppy"), "tier 'floppy'"), (("--chunk-tokens", "30000"), "passes the context")],
)  # fmt: skip
def test_a_load_that_cannot_be_made_is_one_sentence(wrong: tuple[str, ...], sentence: str) -> None:
    result = invoke("bench", "load", *SMALL, *wrong)
    assert result.exit_code == 2
    assert sentence in said(result)
