"""One blended forward: which rows of the prompt each layer computes, in the phases of :class:`Fusion`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from blendrag.fusor.fusion import Fusion, Phase
from blendrag.fusor.rows import Rows
from blendrag.fusor.scout import Scout, scouting
from blendrag.model.adapter import KVComplete
from blendrag.model.structure import DecoderStack

Among = torch.Tensor | None
"""Indices of rows among those that arrive at a layer; ``None``: all of them."""
RunLayer = Callable[[Rows, Among], None]
"""Runs the layer on rows until its K/V exist."""


class ScoutEnded(Exception):
    """Ends a scout pass behind the last layer that counts. Never leaves the fusor."""


class BlendedForward:
    """The forward of one prompt, and the phase it is in."""

    def __init__(self, fusion: Fusion, last_row_only: bool) -> None:
        """``last_row_only``: the last layer returns only the output of the prompt's last token."""
        self.fusion = fusion
        self.phase = Phase.BLEND
        self._last_row_only = last_row_only
        self._scout: Scout | None = None

    @contextmanager
    def scout_pass(self, stack: DecoderStack) -> Iterator[None]:
        """A forward within computes the fresh tokens, then the policy chooses by what they attend to."""
        fusion, self.phase = self.fusion, Phase.SCOUT
        if fusion.timeline is not None:
            fusion.timeline.pass_name = "scout"
        self._scout = scout = fusion.begin_scout()
        try:
            with scouting(stack, scout), suppress(ScoutEnded):
                yield
        finally:
            self.phase = Phase.BLEND
            if fusion.timeline is not None:
                fusion.timeline.pass_name = ""
        fusion.end_scout(scout)

    def enter_layer(self, layer: int, run: RunLayer) -> tuple[Rows, Among]:
        """Rows of ``layer``; ``run`` runs it before that, if its K/V are needed first."""
        fusion, layers = self.fusion, len(self.fusion.cache.layers)
        if self.phase is Phase.SCOUT:
            assert self._scout is not None
            if self._scout.ends_before(layer):
                raise ScoutEnded
        elif fusion.needs_peek(layer):
            self._run_to_kv(Phase.PEEK, run, fusion.rows, None)
            fusion.end_peek()
        if layer >= layers:  # attends to KV of an earlier layer, and computes none
            return fusion.rows, None
        rows, among = fusion.enter_layer(self.phase, layer)
        is_last = layer == layers - 1  # of those with KV
        if is_last and self._last_row_only and self.phase is Phase.BLEND:
            self._run_to_kv(Phase.LAST_KV, run, rows, among)
            self.phase = Phase.LAST_ROW
            rows = fusion.keep_last_row()
            among = rows.positions.new_full((1,), -1)  # no transfer to the device
        return rows, among

    def _run_to_kv(self, phase: Phase, run: RunLayer, rows: Rows, among: Among) -> None:
        before, self.phase = self.phase, phase
        with suppress(KVComplete):
            run(rows, among)
        self.phase = before

    def merge(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take fresh K/V ``[1, Hkv, S, D]`` of a layer's rows; returns the K and V to attend to: views of
        the prompt's buffers ``[1, Hkv, N, D]``."""
        fusion = self.fusion
        fusion.take_kv(self.phase, layer, keys[0], values[0])
        if self.phase in (Phase.PEEK, Phase.LAST_KV):
            raise KVComplete
        cache = fusion.cache
        buffer = cache.layers[layer].buffer[..., : fusion.prompt_tokens, :]  # [2, 1, Hkv, N, D]
        return cache.shapes[layer].split(buffer)
