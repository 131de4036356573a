"""Time to first token: the figures, the baselines and the compiled prefill."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from blendrag.lab.bench.ttft import CachedPrefix, ttft, ttft_table
from blendrag.lab.bench.workload import PromptBench, Workload
from lab.bench.small import LAYERS, no_peak_bytes, printed, timed, tiny_bench

MODES = {"full", "prefix_stock", "prefix_fused", "reuse", "blend"}
CHUNK_TOKENS, PROMPT_TOKENS = 64, 72
WORKLOAD = Workload(2, 32, 8, 0.15, rounds=1)


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    return printed("ttft")


@pytest.fixture(scope="module")
def bench() -> Iterator[PromptBench]:
    with tiny_bench(WORKLOAD) as bench:
        yield bench


@pytest.fixture(autouse=True)
def _no_peak_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blendrag.lab.bench.ttft.peak_bytes", no_peak_bytes)


def test_figures_follow_from_the_times_of_all_modes(figures: dict[str, Any]) -> None:
    assert figures["peak_bytes"].keys() == figures["ms"].keys() == MODES
    assert all(timing["low"] > 0 for timing in figures["ms"].values())
    assert (figures["rounds"], figures["prompt_tokens"]) == (1, PROMPT_TOKENS)
    speedup = figures["ms"]["full"]["median"] / figures["ms"]["blend"]["median"]
    assert figures["speedup"] == pytest.approx(speedup)
    kv_bytes = 2 * LAYERS * 2 * CHUNK_TOKENS * 16 * 2  # KV heads, width, bfloat16
    assert figures["kv_bytes"] == kv_bytes


def test_the_floor_of_query_counts_its_scout_pass(figures: dict[str, Any]) -> None:
    assert figures["charged_ratio"] == pytest.approx(0.15, abs=1 / CHUNK_TOKENS)
    rows = LAYERS * (figures["charged_ratio"] * CHUNK_TOKENS + 2 * (PROMPT_TOKENS - CHUNK_TOKENS))
    assert figures["floor_speedup"] == pytest.approx(LAYERS * PROMPT_TOKENS / rows)


def test_the_charged_ratio_counts_layer_0_of_hkvd(bench: PromptBench) -> None:
    counts = bench.blend(policy="hkvd")[1].counts()
    assert counts.ratio == pytest.approx(0.15, abs=1 / (CHUNK_TOKENS * (LAYERS - 1)))
    assert counts.charged_ratio == pytest.approx((1 + counts.ratio * (LAYERS - 1)) / LAYERS)
    rows = LAYERS * (counts.charged_ratio * CHUNK_TOKENS + PROMPT_TOKENS - CHUNK_TOKENS)
    assert bench.floor_speedup(counts) == pytest.approx(LAYERS * PROMPT_TOKENS / rows)


def test_ways_that_compute_everything_choose_the_token_of_stock_prefill(bench: PromptBench) -> None:
    prefix = CachedPrefix(bench)
    assert prefix.stock() == prefix.fused() == bench.full()
    token, fusion = bench.blend(policy="hkvd", ratio=1.0)
    counts = fusion.counts()
    assert token == bench.full()
    assert counts.rows == (PROMPT_TOKENS,) * LAYERS
    assert bench.floor_speedup(counts) == 1.0


def test_a_compiled_stock_prefill_has_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda forward, **how: compiled.append(how) or forward)
    found = ttft(timed(), WORKLOAD, compiled=True)
    assert compiled == [{"dynamic": False}]
    (note,) = found.notes
    assert note.startswith("Compiled in ")
    shown = [row[0] for row in ttft_table(found).rows]
    assert shown[:2] == ["full: stock prefill", "full, compiled"]


def test_without_a_working_compiler_the_row_is_left_out_with_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no C++ compiler found\nwith a long trace")

    monkeypatch.setattr(torch, "compile", lambda forward, **how: broken)
    found = ttft(timed(), WORKLOAD, compiled=True)
    assert found.ms.keys() == MODES
    (note,) = found.notes
    assert "no C++ compiler found" in note
    assert "\n" not in note
