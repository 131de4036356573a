"""Which prompts are prefilled together: those that share out weights, and fit into memory.

A layer reads its weights once, however many rows it computes. While rows are few that is most of what it
takes, and prompts that share a forward share it; once a layer computes as fast as the machine can, a
second prompt takes as long as the first and only keeps it waiting. Where that turns is read off the
profile of the machine if there is one, else assumed by the kind of device.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from blendrag.model.adapter import ModelAdapter
from blendrag.planning.plan import Plan
from blendrag.planning.profile import Profile

#: Rows a layer computes for all prompts together, where nothing was measured. On a CPU with bf16 arithmetic
#: and a 0.5B geometry one forward over 560 rows took 0.72 of two over half of them, and one over 720 rows
#: 0.89 (docs/performance.md, "Several prompts at once"). Of GPUs it is assumed, not measured.
ROWS = {"cpu": 640, "cuda": 4096}
#: Share of the time of two forwards that one for both may take, where it was measured.
WORTHWHILE = 0.9
#: Activations of a row while a layer is computed, in hidden states: a gated MLP holds the most.
ROW_STATES = 16


@dataclass(frozen=True)
class Load:
    """What one prompt brings into a forward."""

    rows: float
    """Per layer, in the mean; a scout pass counts beside."""
    size_bytes: int
    """KV of prompt and answer, and activations of the layer with most rows."""
    files: int = 0
    """Stored parts that are read, each a file that stays open meanwhile."""

    @classmethod
    def of(cls, plan: Plan, new_tokens: int, adapter: ModelAdapter) -> Load:
        """What a planned request brings."""
        rows = _rows_by_layer(plan, len(adapter.layout.layers))
        tokens = len(plan.prompt.ids) + new_tokens + 1
        width = adapter.layout.torch_dtype.itemsize
        kv = sum(2 * layer.kv_heads * layer.head_dim for layer in adapter.layout.layers)
        hidden = int(adapter.stack.config.hidden_size)
        activations = max(rows) * hidden * ROW_STATES
        size_bytes = int((tokens * kv + activations) * width)
        return cls(sum(rows) / len(rows), size_bytes, len(plan.spans))


def _half_of_all_files() -> int:
    """Half of what the process may have open; stored KV that cannot be opened would be computed."""
    allowed = os.sysconf("SC_OPEN_MAX")
    return allowed // 2 if allowed > 0 else 1 << 20  # -1: as many as there is memory for


@dataclass(frozen=True)
class PackingRule:
    """How much goes into one forward."""

    device: torch.device
    limit_bytes: int
    limit_files: int = field(default_factory=_half_of_all_files)

    def admits(self, packed: Sequence[Load], load: Load, profile: Profile | None) -> bool:
        """Whether ``load`` should go with those that are ``packed``."""
        together = sum(one.size_bytes for one in packed) + load.size_bytes
        if together > self.limit_bytes:
            return False
        if sum(one.files for one in packed) + load.files > self.limit_files:
            return False
        rows = sum(one.rows for one in packed)
        if profile is None:
            return rows + load.rows <= ROWS.get(self.device.type, ROWS["cpu"])
        apart = profile.layer.base(rows) + profile.layer.base(load.rows)
        return profile.layer.base(rows + load.rows) <= WORTHWHILE * apart


def _rows_by_layer(plan: Plan, layers: int) -> list[float]:
    """Rows computed in each layer, those of a scout pass included."""
    spans = plan.spans
    blended = [span for span in spans if not span.exact]
    candidates = sum(span.tokens for span in blended)
    fresh = len(plan.prompt.ids) - sum(span.tokens for span in spans)
    if not candidates:
        return [float(fresh)] * layers
    policy = plan.policy
    counts = policy.layer_counts(plan.schedule, plan.ratio, candidates, layers, len(blended))
    entry = candidates if policy.needs_deviation or not counts else counts[0]
    scouted = policy.attention_layers(layers)
    return [
        fresh * (1 + (layer < scouted.stop)) + count for layer, count in enumerate((entry, *counts))
    ]
