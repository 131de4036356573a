"""One fusion: selective recompute of a prompt over loaded chunk KV, layer by layer (CacheBlend §4).

Holds the state of a single blended forward, but for what its policy chooses by
(:mod:`blendrag.fusor.choice`). The hooks (:mod:`blendrag.fusor.fusor`) ask it, before each layer, which
rows to run (:meth:`Fusion.enter_layer`); the cache hands it each layer's new K/V (:meth:`Fusion.merge`).
Per layer:

1. wait until the layer's stored KV is in place, rotate its keys to their prompt positions,
2. let the policy choose the next layer's tokens from fresh against loaded KV,
3. scatter the fresh K/V of the computed rows into the loaded ones, hand out the merged views.

Where the policy ranks tokens once, the rows of all layers are planned before layer 0, and 2 is left out.

Before layer 1 a policy that looks at deviations gets a *peek*: the layer is entered with all rows and
left again as soon as its K/V exist, so only its QKV projections are paid. The peeked K/V are exact
(layer 0 was computed in full), so they are kept. CacheBlend's released code computes that whole
layer; the paper leaves it open.

Of the last layer nothing but its K/V goes on, save for the row whose logits are wanted: where that is the
last row alone, all others leave the layer likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from blendrag.fusor.cache import BlendCache
from blendrag.fusor.choice import Choice
from blendrag.fusor.loader import LayerLoader
from blendrag.fusor.packed_rows import AnyRows
from blendrag.fusor.placing import Placing
from blendrag.fusor.request import BlendRequest, FusionCounts, Tally
from blendrag.fusor.rows import LayerRows, PromptRows, Rows
from blendrag.fusor.scout import Scout, Scouted
from blendrag.fusor.selection import SelectionPolicy
from blendrag.metrics import SELECT, Timeline, noted
from blendrag.model.positions import Repositioner

Peek = Callable[[AnyRows, torch.Tensor | None], None]
"""Runs a layer on the rows, at these indices among those that arrive (``None``: all), until its K/V exist."""


class Peeked(Exception):
    """Leaves a decoder layer once its K/V are known; never seen outside a fusion."""


class Fusion:
    """State of one blended forward of one sequence."""

    def __init__(
        self,
        request: BlendRequest,
        cache: BlendCache,
        repositioner: Repositioner,
        force_masks: bool = False,
        timeline: Timeline | None = None,
        last_row_only: bool = False,
    ) -> None:
        """``timeline`` is told what is done when. ``last_row_only``: of what the last layer makes of the
        rows, nobody wants more than the prompt's last token's."""
        self._force_masks = force_masks
        self._last_row_only = last_row_only
        self._only_kv = self._is_over = False
        """In the last layer: whether its K/V are all that is wanted yet, and whether they are in place."""
        self.timeline = timeline
        self.request = request
        self._cache = cache
        groups = cache.groups(request.prompt_tokens)
        self._buffers = [buffer for group in groups for buffer in group]
        self._layers = len(self._buffers)
        device = self._buffers[0].device
        self._choice = Choice(request, self._layers, device)
        self.geometry, self.schedule = self._choice.geometry, self._choice.schedule
        self.scouts = self._choice.needs_attention
        """Whether a forward within :meth:`scouting` must come before the blended one."""
        self._scout: Scout | None = None
        """Of the pass under way."""
        self._prompt = PromptRows(request.prompt_tokens, device)
        self._plan: list[LayerRows] = []
        """The rows of all layers, where they are known before layer 0."""
        candidates = self._choice.candidates
        if self.scouts:
            self._enter(candidates[:0])
        else:
            self._choose_entry()
        all_enter = self._alive.numel() == candidates.numel()
        self._tally = Tally(self._layers)
        self._peeked_kv: tuple[torch.Tensor, torch.Tensor] | None = None
        self._peek_rows: Rows | None = None
        self._peeking = False
        self._placing = Placing(request.spans, groups, repositioner, all_enter, timeline)

    @property
    def prompt_tokens(self) -> int:
        return self.request.prompt_tokens

    @property
    def policy(self) -> SelectionPolicy:
        """The request's, or what it left the choice to once a scout pass saw nothing."""
        return self._choice.policy

    @property
    def loader(self) -> LayerLoader:
        return self._placing.loader

    @property
    def is_scouting(self) -> bool:
        """Whether the forward under way is a scout pass."""
        return self._scout is not None

    def start(self) -> None:
        """Begin to load."""
        self.loader.start()

    def close(self) -> None:
        """Stop loading; blocks until the buffers are left alone. Idempotent."""
        self.loader.close()

    def _choose_entry(self) -> None:
        """What layer 0 computes, and where that can be known, every layer."""
        self._plan = self._choice.plan(self._prompt, self._force_masks)
        if self._plan:
            self._alive, self.rows = self._plan[0].chosen, self._plan[0].rows
        else:
            self._enter(self._choice.entry())

    def _enter(self, chosen: torch.Tensor) -> None:
        self._alive = chosen
        self.rows = self._next_rows = self._rows_of(chosen)

    # -- before the first layer ---------------------------------------------------------------

    @contextmanager
    def scouting(self) -> Iterator[Scout]:
        """A forward within computes the fresh tokens over stored KV; after it the choice is made."""
        if self.timeline is not None:
            self.timeline.pass_name = "scout"
        try:
            scout = self.begin_scouting()
            yield scout
        finally:
            self._scout = None
            if self.timeline is not None:
                self.timeline.pass_name = ""
        self.end_scouting(scout)

    def begin_scouting(self) -> Scout:
        """What the pass that follows reports to."""
        self._scout = self._choice.new_scout(self.rows)
        return self._scout

    def end_scouting(self, scout: Scout) -> None:
        """The pass is over: choose what layer 0 computes by what ``scout`` saw."""
        self._scout = None
        self.scouts, self._tally.scouted_rows = False, (self.rows.count,) * scout.layers
        self._cache.show(0)
        self._choice.hear(scout)
        self._choose_entry()

    # -- before a layer -----------------------------------------------------------------------

    def enter_layer(self, layer: int, peek: Peek) -> tuple[Rows, torch.Tensor | None]:
        """Rows of ``layer`` and their indices among the rows that arrive (``None``: all of them).

        Raises :class:`Scouted` at the end of a scout pass.
        """
        if self._scout is not None and self._scout.ends_before(layer):
            raise Scouted
        if self.peeks_before(layer):
            with suppress(Peeked):
                peek(self.begin_peek(), None)
            self.end_peek()
        rows, indices = self.advance(layer)
        if not self._last_row_only or self.is_scouting or layer < self._layers - 1:
            return rows, indices
        self._only_kv = True
        with suppress(Peeked):
            peek(rows, indices)
        self._only_kv = False
        return self.keep_last(), rows.positions.new_full((1,), -1)

    def advance(self, layer: int) -> tuple[Rows, torch.Tensor | None]:
        """:meth:`enter_layer` after the peek, if there was one."""
        if self.is_scouting:
            return self.rows, self.rows.positions if layer == 0 else None
        arriving = self.rows
        if self._plan:
            self.rows, among, self._alive = self._plan[layer]
        elif layer > 0:
            self.rows = self._next_rows
        self._tally.add(self._alive, self.rows.count)
        if layer == 0:
            return self.rows, None if self.rows.covers_prompt else self.rows.positions
        if self.rows is arriving:
            return self.rows, None
        if not self._plan:
            among = torch.searchsorted(arriving.positions, self.rows.positions)
        return self.rows, among

    def peeks_before(self, layer: int) -> bool:
        """Whether K/V of ``layer`` must be seen for all rows that arrive before it is entered."""
        return layer == 1 and not self.is_scouting and self._choice.peeks

    def begin_peek(self) -> Rows:
        """The rows to peek at: the next :meth:`merge` keeps their K/V and raises :class:`Peeked`."""
        self._peek_rows = self.rows
        self._peeking = True
        return self.rows

    def end_peek(self) -> None:
        """Choose by the K/V that were seen."""
        self._peeking = False
        assert self._peeked_kv is not None
        self._choose(1, *self._peeked_kv, seen=1)

    def keep_last(self) -> Rows:
        """The row that goes on, of the last layer, once K/V of all its rows are in place."""
        self._is_over = True
        last = self.rows.positions[-1:]
        self.rows = Rows(last, self._prompt, self._force_masks, is_last=True)
        return self.rows

    # -- inside a layer -----------------------------------------------------------------------

    def merge(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scatter fresh ``keys``/``values`` ``[1, Hkv, S, D]`` into the loaded; returns all ``N``."""
        self._placing.place(layer)
        if self._peeking:
            self._peeked_kv = (keys[0], values[0])
            raise Peeked
        if self.is_scouting or self._is_over:
            return self._scatter(layer, self.rows, keys[0], values[0])
        if layer + 1 < self._layers and not self._plan and not (layer == 0 and self._choice.peeks):
            self._choose(layer + 1, keys[0], values[0], seen=layer)
        merged = self._scatter(layer, *self._computed(layer, keys[0], values[0]))
        if self._only_kv:
            raise Peeked
        return merged

    def _scatter(
        self, layer: int, rows: Rows, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        at = None if rows.covers_prompt else rows.positions
        return self._cache.layers[layer].scatter(at, keys, values, self.prompt_tokens)

    def _computed(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[Rows, torch.Tensor, torch.Tensor]:
        """What goes into the buffer: at layer 1 all that was peeked, else the rows just computed."""
        if layer == 1 and self._peeked_kv is not None and self._peek_rows is not None:
            peeked, self._peeked_kv = self._peeked_kv, None
            return self._peek_rows, *peeked
        return self.rows, keys, values

    def _choose(self, layer: int, keys: torch.Tensor, values: torch.Tensor, seen: int) -> None:
        """Ask the policy for the tokens of ``layer``; K/V ``[Hkv, S, D]`` are those of layer ``seen``."""
        buffer, alive, computed = self._buffers[seen], self._alive, self.rows

        def fetch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
            at = torch.searchsorted(computed.positions, alive)
            return keys[:, at], values[:, at], buffer[0][:, alive], buffer[1][:, alive]

        with noted(self.timeline, SELECT, seen):
            chosen = self._choice.tokens(layer, alive, fetch)
        if chosen.numel() != alive.numel():
            self._alive = chosen
            self._next_rows = self._rows_of(chosen)

    # -- helpers ------------------------------------------------------------------------------

    def _rows_of(self, chosen: torch.Tensor) -> Rows:
        positions = torch.cat((self._choice.always, chosen)).sort().values
        return Rows(positions, self._prompt, self._force_masks)

    @property
    def recomputed(self) -> list[torch.Tensor]:
        """Positions ``[n]`` of the chunk tokens computed in each layer so far, ascending."""
        return self._tally.candidates

    def counts(self) -> FusionCounts:
        """What was computed; call after the forward."""
        return self._tally.counts(self.request)


__all__ = ["BlendRequest", "Fusion", "FusionCounts", "Peeked"]
