"""Stored KV of a prompt: read into its buffers layer by layer, and turned to its positions.

Owns the loader and the rotation of one prompt. Does not know which tokens are recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from blendrag.fusor.loader import LayerLoader, LoadedSpan
from blendrag.fusor.rotation import Rotation
from blendrag.metrics import REPOSITION, WAIT, Timeline, noted
from blendrag.model.positions import Repositioner


class Placing:
    """Made once per request; each layer is placed once."""

    def __init__(
        self,
        spans: Sequence[LoadedSpan],
        groups: Sequence[torch.Tensor],
        repositioner: Repositioner,
        all_enter: bool,
        timeline: Timeline | None = None,
    ) -> None:
        """``groups`` are ``[layers, 2, Hkv, N, D]`` of consecutive layers. ``all_enter``: every token of
        blended chunks is computed in layer 0, so that loading it there would be thrown away."""
        self._timeline = timeline
        self._all_enter = all_enter
        self._placed = 0
        """Layers in place, from the first on."""
        buffers = [buffer for group in groups for buffer in group]
        self._runs = _runs_of(groups, [self._skips(i) for i in range(len(buffers))], repositioner)
        self._rotation = Rotation(spans, repositioner, buffers[0].device)
        exact = [span for span in spans if span.exact]
        wanted = [exact if self._skips(i) else spans for i in range(len(buffers))]
        self.loader = LayerLoader(buffers, wanted, timeline)

    def place(self, layer: int) -> None:
        """Block until stored KV of ``layer`` is in place, and move its keys; raises what reading met.

        Layers behind it whose KV is there already, and whose keys are moved alike, are placed with it.
        """
        while self._placed <= layer:
            first = end = self._placed
            run = self._runs[first]
            while end == first or (end < run.end and self.loader.is_there(end)):
                with noted(self._timeline, WAIT, end):
                    self.loader.synchronize(end)
                end += 1
            with noted(self._timeline, REPOSITION, first):
                if not self._skips(first):
                    self._rotation.apply(run.keys[first - run.start : end - run.start], first)
            self._placed = end

    def _skips(self, layer: int) -> bool:
        return layer == 0 and self._all_enter


class Run(NamedTuple):
    """Layers ``[start, end)`` whose keys ``[end - start, Hkv, N, D]`` are rotated alike."""

    start: int
    end: int
    keys: torch.Tensor


def _runs_of(
    groups: Sequence[torch.Tensor], skipped: Sequence[bool], repositioner: Repositioner
) -> list[Run]:
    """The run of each layer."""
    runs: list[Run] = []
    for group in groups:
        first = len(runs)
        layers = range(first, first + len(group))

        def kind(layer: int) -> tuple[bool, str, str]:
            return (skipped[layer], repositioner.kinds[layer], repositioner.table_names[layer])

        for _, alike in groupby(layers, key=kind):
            same = list(alike)
            start, end = same[0], same[-1] + 1
            runs += [Run(start, end, group[start - first : end - first, 0])] * len(same)
    return runs
