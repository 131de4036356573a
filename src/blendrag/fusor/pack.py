"""Several prompts in one forward: their rows lie one behind another in one sequence.

Every projection and MLP runs once over all rows, so that weights are read once for all prompts. Each
prompt has a :class:`Fusion` and a cache of its own, as if it were alone: it is asked for its rows, is
handed the K/V of its rows, and its rows attend to its own keys only. Positions are each prompt's own.

A prompt that fails, or whose caller has gone, leaves: its rows are computed to the end of the layer that
is under way (of the last layer, to its K/V), over whatever its buffers hold, and no further; no other
prompt sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from blendrag.fusor.cache import BlendCache
from blendrag.fusor.fusion import Fusion, Peek, Peeked
from blendrag.fusor.packed_rows import PackedRows, Place
from blendrag.fusor.rows import Rows
from blendrag.fusor.scout import Scout
from blendrag.metrics import Timeline


class NobodyLeft(Exception):
    """Ends a forward all of whose prompts have left; never seen outside of the fusor."""


class Pack:
    """The fusions of several prompts in one forward; see :class:`blendrag.fusor.hooks.Blending`."""

    timeline: Timeline | None = None

    def __init__(
        self,
        fusions: Sequence[Fusion],
        cache: BlendCache,
        places: Sequence[Place],
        checks: Sequence[Callable[[], None] | None],
    ) -> None:
        """``cache`` holds the buffers of all, each fusion's at its place. A check raises to leave."""
        self.fusions = fusions
        self.prompt_tokens = sum(fusion.prompt_tokens for fusion in fusions)
        self.failures: dict[int, Exception] = {}
        """Why prompts left, by their number."""
        self._cache = cache
        self._places = places
        self._checks = checks
        self._rows: PackedRows | None = None
        self._peeked: PackedRows | None = None
        self._arriving: dict[int, tuple[int, int]] = {}
        """Where the rows of each prompt begin and end among those that arrive at the next layer."""
        self._scouts: dict[int, Scout] | None = None
        self._over: set[int] = set()
        """The prompts that need no more of the scout pass under way."""

    # -- who is there -------------------------------------------------------------------------

    @contextmanager
    def _leaving(self, member: int) -> Iterator[None]:
        """What is raised within is this prompt's own affair."""
        try:
            yield
        except Exception as exc:
            # its frames hold this pack, and with it the buffers of all until garbage is collected
            self.failures[member] = exc.with_traceback(None)
            self.fusions[member].close()

    def _still_there(self) -> list[int]:
        """Of those whose rows arrive."""
        gone = self.failures.keys() | self._over
        return [member for member in self._arriving if member not in gone]

    def start(self) -> None:
        """Begin to load."""
        for fusion in self.fusions:
            fusion.start()

    def close(self) -> None:
        """Stop loading; blocks until the buffers are left alone. Idempotent."""
        for fusion in self.fusions:
            fusion.close()

    @property
    def finished(self) -> list[int]:
        """The prompts whose last rows went through the last layer, in order."""
        assert self._rows is not None
        return [part.member for part in self._rows.parts]

    # -- before the first layer ---------------------------------------------------------------

    @property
    def is_scouting(self) -> bool:
        """Whether a scout pass is under way."""
        return self._scouts is not None

    @property
    def scouts(self) -> bool:
        """Whether any of the prompts needs a scout pass."""
        return any(f.scouts for i, f in enumerate(self.fusions) if i not in self.failures)

    @contextmanager
    def scouting(self) -> Iterator[dict[int, Scout]]:
        """A forward within computes the fresh tokens of those prompts that scout."""
        asking = [i for i, fusion in enumerate(self.fusions) if fusion.scouts]
        self._scouts = scouts = {}
        for member in asking:
            with self._leaving(member):
                scouts[member] = self.fusions[member].begin_scouting()
        try:
            yield scouts
        except NobodyLeft:
            pass  # of those that scout, or they have seen enough; others begin with the blended pass
        finally:
            self._scouts = self._rows = None
            self._over = set()
        for member, scout in scouts.items():
            if member not in self.failures:
                with self._leaving(member):
                    self.fusions[member].end_scouting(scout)

    # -- before a layer -----------------------------------------------------------------------

    def enter_layer(self, layer: int, peek: Peek) -> tuple[PackedRows, torch.Tensor | None]:
        """Rows of ``layer`` and their indices among the rows that arrive (``None``: all of them)."""
        if layer == 0:
            self._begin()
        if self._scouts is not None:
            self._over = {m for m, scout in self._scouts.items() if scout.ends_before(layer)}
        for member in self._still_there():
            check = self._checks[member]
            if check is not None:
                with self._leaving(member):
                    check()
        self._peek(layer, peek)
        rows: dict[int, Rows] = {}
        indices: dict[int, torch.Tensor | None] = {}
        for member in self._still_there():
            with self._leaving(member):
                rows[member], indices[member] = self.fusions[member].advance(layer)
        packed = self._packed(rows)
        among = self._among_arriving(indices)
        if self._scouts is None and layer == len(self._cache.layers) - 1:
            packed, among = self._keep_last(packed, among, peek)
        self._arriving = {part.member: (part.a, part.b) for part in packed.parts}
        return packed, among

    def _begin(self) -> None:
        """All tokens of all prompts arrive at layer 0."""
        taking_part = range(len(self.fusions)) if self._scouts is None else self._scouts
        self._arriving = {}
        for member in taking_part:
            at = self._places[member].ids_at
            self._arriving[member] = (at, at + self.fusions[member].prompt_tokens)

    def _peek(self, layer: int, peek: Peek) -> None:
        """One peek for all that need one."""
        peeking = [m for m in self._still_there() if self.fusions[m].peeks_before(layer)]
        if not peeking:
            return
        rows = {member: self.fusions[member].begin_peek() for member in peeking}
        self._peeked = PackedRows(rows, self._places, self.prompt_tokens)
        with suppress(Peeked):
            peek(self._peeked, self._among_arriving(dict.fromkeys(peeking)))
        self._peeked = None
        for member in peeking:
            if member not in self.failures:
                with self._leaving(member):
                    self.fusions[member].end_peek()

    def _keep_last(
        self, rows: PackedRows, among: torch.Tensor | None, peek: Peek
    ) -> tuple[PackedRows, torch.Tensor]:
        """Of the last layer the K/V of all rows; beyond them the last row of each prompt."""
        self._peeked = rows
        with suppress(Peeked):
            peek(rows, among)
        self._peeked = None
        there = self._still_there()
        ends = torch.tensor([self._arriving[member][1] - 1 for member in there])
        last = {member: self.fusions[member].keep_last() for member in there}
        return self._packed(last), ends.to(rows.positions.device, non_blocking=True)

    def _packed(self, rows: dict[int, Rows]) -> PackedRows:
        if not rows:
            raise NobodyLeft
        if self._rows is None or not self._rows.are(rows):
            self._rows = PackedRows(rows, self._places, self.prompt_tokens)
        return self._rows

    def _among_arriving(self, indices: dict[int, torch.Tensor | None]) -> torch.Tensor | None:
        """Each prompt's indices among its own rows, as indices among all rows that arrive."""
        everybody = len(indices) == len(self._arriving)
        if everybody and all(own is None for own in indices.values()):
            return None
        device = self._cache.layers[0].buffer.device
        found = []
        for member, own in indices.items():
            start, end = self._arriving[member]
            found.append(torch.arange(start, end, device=device) if own is None else own + start)
        return torch.cat(found)

    # -- inside a layer -----------------------------------------------------------------------

    def merge(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hand every prompt its fresh K/V ``[1, Hkv, S, D]``; returns the buffers of all, ``[1, Hkv, C, D]``.

        Nothing is copied: the attention finds each prompt's keys by :class:`PackedRows`.
        """
        rows = self._peeked or self._rows
        assert rows is not None
        for member, _, a, b, _, _ in rows.parts:
            if member not in self.failures:
                with self._leaving(member), suppress(Peeked):
                    self.fusions[member].merge(keys[:, :, a:b], values[:, :, a:b], layer)
        if self._peeked is not None:
            raise Peeked
        buffer = self._cache.layers[layer].buffer  # [2, 1, Hkv, C, D]
        return buffer[0], buffer[1]
