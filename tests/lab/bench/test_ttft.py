"""Time to first token: the figures, the baselines and the compiled prefill."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from blendrag.lab.bench.ttft import CachedPrefix
from blendrag.lab.bench.workload import PromptBench, Workload
from blendrag.store import open_store
from lab.bench.small import LAYERS, SMALL, measured, printed, tiny_adapter

MODES = {"full", "prefix", "prefix_stock", "prefix_fused", "reuse", "blend"}
CHUNK_TOKENS, PROMPT_TOKENS = 64, 72


@pytest.fixture(scope="module")
def ttft() -> dict[str, Any]:
    return printed("ttft")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[PromptBench]:
    store = open_store(tmp_path, ram_bytes=0, disk_bytes=1 << 30)
    with torch.inference_mode():
        yield PromptBench(tiny_adapter(), Workload(2, 32, 8, 0.15, rounds=1), store)
    store.close()


def test_every_figure_follows_from_its_times(ttft: dict[str, Any]) -> None:
    assert all(ttft[f"{name}_ms"] > 0 for name in MODES)
    assert ttft["peak_bytes"].keys() == ttft["spread_ms"].keys() == MODES
    assert (ttft["rounds"], ttft["prompt_tokens"]) == (1, PROMPT_TOKENS)
    assert ttft["speedup"] == pytest.approx(ttft["full_ms"] / ttft["blend_ms"])
    assert ttft["reuse_speedup"] == pytest.approx(ttft["full_ms"] / ttft["reuse_ms"])
    assert ttft["prefix_speedup"] == pytest.approx(ttft["full_ms"] / ttft["prefix_ms"])
    assert ttft["kv_bytes"] == 2 * LAYERS * 2 * CHUNK_TOKENS * 16 * 2  # KV heads, width, bfloat16


def test_the_prefix_baseline_is_the_faster_of_its_two_ways(ttft: dict[str, Any]) -> None:
    faster = min(("prefix_stock", "prefix_fused"), key=lambda name: ttft[f"{name}_ms"])
    assert ttft["prefix_ms"] == ttft[f"{faster}_ms"]
    assert ttft["spread_ms"]["prefix"] == ttft["spread_ms"][faster]


def test_the_floor_of_query_counts_its_scout_pass(ttft: dict[str, Any]) -> None:
    assert ttft["charged_ratio"] == pytest.approx(0.15, abs=1 / CHUNK_TOKENS)
    rows = LAYERS * (ttft["charged_ratio"] * CHUNK_TOKENS + 2 * (PROMPT_TOKENS - CHUNK_TOKENS))
    assert ttft["floor_speedup"] == pytest.approx(LAYERS * PROMPT_TOKENS / rows)


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
    reused = bench.blended("reuse", policy="reuse", ratio=0.0)[1]
    assert reused.candidate_rows == (0,) * LAYERS
    assert reused.rows == (PROMPT_TOKENS - CHUNK_TOKENS,) * LAYERS


def test_a_compiled_stock_prefill_has_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda forward, **how: compiled.append(how) or forward)
    assert printed("ttft")["full_compiled_ms"] is None
    fields = measured("ttft", *SMALL, "--compiled")
    assert compiled == [{"dynamic": False}]
    assert fields["full_compiled_ms"] > 0
    assert fields["compile_s"] > 0
    assert fields["notes"] == []
    assert {"full", "full_compiled"} <= fields["spread_ms"].keys()


def test_without_a_working_compiler_the_row_is_left_out_with_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no C++ compiler found\nwith a long trace")

    monkeypatch.setattr(torch, "compile", lambda forward, **how: broken)
    fields = measured("ttft", *SMALL, "--compiled")
    assert fields["full_compiled_ms"] is None
    assert "full_compiled" not in fields["spread_ms"]
    (note,) = fields["notes"]
    assert "no C++ compiler found" in note
    assert "\n" not in note
