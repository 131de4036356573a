"""Time to first token: the figures and the baselines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from blendrag_lab.bench.geometry import TimedModel, random_model
from blendrag_lab.bench.ttft import CachedPrefix, ttft, ttft_table
from blendrag_lab.bench.workload import PromptBench, Workload
from lab.tests.bench.small import LAYERS, no_peak_bytes, printed, tiny_bench

MODES = {"full", "prefix_stock", "prefix_fused", "reuse", "blend"}
CHUNK_TOKENS, PROMPT_TOKENS = 64, 72
WORKLOAD = Workload(2, 32, 8, 0.15, rounds=1)


@pytest.fixture(scope="module")
def bench() -> Iterator[PromptBench]:
    with tiny_bench(WORKLOAD) as bench:
        yield bench


def test_figures_follow_from_the_times_and_rows_of_all_modes():
    figures = printed("ttft")
    assert figures["peak_bytes"].keys() == figures["ms"].keys() == MODES
    assert all(timing["low"] > 0 for timing in figures["ms"].values())
    assert (figures["rounds"], figures["prompt_tokens"]) == (1, PROMPT_TOKENS)
    speedup = figures["ms"]["full"]["median"] / figures["ms"]["blend"]["median"]
    assert figures["speedup"] == pytest.approx(speedup)
    assert (
        figures["kv_bytes"] == 2 * LAYERS * 2 * CHUNK_TOKENS * 16 * 2
    )  # KV heads, width, bfloat16
    assert figures["charged_ratio"] == pytest.approx(0.15, abs=1 / CHUNK_TOKENS)
    fresh = 2 * (PROMPT_TOKENS - CHUNK_TOKENS)  # the scout pass computes the question too
    rows = LAYERS * (figures["charged_ratio"] * CHUNK_TOKENS + fresh)
    assert figures["floor_speedup"] == pytest.approx(LAYERS * PROMPT_TOKENS / rows)


def test_ways_that_compute_everything_choose_the_token_of_stock_prefill(bench):
    prefix = CachedPrefix(bench)
    assert prefix.stock() == prefix.fused() == bench.full()
    token, fusion = bench.blend(policy="hkvd", ratio=1.0)
    assert token == bench.full()
    assert fusion.counts().rows == (PROMPT_TOKENS,) * LAYERS


@torch.inference_mode()
def test_models_loaded_in_inference_mode_have_ordinary_parameters():
    """Prefill over parameters made in inference mode is a third slower, which would favour blending."""
    made = (TimedModel("tiny").adapter, TimedModel(model="demo").adapter)
    assert not any(p.is_inference() for adapter in made for p in adapter.model.parameters())


def test_a_hybrid_is_timed_with_runs_of_its_chunks(monkeypatch):
    monkeypatch.setattr("blendrag_lab.bench.ttft.peak_bytes", no_peak_bytes)
    hybrid = TimedModel("tiny-hybrid", None, "float32", "cpu")
    found = ttft(hybrid, replace(WORKLOAD, ratio=0.5, encoding="int8"))
    layout = hybrid.adapter.layout
    assert found.ms.keys() == MODES - {"prefix_fused"}
    assert (found.policy, found.ratio, found.charged_ratio) == ("query", 0.5, 0.5)
    assert found.floor_speedup == PROMPT_TOKENS / (CHUNK_TOKENS / 2 + 2 * 8)
    assert found.state_bytes == 2 * layout.size_bytes(0) > 0
    assert found.kv_bytes - found.state_bytes < CHUNK_TOKENS * layout.token_bytes  # int8 and scales
    assert "MB of running states" in ttft_table(found).title


def test_a_hybrid_geometry_is_that_of_its_model():
    made = random_model("qwen3.5-0.8b", torch.bfloat16, torch.device("meta"))
    kinds = made.config.layer_types
    assert (kinds.count("linear_attention"), kinds.count("full_attention")) == (18, 6)
    assert sum(p.numel() for p in made.parameters()) == pytest.approx(0.75e9, rel=0.01)
