"""Time to first token: the figures, the baselines and the compiled prefill."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from blendrag.lab.bench.ttft import CachedPrefix, ttft, ttft_table
from blendrag.lab.bench.workload import REUSE, PromptBench, Workload
from blendrag.store import open_store
from lab.bench.small import LAYERS, no_peak_bytes, printed, timed, tiny_adapter

MODES = {"full", "prefix", "prefix_stock", "prefix_fused", "reuse", "blend"}
CHUNK_TOKENS, PROMPT_TOKENS = 64, 72
WORKLOAD = Workload(2, 32, 8, 0.15, rounds=1)


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    return printed("ttft")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[PromptBench]:
    store = open_store(tmp_path, ram_bytes=0, disk_bytes=1 << 30)
    with torch.inference_mode():
        yield PromptBench(tiny_adapter(), WORKLOAD, store)
    store.close()


def test_every_figure_follows_from_its_times(figures: dict[str, Any]) -> None:
    assert all(figures[f"{name}_ms"] > 0 for name in MODES)
    assert figures["peak_bytes"].keys() == figures["spread_ms"].keys() == MODES
    assert (figures["rounds"], figures["prompt_tokens"]) == (1, PROMPT_TOKENS)
    assert figures["speedup"] == pytest.approx(figures["full_ms"] / figures["blend_ms"])
    assert figures["reuse_speedup"] == pytest.approx(figures["full_ms"] / figures["reuse_ms"])
    assert figures["prefix_speedup"] == pytest.approx(figures["full_ms"] / figures["prefix_ms"])
    assert (
        figures["kv_bytes"] == 2 * LAYERS * 2 * CHUNK_TOKENS * 16 * 2
    )  # KV heads, width, bfloat16


def test_the_prefix_baseline_is_the_faster_of_its_two_ways(figures: dict[str, Any]) -> None:
    faster = min(("prefix_stock", "prefix_fused"), key=lambda name: figures[f"{name}_ms"])
    assert figures["prefix_ms"] == figures[f"{faster}_ms"]
    assert figures["spread_ms"]["prefix"] == figures["spread_ms"][faster]


def test_the_floor_of_query_counts_its_scout_pass(figures: dict[str, Any]) -> None:
    assert figures["charged_ratio"] == pytest.approx(0.15, abs=1 / CHUNK_TOKENS)
    rows = LAYERS * (figures["charged_ratio"] * CHUNK_TOKENS + 2 * (PROMPT_TOKENS - CHUNK_TOKENS))
    assert figures["floor_speedup"] == pytest.approx(LAYERS * PROMPT_TOKENS / rows)


def test_the_charged_ratio_counts_layer_0_of_hkvd(bench: PromptBench) -> None:
    counts = bench.blended(policy="hkvd")[1]
    assert counts.ratio == pytest.approx(0.15, abs=1 / (CHUNK_TOKENS * (LAYERS - 1)))
    assert counts.charged_ratio == pytest.approx((1 + counts.ratio * (LAYERS - 1)) / LAYERS)
    rows = LAYERS * (counts.charged_ratio * CHUNK_TOKENS + PROMPT_TOKENS - CHUNK_TOKENS)
    assert bench.floor_speedup(counts) == pytest.approx(LAYERS * PROMPT_TOKENS / rows)


def test_ways_that_compute_everything_choose_the_token_of_stock_prefill(bench: PromptBench) -> None:
    prefix = CachedPrefix(bench)
    assert prefix.stock() == prefix.fused() == bench.full()
    token, counts = bench.blended(policy="hkvd", ratio=1.0)
    assert token == bench.full()
    assert counts.rows == (PROMPT_TOKENS,) * LAYERS
    assert bench.floor_speedup(counts) == 1.0


def test_blend_recomputes_its_share_and_reuse_nothing(bench: PromptBench) -> None:
    blended = bench.blended()[1]
    assert blended.candidate_rows[0] == blended.candidate_rows[1]
    assert sum(blended.candidate_rows[1:]) == round(0.15 * CHUNK_TOKENS * (LAYERS - 1))
    reused = bench.blended(**REUSE)[1]
    assert reused.candidate_rows == (0,) * LAYERS
    assert reused.rows == (PROMPT_TOKENS - CHUNK_TOKENS,) * LAYERS


def test_a_compiled_stock_prefill_has_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr("blendrag.lab.bench.ttft.peak_bytes", no_peak_bytes)
    monkeypatch.setattr(torch, "compile", lambda forward, **how: compiled.append(how) or forward)
    assert printed("ttft")["full_compiled_ms"] is None
    found = ttft(timed(), WORKLOAD, compiled=True)
    assert compiled == [{"dynamic": False}]
    assert found.full_compiled_ms is not None
    assert found.compile_s is not None
    assert found.notes == ()
    assert {"full", "full_compiled"} <= found.spread_ms.keys()
    assert [row[0] for row in ttft_table(found).rows][:2] == [
        "full: stock prefill",
        "full, compiled",
    ]


def test_without_a_working_compiler_the_row_is_left_out_with_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no C++ compiler found\nwith a long trace")

    monkeypatch.setattr("blendrag.lab.bench.ttft.peak_bytes", no_peak_bytes)
    monkeypatch.setattr(torch, "compile", lambda forward, **how: broken)
    found = ttft(timed(), WORKLOAD, compiled=True)
    assert found.full_compiled_ms is None
    assert "full_compiled" not in found.spread_ms
    (note,) = found.notes
    assert "no C++ compiler found" in note
    assert "\n" not in note
