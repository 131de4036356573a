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
from blendrag.serving import scheduler
from blendrag_lab.bench.geometry import TimedModel
from blendrag_lab.bench.rounds import silent
from blendrag_lab.bench.tiers import ON_DISK, BenchTier
from blendrag_lab.bench.workload import PromptBench, Workload, prompt_bench
from cli.commands import invoke

#: Layers of the tiny geometry.
LAYERS = 4
#: Two chunks of 32 tokens and a question of 8.
SMALL = (
    "--geometry", "tiny", "--chunks", "2", "--chunk-tokens", "32", "--question-tokens", "8",
    "--rounds", "1",
)  # fmt: skip
COMMANDS = {
    "ttft": ("ttft", *SMALL, "--dtype", "bfloat16"),
    "attention": (
        "attention", "--geometry", "tiny", "--requests", "1,3", "--tokens", "80", "--shared", "0,1",
        "--chunk-tokens", "32", "--own-tokens", "8", "--ratio", "0.25", "--rounds", "1",
    ),
    "overhead": (
        "overhead", "--chunks", "3", "--chunk-tokens", "8", "--policies", "reuse", "--rounds", "1",
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
