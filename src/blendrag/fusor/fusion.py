"""One prompt's blended forward: selective recompute over loaded chunk KV (CacheBlend §4).

Hooks on the model's layers drive it, layer by layer:

1. :meth:`Fusion.enter_layer` says which rows the layer computes,
2. :meth:`Fusion.merge` gets their fresh K/V, waits until the layer's stored KV is in place, lets the policy
   choose the next layer's tokens from fresh against loaded KV, and scatters the fresh K/V into the loaded
   ones. If the policy ranks tokens once, all rows are planned before layer 0 and nothing is chosen here.

Two layers may be run twice, the first time only until their K/V exist. At layer 1 a policy that needs
deviations *peeks*: all rows of layer 0 get K/V, so only QKV projections are paid. These K/V are exact and are
kept. In the last layer only the K/V of all rows are needed, and the output of the last token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum

import torch

from blendrag.fusor.cache import BlendCache
from blendrag.fusor.loader import LoadedSpan, StoredKV
from blendrag.fusor.request import BlendRequest, FusionCounts, TokenSelector
from blendrag.fusor.rows import LayerRows, PromptRows, Rows
from blendrag.fusor.scout import Scout, scouting
from blendrag.fusor.selection import SelectionPolicy
from blendrag.fusor.shift import ChunkShift
from blendrag.metrics import REPOSITION, SELECT, Timeline, noted
from blendrag.model.adapter import KVComplete
from blendrag.model.positions import Repositioner
from blendrag.model.structure import DecoderStack

Among = torch.Tensor | None
"""Indices of rows among those that arrive at a layer; ``None``: all of them."""
RunLayer = Callable[[Rows, Among], None]
"""Runs the layer on rows until its K/V exist."""


class Phase(Enum):
    """What the forward is doing in the layer that it is in."""

    SCOUT = "fresh tokens over stored KV, to observe the question's attention"
    PEEK = "K/V of layer 1 for all candidates"
    BLEND = "the selected rows"
    LAST_KV = "K/V of the last layer's rows"
    LAST_ROW = "the last layer for the prompt's last token"


class ScoutEnded(Exception):
    """Ends a scout pass behind the last layer that counts. Never leaves the fusor."""


class Fusion:
    def __init__(
        self,
        request: BlendRequest,
        cache: BlendCache,
        repositioner: Repositioner,
        force_masks: bool = False,
        timeline: Timeline | None = None,
        check: Callable[[], None] | None = None,
        last_row_only: bool = False,
    ) -> None:
        """``check()`` is called before each layer and raises to abandon the prompt. ``last_row_only``: the
        last layer returns only the output of the prompt's last token."""
        self.request = request
        self.prompt_tokens = request.prompt_tokens
        self.cache = cache
        self.timeline = timeline
        self.check = check or (lambda: None)
        self.phase = Phase.BLEND
        self._scout: Scout | None = None
        self._last_row_only = last_row_only
        self._force_masks = force_masks
        self._buffers = cache.buffers(request.prompt_tokens)
        device = self._buffers[0].device
        self._selector = TokenSelector(request, len(self._buffers), device)
        self.schedule = self._selector.schedule
        self._prompt = PromptRows(request.prompt_tokens, device)
        self._plan: list[LayerRows] = []
        """The rows of all layers, if they are known before layer 0."""
        self.recomputed: list[torch.Tensor] = []
        """Positions ``[n]`` of the chunk tokens computed in each layer so far, ascending."""
        self._row_counts: list[int] = []
        self._scouted: list[int] = []
        self._peeked: tuple[Rows, torch.Tensor, torch.Tensor] | None = None
        self._repositioner = repositioner
        self._shift: ChunkShift | None = None
        candidates = self._selector.candidates
        if self.needs_scout:
            self._set_rows(candidates[:0])
        else:
            self._choose_entry()
        all_enter = self._chosen.numel() == candidates.numel()
        groups = cache.groups(request.prompt_tokens)
        self._stored = StoredKV(
            request.spans, groups, cache.shapes, repositioner, all_enter, timeline
        )
        self.loader = self._stored.loader

    @property
    def spans(self) -> Sequence[LoadedSpan]:
        """What was loaded and is in the cache as it is stored, but for the recomputed tokens."""
        spans = self.request.spans
        return spans if self._shift is None else [span for span in spans if span.exact]

    @property
    def policy(self) -> SelectionPolicy:
        """The request's, or its fallback if a scout pass observed no attention."""
        return self._selector.policy

    def counts(self) -> FusionCounts:
        """What was computed; call after the forward."""
        return FusionCounts.of(self.request, self.recomputed, self._row_counts, self._scouted)

    def close(self) -> None:
        """Stop loading and end the cache's fusion; blocks until the buffers are left alone. Idempotent."""
        self._stored.close()
        self._buffers = []  # the cache may outgrow them
        self.cache.end_fusion()

    # -- before the blended pass --------------------------------------------------------------

    @property
    def needs_scout(self) -> bool:
        return self._selector.needs_scout

    @contextmanager
    def scout_pass(self, stack: DecoderStack) -> Iterator[None]:
        """A forward within computes the fresh tokens, then layer 0's are chosen by what they attend to."""
        self.phase = Phase.SCOUT
        if self.timeline is not None:
            self.timeline.pass_name = "scout"
        self._scout = scout = self._selector.new_scout(self.rows)
        try:
            with scouting(stack, scout), suppress(ScoutEnded):
                yield
        finally:
            self.phase = Phase.BLEND
            if self.timeline is not None:
                self.timeline.pass_name = ""
        self._scouted = [self.rows.count] * scout.layers
        self.cache.show(0)
        self._selector.use(scout)
        self._choose_entry()

    def _choose_entry(self) -> None:
        """Choose the rows of layer 0, and of every layer if the policy ranks tokens once."""
        self._plan = self._selector.plan(self._prompt, self._force_masks)
        if self._plan:
            self._chosen, self.rows = self._plan[0].chosen, self._plan[0].rows
            if self.policy.shifts_stored and self._chosen.numel():
                geometry, device = self._selector.geometry, self._chosen.device
                self._shift = ChunkShift(geometry, self._repositioner, device)
        else:
            self._set_rows(self._selector.entry())

    def _set_rows(self, chosen: torch.Tensor) -> None:
        self._chosen = chosen
        self.rows = self._next_rows = self._rows_of(chosen)

    def _rows_of(self, chosen: torch.Tensor) -> Rows:
        positions = torch.cat((self._selector.always, chosen)).sort().values
        return Rows(positions, self._prompt, self._force_masks)

    # -- before a layer -----------------------------------------------------------------------

    def enter_layer(self, layer: int, run: RunLayer) -> tuple[Rows, Among]:
        """Rows of ``layer``; ``run`` runs it before that, if its K/V are needed first."""
        layers = len(self.cache.layers)
        if self.phase is Phase.SCOUT:
            assert self._scout is not None
            if self._scout.ends_before(layer):
                raise ScoutEnded
        elif layer == 1 and self._selector.needs_peek:
            self._run_to_kv(Phase.PEEK, run, self.rows, None)
            assert self._peeked is not None
            self._choose(1, *self._peeked[1:], seen=1)
        if layer >= layers:  # attends to KV of an earlier layer, and computes none
            return self.rows, None
        if self.phase is Phase.SCOUT:
            return self.rows, self.rows.positions if layer == 0 else None
        rows, among = self._rows_of_layer(layer)
        if layer == layers - 1 and self._last_row_only:  # the last of those with KV
            self._run_to_kv(Phase.LAST_KV, run, rows, among)
            self.phase = Phase.LAST_ROW
            last = rows.positions[-1:]
            self.rows = Rows(last, self._prompt, self._force_masks, is_last=True)
            return self.rows, last.new_full((1,), -1)  # no transfer to the device
        return rows, among

    def _rows_of_layer(self, layer: int) -> tuple[Rows, Among]:
        """Rows of ``layer`` in the blended pass, and their indices among the rows that arrive."""
        arriving = self.rows
        if self._plan:
            self.rows, among, self._chosen = self._plan[layer]
        elif layer > 0:
            self.rows = self._next_rows
        self.recomputed.append(self._chosen)
        self._row_counts.append(self.rows.count)
        if layer == 0:
            return self.rows, self.rows.at
        if self.rows is arriving:
            return self.rows, None
        if not self._plan:
            among = torch.searchsorted(arriving.positions, self.rows.positions)
        return self.rows, among

    def _run_to_kv(self, phase: Phase, run: RunLayer, rows: Rows, among: Among) -> None:
        before, self.phase = self.phase, phase
        with suppress(KVComplete):
            run(rows, among)
        self.phase = before

    # -- inside a layer -----------------------------------------------------------------------

    def merge(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose by fresh K/V ``[1, Hkv, S, D]`` of a layer's rows and scatter them into the loaded; returns
        the K and V to attend to: views of the prompt's buffers ``[1, Hkv, N, D]``."""
        self._stored.place(layer)
        if self.phase is Phase.PEEK:
            self._peeked = (self.rows, keys[0], values[0])
            raise KVComplete
        self._scatter(layer, keys[0], values[0])
        if self.phase is Phase.LAST_KV:
            raise KVComplete
        buffer = self.cache.layers[layer].buffer[..., : self.prompt_tokens, :]  # [2, 1, Hkv, N, D]
        return self.cache.shapes[layer].split(buffer)

    def _scatter(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        rows = self.rows
        if self.phase in (Phase.BLEND, Phase.LAST_KV):
            peeks_next = layer == 0 and self._selector.needs_peek
            if layer + 1 < len(self._buffers) and not self._plan and not peeks_next:
                self._choose(layer + 1, keys, values, seen=layer)
            # K and V of layer 0 depend on the token alone
            if self._shift is not None and layer > 0 and self._chosen.numel():
                loaded = self.cache.shapes[layer].split(self._buffers[layer])
                with noted(self.timeline, REPOSITION, layer):
                    self._shift.move_(layer, rows, self._chosen, (keys, values), loaded)
            if self._peeked is not None:  # layer 1: these K/V hold those of its rows
                rows, keys, values = self._peeked
                self._peeked = None
        self.cache.layers[layer].scatter(rows.at, keys, values, self.prompt_tokens)

    def _choose(self, layer: int, keys: torch.Tensor, values: torch.Tensor, seen: int) -> None:
        """Let the policy choose the tokens of ``layer`` by K/V ``[Hkv, S, D]`` of layer ``seen``."""
        loaded_keys, loaded_values = self.cache.shapes[seen].split(self._buffers[seen])
        tokens, computed = self._chosen, self.rows

        def fetch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
            at = torch.searchsorted(computed.positions, tokens)
            return keys[:, at], values[:, at], loaded_keys[:, tokens], loaded_values[:, tokens]

        with noted(self.timeline, SELECT, seen):
            chosen = self._selector.select(layer, tokens, fetch)
        if chosen.numel() != tokens.numel():
            self._chosen = chosen
            self._next_rows = self._rows_of(chosen)
