"""``blendrag bench`` in this process, at sizes that take almost no time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch

from blendrag.model import ModelAdapter
from blendrag.planning.profile import Curve, Profile, Tier, conditions_of
from blendrag.serving import scheduler
from blendrag_lab.bench import auto
from blendrag_lab.bench.geometry import TimedModel
from blendrag_lab.bench.rounds import silent
from blendrag_lab.bench.tiers import ON_DISK, BenchTier
from blendrag_lab.bench.workload import PromptBench, Workload, prompt_bench
from cli.commands import invoke

#: Shape of the tiny geometry.
LAYERS = 4
#: Two chunks of 32 tokens and a question of 8.
PROMPT = ("--geometry", "tiny", "--chunks", "2", "--chunk-tokens", "32", "--question-tokens", "8")
SMALL = (*PROMPT, "--rounds", "1")
COMMANDS = {
    "ttft": ("ttft", *SMALL, "--dtype", "bfloat16"),
    "sweep-tier": ("sweep", *SMALL, "--dtype", "bfloat16", "--factor", "tier", "--values", "memory,disk"),
    "trace": ("trace", *SMALL, "--policy", "query"),
    "throughput": ("throughput", *SMALL, "--batch-size", "1,3"),
    "load": (
        "load", *PROMPT, "--requests", "3", "--warm-requests", "1", "--corpus-chunks", "5",
        "--store-chunks", "4",
    ),
    "auto": ("auto", *SMALL, "--policy", "random", "--tiers", "memory,disk", "--ratios", "0.5,0.15,1"),
    "attention": (
        "attention", "--geometry", "tiny", "--requests", "1,3", "--tokens", "80", "--shared", "0,1",
        "--chunk-tokens", "32", "--own-tokens", "8", "--ratio", "0.25", "--rounds", "1",
    ),
    "overhead": (
        "overhead", "--chunks", "3,9", "--chunk-tokens", "8", "--policies", "reuse,query", "--rounds", "1",
    ),
}  # fmt: skip


def joint_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets the number of requests of each step of several."""
    sizes: list[int] = []
    stock = scheduler.decoded_together

    def counted(steps: Any, pool: Any) -> Any:
        if len(steps) > 1:
            sizes.append(len(steps))
        return stock(steps, pool)

    monkeypatch.setattr(scheduler, "decoded_together", counted)
    return sizes


def measured(*args: str) -> dict[str, Any]:
    """What ``blendrag bench … --json`` prints."""
    result = invoke("bench", *args, "--json")
    assert result.exit_code == 0, result.stderr
    fields: dict[str, Any] = json.loads(result.stdout)
    return fields


def no_peak_bytes(work: object, device: object) -> int:
    """Instead of ``peak_bytes``, which collects garbage for seconds."""
    return 0


@cache
def printed(name: str) -> dict[str, Any]:
    """The JSON of one of :data:`COMMANDS`, measured once. Tests must not change it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "measure_profile", invented_profile)
        patch.setattr("blendrag_lab.bench.ttft.peak_bytes", no_peak_bytes)
        return measured(*COMMANDS[name])


@cache
def tiny_adapter() -> ModelAdapter:
    """The tiny geometry in float32. Larger weights make the chosen tokens depend on the prompt."""
    made = TimedModel("tiny", None, "float32", "cpu").adapter
    torch.manual_seed(1)
    with torch.no_grad():
        for layer in made.model.model.layers:
            for weight in layer.parameters():
                weight.mul_(5.0 if weight.ndim == 2 else 1.0)
        made.model.lm_head.weight = torch.nn.Parameter(torch.randn_like(made.model.lm_head.weight))
    return made


def timed(adapter: ModelAdapter | None = None) -> TimedModel:
    """The options of a bench whose model is ``adapter``, by default the tiny one."""
    made = TimedModel("tiny")
    vars(made)["adapter"] = adapter or tiny_adapter()
    return made


@contextmanager
def tiny_bench(workload: Workload, tier: BenchTier = ON_DISK) -> Iterator[PromptBench]:
    """A prompt for the tiny model."""
    with prompt_bench(timed(), workload, tier, silent) as bench, torch.inference_mode():
        yield bench


def invented_profile(bench: PromptBench, tick: object = None, row_s: float = 1e-6) -> Profile:
    """A fast disk, and a microsecond per row and layer."""

    def line(row_s: float) -> Curve:
        return Curve((1.0, 4096.0), (row_s, 4096 * row_s), row_s)

    adapter = bench.adapter
    return Profile(
        conditions=conditions_of(adapter, adapter.identity.namespace),
        prefill=line(LAYERS * row_s), layer=line(row_s), last=line(row_s), scout=line(row_s),
        peek_s=0.0, fixed_s=0.0,
        tiers=(Tier("disk", 1e12, busy=1.0), Tier("memory", 1e12)),
        device_bytes_per_s=None, is_shared=False, chunk_tokens=32,
        layer_bytes=tuple(adapter.layout.layer_bytes(i, 32) for i in range(LAYERS)),
        took_s=1.0,
    )  # fmt: skip
