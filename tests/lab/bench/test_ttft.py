"""Time to first token: what is printed, and what must hold however fast the machine is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from blendrag.lab.bench.geometry import bench_adapter
from blendrag.lab.bench.ttft import TtftBench, Workload
from blendrag.store import open_store
from lab.bench.lab import SMALL, measured

MODES = {"full", "prefix", "prefix_stock", "prefix_fused", "reuse", "blend"}
CHUNK_TOKENS, PROMPT_TOKENS, LAYERS = 64, 72, 4


@pytest.fixture(scope="module")
def ttft() -> dict[str, Any]:
    return measured("ttft", *SMALL, "--dtype", "bfloat16")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[TtftBench]:
    store = open_store(tmp_path, ram_bytes=0, disk_bytes=1 << 30)
    adapter = bench_adapter("tiny", None, "float32", "cpu")
    _let_context_matter(adapter.model)
    with torch.inference_mode():
        yield TtftBench(adapter, Workload(2, 32, 8, 0.15, rounds=1), store)
    store.close()


def _let_context_matter(model: Any) -> None:
    """Larger weights and a head of its own, so that the token chosen depends on the prompt."""
    torch.manual_seed(1)
    with torch.no_grad():
        for layer in model.model.layers:
            for weight in layer.parameters():
                weight.mul_(5.0 if weight.ndim == 2 else 1.0)
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))


def test_every_figure_has_its_name(ttft: dict[str, Any]) -> None:
    for name in ("full", "prefix", "prefix_stock", "prefix_fused", "reuse", "blend"):
        assert ttft[f"{name}_ms"] > 0
    assert ttft["peak_bytes"].keys() == MODES
    assert ttft["spread_ms"].keys() == MODES
    assert ttft["rounds"] == 1
    assert ttft["prompt_tokens"] == PROMPT_TOKENS


def test_speedups_are_stock_prefill_over_the_mode(ttft: dict[str, Any]) -> None:
    assert ttft["speedup"] == pytest.approx(ttft["full_ms"] / ttft["blend_ms"])
    assert ttft["reuse_speedup"] == pytest.approx(ttft["full_ms"] / ttft["reuse_ms"])
    assert ttft["prefix_speedup"] == pytest.approx(ttft["full_ms"] / ttft["prefix_ms"])


def test_the_prefix_baseline_is_the_faster_of_its_two_ways(ttft: dict[str, Any]) -> None:
    faster = min(("prefix_stock", "prefix_fused"), key=lambda name: ttft[f"{name}_ms"])
    assert ttft["prefix_ms"] == ttft[f"{faster}_ms"]
    assert ttft["spread_ms"]["prefix"] == ttft["spread_ms"][faster]


def test_the_charged_ratio_counts_layer_0_and_the_ratio_does_not() -> None:
    ttft = measured("ttft", *SMALL, "--policy", "hkvd")
    assert ttft["ratio"] == pytest.approx(0.15, abs=1 / (CHUNK_TOKENS * (LAYERS - 1)))
    assert ttft["charged_ratio"] == pytest.approx((1 + ttft["ratio"] * (LAYERS - 1)) / LAYERS)
    assert ttft["ratio"] < ttft["charged_ratio"] < 1
    rows = LAYERS * (ttft["charged_ratio"] * CHUNK_TOKENS + PROMPT_TOKENS - CHUNK_TOKENS)
    assert ttft["floor_speedup"] == pytest.approx(LAYERS * PROMPT_TOKENS / rows)


def test_query_charges_no_full_layer_but_its_scout_counts_for_the_floor(
    ttft: dict[str, Any],
) -> None:
    assert ttft["charged_ratio"] == pytest.approx(0.15, abs=1 / CHUNK_TOKENS)
    rows = LAYERS * (ttft["charged_ratio"] * CHUNK_TOKENS + 2 * (PROMPT_TOKENS - CHUNK_TOKENS))
    assert ttft["floor_speedup"] == pytest.approx(LAYERS * PROMPT_TOKENS / rows)


def test_kv_bytes_are_keys_and_values_of_every_chunk_token(ttft: dict[str, Any]) -> None:
    kv_heads, head_dim, bfloat16_bytes = 2, 16, 2
    expected = 2 * LAYERS * kv_heads * CHUNK_TOKENS * head_dim * bfloat16_bytes
    assert ttft["kv_bytes"] == expected


def test_both_prefix_ways_choose_the_token_of_a_stock_prefill(bench: TtftBench) -> None:
    assert bench.prefix_stock() == bench.prefix_fused() == bench.full()


def test_blend_at_ratio_one_chooses_the_token_of_a_stock_prefill(bench: TtftBench) -> None:
    token, counts = bench.blended("blend", "hkvd", 1.0)
    assert token == bench.full()
    assert counts.rows == (PROMPT_TOKENS,) * LAYERS
    assert bench.floor_speedup(counts) == 1.0


def test_blend_recomputes_its_share_and_reuse_nothing(bench: TtftBench) -> None:
    blended = bench.counts()
    assert blended.candidate_rows[0] == blended.candidate_rows[1]
    assert sum(blended.candidate_rows[1:]) == round(0.15 * CHUNK_TOKENS * (LAYERS - 1))
    reused = bench.blended("reuse", "reuse", 0.0)[1]
    assert reused.candidate_rows == (0,) * LAYERS
    assert reused.rows == (PROMPT_TOKENS - CHUNK_TOKENS,) * LAYERS


# -- the compiled row ---------------------------------------------------------------------------


def test_a_compiled_stock_prefill_is_a_row_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []

    def compile_(forward: Any, **options: Any) -> Any:
        compiled.append(options)
        return forward

    monkeypatch.setattr(torch, "compile", compile_)
    assert measured("ttft", *SMALL)["full_compiled_ms"] is None
    assert compiled == []
    fields = measured("ttft", *SMALL, "--compiled")
    assert compiled == [{"dynamic": False}]
    assert fields["full_compiled_ms"] > 0
    assert fields["compile_s"] > 0
    assert fields["notes"] == []
    assert {"full", "full_compiled"} <= fields["spread_ms"].keys()
    assert fields["speedup"] == pytest.approx(fields["full_ms"] / fields["blend_ms"])


def test_where_no_compiler_works_the_row_is_left_out_with_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def compile_(forward: Any, **options: Any) -> Any:
        def broken(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("no C++ compiler found\nwith a long trace")

        return broken

    monkeypatch.setattr(torch, "compile", compile_)
    fields = measured("ttft", *SMALL, "--compiled")
    assert fields["full_compiled_ms"] is None
    assert "full_compiled" not in fields["spread_ms"]
    (note,) = fields["notes"]
    assert "no C++ compiler found" in note
    assert "\n" not in note
    assert len(note) < 400
