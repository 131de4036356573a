"""Which rows a layer computes of several prompts that lie one behind another in one sequence.

What :class:`Rows` is for one prompt, for many: the same names for whoever cuts a layer's arguments, and
for the attention a list of which rows see which keys. Rows of one prompt never see another's keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from blendrag.fusor.rows import Gather, Gathered, Rows


class Place(NamedTuple):
    """Where a prompt lies among all."""

    ids_at: int
    """Of its first token in the sequence of all prompts' tokens."""
    keys_at: int
    """Of its first key in the buffers that hold all prompts' KV, each with headroom behind it."""


class Part(NamedTuple):
    """One prompt's rows ``[a, b)`` of those computed, over keys ``[lo, hi)``."""

    member: int
    rows: Rows
    a: int
    b: int
    lo: int
    hi: int


class PackedRows:
    """The rows of some of the prompts, in the order of ``rows``, out of ``prompt_tokens`` of all prompts.

    ``rows`` are each prompt's own, by the prompt's number; ``places`` those of all prompts.
    """

    def __init__(self, rows: dict[int, Rows], places: Sequence[Place], prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.attended = False
        self._gathered = Gathered()
        self.parts: list[Part] = []
        at = 0
        for member, own in rows.items():
            lo = places[member].keys_at
            self.parts.append(Part(member, own, at, at + own.count, lo, lo + own.prompt_tokens))
            at += own.count
        self.count = at
        self.positions = torch.cat(
            [part.rows.positions + places[part.member].ids_at for part in self.parts]
        )
        """``[ΣS]``, where the rows stand in the sequence of all prompts; not what they are rotated by."""

    def gather(self, value: Any, how: Gather, alone: bool = False) -> Any:
        """:meth:`Rows.gather` of the rows of all prompts."""
        return self._gathered.once(value, how, self.positions)

    @property
    def covers_prompt(self) -> bool:
        """Whether these are all rows of all prompts."""
        return self.count == self.prompt_tokens and all(p.rows.covers_prompt for p in self.parts)

    def mask(self) -> torch.Tensor:
        """There is none: see :attr:`Fusor.packs`."""
        raise NotImplementedError("prompts are packed only where attention takes rows, not masks")

    def are(self, rows: dict[int, Rows]) -> bool:
        """Whether they were made of these very rows."""
        return len(rows) == len(self.parts) and all(
            rows.get(part.member) is part.rows for part in self.parts
        )


AnyRows = Rows | PackedRows
