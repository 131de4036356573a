"""Which prompts are prefilled together: as many as are faster in one forward and fit into memory.

A layer reads its weights once per forward. With few rows that is most of its time, so prompts share it;
with many rows a second prompt takes as long as the first. The machine profile says where that changes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from blendrag.model.adapter import ModelAdapter
from blendrag.planning.plan import Plan
from blendrag.planning.profile import Profile

#: Most rows of a layer without a profile. On a CPU with bf16 arithmetic and a 0.5B geometry one forward over
#: 560 rows took 0.72 of the time of two over half of them, and one over 720 rows 0.89. Assumed for GPUs.
ROWS = {"cpu": 640, "cuda": 4096}
#: Share of the time of two forwards that one for both may take, with a profile.
WORTHWHILE = 0.9
#: Activations of a row while a layer is computed, in hidden states: a gated MLP holds the most.
ROW_STATES = 16


@dataclass(frozen=True)
class Load:
    """What one prompt brings into a forward."""

    rows: float
    """Mean per layer, the scout pass included."""
    size_bytes: int
    """KV of prompt and answer, and activations of the layer with most rows."""
    files: int = 0
    """Stored parts that are read, each an open file."""

    @classmethod
    def of(cls, plan: Plan, new_tokens: int, adapter: ModelAdapter) -> Load:
        layout = adapter.layout
        rows = _rows_by_layer(plan, len(layout.layers))
        tokens = len(plan.prompt.ids) + new_tokens + 1
        activations = max(rows) * int(adapter.stack.config.hidden_size) * ROW_STATES
        size_bytes = layout.size_bytes(tokens) + int(activations * layout.torch_dtype.itemsize)
        return cls(sum(rows) / len(rows), size_bytes, len(plan.spans))


def _half_of_all_files() -> int:
    """Half of what the process may open: KV whose file cannot be opened would be computed."""
    allowed = os.sysconf("SC_OPEN_MAX")
    return allowed // 2 if allowed > 0 else 1 << 20  # -1: no limit


@dataclass(frozen=True)
class PackingRule:
    device: torch.device
    limit_bytes: int
    profile: Profile | None = None
    limit_files: int = field(default_factory=_half_of_all_files)

    def admits(self, packed: Sequence[Load], load: Load) -> bool:
        """Whether ``load`` should be prefilled with those that are ``packed``."""
        size_bytes = sum(one.size_bytes for one in (*packed, load))
        files = sum(one.files for one in (*packed, load))
        if size_bytes > self.limit_bytes or files > self.limit_files:
            return False
        rows, profile = sum(one.rows for one in packed), self.profile
        if profile is None:
            return rows + load.rows <= ROWS.get(self.device.type, ROWS["cpu"])
        apart = profile.layer.base(rows) + profile.layer.base(load.rows)
        return profile.layer.base(rows + load.rows) <= WORTHWHILE * apart


def _rows_by_layer(plan: Plan, layers: int) -> list[float]:
    """Rows computed in each layer, the scout pass included."""
    blended = [span.tokens for span in plan.spans if not span.exact]
    candidates, fresh = sum(blended), len(plan.prompt.ids) - plan.reused_tokens
    if not candidates:
        return [float(fresh)] * layers
    policy = plan.blending.policy
    counts = plan.blending.layer_counts(candidates, layers, len(blended))
    entry = candidates if policy.needs_deviation or not counts else counts[0]
    scouted = policy.attention_layers(layers).stop
    return [fresh * (1 + (i < scouted)) + count for i, count in enumerate((entry, *counts))]
