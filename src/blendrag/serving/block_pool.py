"""KV of many sequences in blocks of 64 tokens (ChunkAttention §3.1).

Adjacent blocks are a *run*: its K and V are one strided view, never copied or gathered. A sequence of n
tokens wastes at most 63 of them. The pool grows slab by slab up to its limit; a slab without used blocks is
returned to the system.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from blendrag.errors import is_out_of_memory
from blendrag.store.kv import KVLayout

BLOCK_TOKENS = 64
#: Smallest slab, unless that is more than a part of the limit, or the limit leaves less.
SLAB_BYTES = 32 << 20
SLAB_PARTS = 8


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


@dataclass(frozen=True, eq=False)
class Slab:
    """Blocks that were allocated together."""

    layers: Sequence[torch.Tensor]
    """``[2, Hkv, 64·blocks, D]`` each."""
    blocks: int
    free: list[tuple[int, int]]
    """First block and length of each free stretch, ascending."""


@dataclass(frozen=True, eq=False)
class Run:
    """Adjacent blocks of a slab."""

    slab: Slab
    first: int
    blocks: int

    def view(self, layer: int, start: int, end: int) -> torch.Tensor:
        """K and V of its tokens ``[start, end)``: ``[2, Hkv, end - start, D]``."""
        return self.slab.layers[layer].narrow(2, self.first * BLOCK_TOKENS + start, end - start)

    def split(self, blocks: int) -> tuple[Run, Run]:
        """Its first ``blocks``, and the rest. It must not be used or freed any more."""
        assert 0 < blocks < self.blocks
        rest = Run(self.slab, self.first + blocks, self.blocks - blocks)
        return Run(self.slab, self.first, blocks), rest


class BlockPool:
    """Blocks for the KV of one model, in at most ``limit_bytes``. Used on one thread."""

    def __init__(
        self, layout: KVLayout, limit_bytes: int, device: torch.device | str = "cpu"
    ) -> None:
        self.layout = layout
        self._device = device
        # without layers only the ids are kept
        self.block_bytes = layout.size_bytes(BLOCK_TOKENS) or 8 * BLOCK_TOKENS
        self.limit_bytes = limit_bytes
        self.other_bytes = 0
        """What of the limit is taken by something else than blocks."""
        self.used = 0
        """Blocks in runs."""
        self.slabs: list[Slab] = []

    @property
    def limit(self) -> int:
        """Most blocks."""
        return max(0, self.limit_bytes - self.other_bytes) // self.block_bytes

    @property
    def size_bytes(self) -> int:
        return sum(slab.blocks for slab in self.slabs) * self.block_bytes

    @property
    def free(self) -> int:
        """Blocks that can still be taken, in runs of any length."""
        return self.limit - self.used

    def take(self, blocks: int) -> Run | None:
        """A run of ``blocks``, or the longest that there is if all are shorter; ``None`` without room."""
        while True:
            stretches = [(n, first, slab) for slab in self.slabs for first, n in slab.free]
            fits = [one for one in stretches if one[0] >= blocks]
            if fits:  # the shortest, so that long ones stay long
                return self._cut(*min(fits, key=lambda one: one[0]), blocks)
            longest = max(stretches, key=lambda one: one[0], default=None)
            if not self._grown(blocks, longest[0] if longest else 0):
                return self._cut(*longest, longest[0]) if longest else None

    def give(self, run: Run) -> None:
        """Free the blocks of ``run``."""
        slab, self.used = run.slab, self.used - run.blocks
        merged: list[tuple[int, int]] = []
        for first, length in sorted([*slab.free, (run.first, run.blocks)]):
            if merged and sum(merged[-1]) == first:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((first, length))
        slab.free[:] = merged
        if merged == [(0, slab.blocks)]:
            self.slabs.remove(slab)

    def _cut(self, length: int, first: int, slab: Slab, blocks: int) -> Run:
        at = slab.free.index((first, length))
        slab.free[at : at + 1] = [(first + blocks, length - blocks)] if length > blocks else []
        self.used += blocks
        return Run(slab, first, blocks)

    def _grown(self, blocks: int, longest: int) -> bool:
        """Whether a slab was added with a run of ``blocks``, or at least one longer than ``longest``."""
        room = self.limit - sum(slab.blocks for slab in self.slabs)
        if min(room, blocks) <= longest:
            return False
        slab_bytes = min(SLAB_BYTES, self.limit_bytes // SLAB_PARTS)
        count = min(room, max(blocks, slab_bytes // self.block_bytes))
        layout, tokens = self.layout, count * BLOCK_TOKENS
        try:
            with torch.inference_mode(False):  # requests write to it in and outside inference mode
                layers = [
                    torch.empty(
                        layout.layer_shape(layer, tokens),
                        dtype=layout.torch_dtype,
                        device=self._device,
                    )
                    for layer in range(len(layout.layers))
                ]
        except RuntimeError as exc:
            if not is_out_of_memory(exc):
                raise
            return False
        self.slabs.append(Slab(layers, count, [(0, count)]))
        return True
