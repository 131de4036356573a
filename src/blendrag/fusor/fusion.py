"""One prompt's state within a blended forward: selective recompute over loaded chunk KV (CacheBlend §4).

A :class:`~blendrag.fusor.pack.Pack` drives it, layer by layer:

1. :meth:`Fusion.enter_layer` says which rows the layer computes,
2. :meth:`Fusion.take_kv` gets their fresh K/V, waits until the layer's stored KV is in place, lets the policy
   choose the next layer's tokens from fresh against loaded KV, and scatters the fresh K/V into the loaded
   ones. If the policy ranks tokens once, all rows are planned before layer 0 and nothing is chosen here.

Two layers may be run twice, the first time only until their K/V exist. At layer 1 a policy that needs
deviations *peeks*: all rows of layer 0 get K/V, so only QKV projections are paid. These K/V are exact and are
kept. In the last layer only the K/V of all rows are needed, and the output of the last token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum

import torch

from blendrag.fusor.cache import BlendCache
from blendrag.fusor.loader import LoadedSpan, StoredKV
from blendrag.fusor.request import BlendRequest, FusionCounts, TokenSelector
from blendrag.fusor.rows import LayerRows, PromptRows, Rows
from blendrag.fusor.scout import Scout
from blendrag.fusor.selection import SelectionPolicy
from blendrag.fusor.shift import ChunkShift
from blendrag.metrics import REPOSITION, SELECT, Timeline, noted
from blendrag.model.positions import Repositioner


class Phase(Enum):
    """What the forward is doing in the layer that it is in."""

    SCOUT = "fresh tokens over stored KV, to observe the question's attention"
    PEEK = "K/V of layer 1 for all candidates"
    BLEND = "the selected rows"
    LAST_KV = "K/V of the last layer's rows"
    LAST_ROW = "the last layer for the prompt's last token"


class Fusion:
    def __init__(
        self,
        request: BlendRequest,
        cache: BlendCache,
        repositioner: Repositioner,
        force_masks: bool = False,
        timeline: Timeline | None = None,
        check: Callable[[], None] | None = None,
        kept_heads: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        """``check()`` is called before each layer and raises to abandon the prompt. ``kept_heads``: by layer,
        the heads ``[n]`` whose stored keys a policy does not move."""
        self.request = request
        self.prompt_tokens = request.prompt_tokens
        self.cache = cache
        self.timeline = timeline
        self.check = check or (lambda: None)
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
        self._repositioner, self._kept_heads = repositioner, kept_heads or {}
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

    def begin_scout(self) -> Scout:
        """Observes the scout pass that follows."""
        return self._selector.new_scout(self.rows)

    def end_scout(self, scout: Scout) -> None:
        """Choose what layer 0 computes by the attention that ``scout`` observed."""
        self._scouted = [self.rows.count] * scout.layers
        self.cache.show(0)
        self._selector.use(scout)
        self._choose_entry()

    def _choose_entry(self) -> None:
        """Choose the rows of layer 0, and of every layer if the policy ranks tokens once."""
        self._plan = self._selector.plan(self._prompt, self._force_masks)
        if self._plan:
            self._chosen, self.rows = self._plan[0].chosen, self._plan[0].rows
            if (probes := self._selector.probes).numel():
                geometry, repositioner = self._selector.geometry, self._repositioner
                self._shift = ChunkShift(geometry, probes, repositioner, self._kept_heads)
        else:
            self._set_rows(self._selector.entry())

    def _set_rows(self, chosen: torch.Tensor) -> None:
        self._chosen = chosen
        self.rows = self._next_rows = self._rows_of(chosen)

    def _rows_of(self, chosen: torch.Tensor) -> Rows:
        positions = torch.cat((self._selector.always, chosen)).sort().values
        return Rows(positions, self._prompt, self._force_masks)

    # -- before a layer -----------------------------------------------------------------------

    def enter_layer(self, phase: Phase, layer: int) -> tuple[Rows, torch.Tensor | None]:
        """Rows of ``layer`` and their indices among the rows that arrive (``None``: all of them)."""
        if phase is Phase.SCOUT:
            return self.rows, self.rows.positions if layer == 0 else None
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

    def needs_peek(self, layer: int) -> bool:
        """Whether K/V of ``layer`` are needed for all rows that arrive before it is entered."""
        return layer == 1 and self._selector.needs_peek

    def end_peek(self) -> None:
        """Choose the tokens of layer 1 by the K/V of the peek."""
        assert self._peeked is not None
        self._choose(1, *self._peeked[1:], seen=1)

    def keep_last_row(self) -> Rows:
        """The row of the last token, the only one that goes on after the last layer's K/V are in place."""
        last = self.rows.positions[-1:]
        self.rows = Rows(last, self._prompt, self._force_masks, is_last=True)
        return self.rows

    # -- inside a layer -----------------------------------------------------------------------

    def take_kv(self, phase: Phase, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Choose by the rows' fresh ``keys``/``values`` ``[Hkv, S, D]``, scatter them into the loaded."""
        self._stored.place(layer)
        if phase is Phase.PEEK:
            self._peeked = (self.rows, keys, values)
            return
        rows = self.rows
        if phase in (Phase.BLEND, Phase.LAST_KV):
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
