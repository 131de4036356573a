"""Load: the computed queue, what each way keeps, and that all ways answer the same requests."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from blendrag.store.encodings import stored_chunk_bytes
from blendrag.text.prompt import SegmentedPrompt
from blendrag_lab.bench.load import (
    BlendServer,
    LoadResult,
    PrefilledRequest,
    PrefixServer,
    Queue,
    load,
    load_figure,
    make_requests,
    serve_full,
)
from blendrag_lab.bench.tiers import ON_DISK, tier_store
from blendrag_lab.bench.workload import Workload, prompt_of
from lab.tests.bench.small import printed, timed, tiny_adapter

PROMPT = Workload(3, 16, 8, 1.0, "full")


def served(first_s: float) -> PrefilledRequest:
    return PrefilledRequest(0, first_s, 0)


def asking(*chunks: int) -> SegmentedPrompt:
    """Those chunks, and a question."""
    ids = (tuple(np.random.default_rng(n).integers(2, 3000, 16).tolist()) for n in chunks)
    return prompt_of(zip(map(str, chunks), ids, strict=True), (5, 6, 7, 8))


def room(chunks: int) -> int:
    return chunks * stored_chunk_bytes(tiny_adapter().layout, 16)


def test_poisson_arrivals_wait_as_queueing_theory_predicts():
    """M/D/1: the mean wait is ρ / (2 (1 - ρ)) of the service time."""
    assert Queue([served(1.0), served(3.0)]).mean(1e-9) == pytest.approx(2.0)
    means = [Queue([served(1.0)], seed).mean(0.5) for seed in range(20)]
    assert statistics.fmean(means) == pytest.approx(1.5, rel=0.1)


def test_beyond_capacity_throughput_stays_and_ttft_grows():
    queue = Queue([served(1.0)])
    assert queue.at(0.2)[1] == pytest.approx(0.2, rel=0.1)
    assert queue.at(5.0)[1] == pytest.approx(1.0, rel=0.01)
    assert queue.mean(5.0) > 100


def test_half_the_service_time_sustains_twice_the_rate():
    slow, fast = Queue([served(1.0)]), Queue([served(0.5)])
    rate = slow.rate_of(2.0)
    assert slow.mean(rate) == pytest.approx(2.0, rel=0.01)
    assert fast.rate_of(1.0) == pytest.approx(2 * rate, rel=0.01)
    assert fast.rate_of(2.0) > 2 * rate
    assert Queue([served(3.0)]).rate_of(2.0) == 0.0


def test_requests_ask_most_for_the_first_chunks_and_are_always_the_same():
    plans, again = (make_requests(tiny_adapter(), PROMPT, 30, 105)[1] for _ in "ab")
    assert len(plans) == 105
    assert all(len({s.chunk_id for s in plan.chunks}) == PROMPT.chunks for plan in plans)
    assert [plan.ids for plan in plans] == [plan.ids for plan in again]
    asked = Counter(str(segment.chunk_id) for plan in plans for segment in plan.chunks)
    assert asked["chunk-0"] > 3 * asked["chunk-29"]


@torch.inference_mode()
def test_prefix_reuses_chunks_after_the_same_chunks_and_blend_in_any_place():
    """All choose the token of stock prefill, because the workload recomputes everything."""
    adapter, reused = tiny_adapter(), []
    with tier_store(ON_DISK) as there:
        prefix, blend = PrefixServer(adapter, room(20)), BlendServer(adapter, PROMPT, there)
        for chunks in ((1, 2, 3), (1, 2, 4), (2, 1, 3), (1, 2, 4)):
            plan = asking(*chunks)
            answers = prefix.serve(plan), blend.serve(plan)
            assert {answer.token for answer in answers} == {serve_full(adapter, plan).token}
            reused.append(tuple(answer.reused_tokens // 16 for answer in answers))
    assert reused == [(0, 0), (2, 2), (0, 3), (3, 3)]


@torch.inference_mode()
def test_a_full_prefix_cache_evicts_the_least_recently_used():
    prefix = PrefixServer(tiny_adapter(), room(4))
    reused = [
        prefix.serve(asking(*chunks)).reused_tokens
        for chunks in ((1, 2), (3, 4), (1, 2), (5, 6), (1, 2), (3, 4))  # (5, 6) replaces (3, 4)
    ]
    assert reused == [0, 0, 32, 0, 32, 0]


@torch.inference_mode()
def test_a_small_store_evicts_too_and_encodes_what_is_missing():
    with tier_store(ON_DISK, room(5)) as there:
        blend = BlendServer(tiny_adapter(), PROMPT, there)
        for number in range(1, 9, 2):
            assert blend.serve(asking(number, number + 1)).reused_tokens == 0
            assert there.store.stats().size_bytes <= room(5)
        assert there.store.stats().evictions > 0
        assert blend.serve(asking(7, 8)).reused_tokens == 32


def test_a_corpus_that_fits_is_reused_from_the_first_request_on():
    result = load(timed(), PROMPT, 4, 0, 9, 9)
    blend = next(way for way in result.ways if way.way == "blend")
    tokens = PROMPT.chunks * PROMPT.chunk_tokens
    assert blend.reused == pytest.approx(tokens / PROMPT.prompt_tokens)


def test_every_way_is_drawn_at_every_rate_with_the_ttft_that_they_are_compared_at():
    result = TypeAdapter(LoadResult).validate_python(printed("load"))
    full, *_ = result.ways
    assert [way.way for way in result.ways] == ["full", "prefix", "blend"]
    assert full.reused == 0 < full.equal_ttft_per_s
    (axes,) = load_figure(result).axes
    drawn: dict[Any, Any] = {line.get_label(): line for line in axes.get_lines()}
    for way in ("full", "prefix", "blend"):
        rows = [row for row in result.rows if row.way == way]
        assert all(min(row.p95_ttft_ms, row.throughput_per_s) > 0 for row in rows)
        assert list(drawn[way].get_xdata()) == [row.requests_per_s for row in rows]
        assert list(drawn[way].get_ydata()) == [row.mean_ttft_ms for row in rows]
    assert list(drawn["twice full's\nwithout load"].get_ydata()) == [result.doubled_ttft_ms] * 2
    paths: Any = (path for band in axes.collections for path in band.get_paths())
    tops = {max(path.vertices[:, 1]) for path in paths}
    assert max(row.p95_ttft_ms for row in result.rows if row.way == "blend") in tops
