"""Many chunks in sorted arrays, searched with a whole prompt at once.

Owns the arrays. Does not know texts: what it finds are candidates, by their hashes. A segment is made
once; only which of its chunks are still there changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from blendrag.text.recognition.area import SearchArea
from blendrag.text.recognition.hashing import Filter, PrefixSums
from blendrag.text.recognition.rows import ANCHOR, LEVELS, SHORT, AnchorRow, head_lengths, unpacked

#: Pairs of a place and a length that are compared in one prompt, at each level. Where chunks and prompt
#: repeat themselves there are more: then every head is looked at where it first stands, as often as fits,
#: and the rest is computed.
MAX_COMPARED = 1 << 16


class Whole(NamedTuple):
    """Chunks that may stand in the prompt whole, by length and hash."""

    starts: np.ndarray
    lengths: np.ndarray
    digests: np.ndarray


class Heads(NamedTuple):
    """Where the prompt holds the first ``level`` characters of chunks.

    For each start, the part of the level's arrays where those chunks are.
    """

    level: int
    starts: np.ndarray
    low: np.ndarray
    high: np.ndarray


class Beginning(NamedTuple):
    """A chunk that begins as the prompt does somewhere."""

    chunk_id: str
    length: int


class _Level:
    """Chunks of at least so many characters, by the hash of that beginning."""

    def __init__(
        self, hashes: np.ndarray, slots: np.ndarray, lengths: np.ndarray, end: int
    ) -> None:
        order = np.lexsort((lengths[slots], hashes))
        self.hashes, self.slots = hashes[order], slots[order]
        self.lengths = lengths[self.slots]
        self.run_end = _run_ends(self.hashes)
        # What may stand whole: pairs of hash and length, of chunks that do not reach the next level.
        first = self.lengths < end
        first[1:] &= (self.hashes[1:] != self.hashes[:-1]) | (self.lengths[1:] != self.lengths[:-1])
        self.whole_lengths = self.lengths[first]
        self.whole_before = np.concatenate([[0], np.cumsum(first)]).astype(np.int32)

    def find(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of the hashes are here, and for those the place of the first chunk that has it."""
        low = np.searchsorted(self.hashes, hashes, "left")
        is_here = self.hashes[np.minimum(low, len(self.hashes) - 1)] == hashes
        return is_here, low[is_here]


def _run_ends(values: np.ndarray) -> np.ndarray:
    """For each place in a sorted array, where the run of equal values ends.  [n] int32"""
    ends = np.append(np.flatnonzero(values[1:] != values[:-1]) + 1, len(values))
    return np.repeat(ends, np.diff(ends, prepend=0)).astype(np.int32)


class Segment:
    """Chunks, by slot; :attr:`slots` of a chunk id."""

    def __init__(self, ids: Sequence[str] = (), rows: bytes = b"") -> None:
        """``rows``: packed, one behind the other, in the order of ``ids``."""
        self._fill(list(ids), *unpacked(rows))

    def _fill(
        self, ids: list[str], lengths: np.ndarray, digests: np.ndarray, heads: np.ndarray
    ) -> None:
        self.ids, self._lengths, self._digests, self._heads = ids, lengths, digests, heads
        self.slots = {chunk_id: slot for slot, chunk_id in enumerate(ids)}
        self._levels: dict[int, _Level] = {}
        for column, level in enumerate(LEVELS):
            end = (*LEVELS, np.iinfo(np.intp).max)[column + 1]
            at = (lengths >= level) & ((lengths < end) if level == SHORT else True)
            if len(slots := np.flatnonzero(at)):
                self._levels[level] = _Level(heads[slots, column], slots, lengths, end)
        self._filters = {
            level: Filter(self._levels[level].hashes)
            for level in (SHORT, ANCHOR)
            if level in self._levels
        }
        self._by_digest = np.argsort(digests)
        self._sorted_digests = digests[self._by_digest]
        self._digest_filter = Filter(digests)

    def __len__(self) -> int:
        """Chunks still there."""
        return len(self.slots)

    @property
    def gone(self) -> int:
        """Chunks not there any more, which still cost time."""
        return len(self.ids) - len(self.slots)

    def merged(self, more: Segment) -> Segment:
        """A segment of the chunks still there, and of another segment's."""
        kept = np.fromiter(self.slots.values(), np.intp, len(self.slots))
        made = Segment.__new__(Segment)
        made._fill(
            [*self.slots, *more.ids],
            np.concatenate([self._lengths[kept], more._lengths]),
            np.concatenate([self._digests[kept], more._digests]),
            np.concatenate([self._heads[kept], more._heads]),
        )
        return made

    def rows(self) -> list[AnchorRow]:
        """Of the chunks still there."""
        made = []
        for chunk_id, slot in self.slots.items():
            length = int(self._lengths[slot])
            heads = self._heads[slot, 0 if length < ANCHOR else 1 :].tolist()
            known = heads[: len(head_lengths(length))] or [0]
            digest = int(self._digests[slot])
            made.append(AnchorRow(chunk_id, known[0], length, digest, tuple(known[1:])))
        return made

    def discard(self, chunk_id: str) -> None:
        del self.slots[chunk_id]

    def search(self, sums: PrefixSums, area: SearchArea) -> tuple[list[Whole], list[Heads]]:
        """Chunks that may stand in the prompt whole, and where beginnings stand, the short first."""
        whole: list[Whole] = []
        heads: list[Heads] = []
        for first, filtered in self._filters.items():
            hashes = sums.windows(first)
            starts = filtered.maybe(hashes)
            starts = starts[area.may_begin(starts)]
            hashes = hashes[starts]
            for level in (first,) if first == SHORT else LEVELS[1:]:
                if level not in self._levels:
                    break
                if level != first:
                    starts = starts[starts + level <= sums.size]
                    hashes = sums.hashes(starts, level)
                table = self._levels[level]
                is_here, low = table.find(hashes)
                starts = starts[is_here]
                if not len(starts):
                    break
                high = table.run_end[low]
                whole.append(self._whole(sums, area, table, starts, low, high))
                heads.append(Heads(level, starts, low, high))
        return whole, heads

    def _whole(
        self,
        sums: PrefixSums,
        area: SearchArea,
        table: _Level,
        starts: np.ndarray,
        low: np.ndarray,
        high: np.ndarray,
    ) -> Whole:
        """Chunks that end before the next level and whose length and hash are the prompt's.

        ``low`` and ``high``: for each start, where in the table are the chunks that begin so.
        """
        first = table.whole_before[low]
        counts = table.whole_before[high] - first
        kept = first_of_each(low, counts, MAX_COMPARED)
        starts, first, counts = starts[kept], first[kept], counts[kept]
        # each start beside each length that a chunk beginning so has
        begins = np.repeat(np.cumsum(counts) - counts, counts)
        lengths = table.whole_lengths[np.repeat(first, counts) + np.arange(len(begins)) - begins]
        at = np.repeat(starts, counts)
        fits = area.may_hold(at, lengths)
        at, lengths = at[fits], lengths[fits]
        digests = sums.hashes(at, lengths)
        maybe = self._digest_filter.maybe(digests)
        return Whole(at[maybe], lengths[maybe], digests[maybe])

    def of_digest(self, digest: np.uint64, length: int) -> list[str]:
        """Ids of the chunks still there that have this hash and length."""
        low, high = (
            int(np.searchsorted(self._sorted_digests, digest, s)) for s in ("left", "right")
        )
        slots = self._by_digest[low:high].tolist()
        ids = [self.ids[slot] for slot in slots if self._lengths[slot] == length]
        return [chunk_id for chunk_id in ids if chunk_id in self.slots]

    def beginning(
        self, level: int, low: int, high: int, longest: int, most: int
    ) -> Iterator[Beginning]:
        """Chunks no longer than that in a part of the level's table, the longest first.

        Of many, at most so many are looked at.
        """
        table = self._levels[level]
        # of the array's own type: else all of it is converted first
        high = low + int(table.lengths[low:high].searchsorted(np.intp(longest), "right"))
        for slot in table.slots[max(low, high - most) : high][::-1].tolist():
            if self.ids[slot] in self.slots:
                yield Beginning(self.ids[slot], int(self._lengths[slot]))


def first_of_each(groups: np.ndarray, costs: np.ndarray, most: int) -> np.ndarray:
    """Indices of the first R members of every group, R as large as the costs of all allow; at least 1."""
    if costs.sum() <= most:
        return np.arange(len(groups))
    order = np.argsort(groups, kind="stable")
    new = np.flatnonzero(np.diff(groups[order], prepend=groups[order[0]] - groups.dtype.type(1)))
    sizes = np.diff(new, append=len(groups))
    rank = np.empty(len(groups), np.intp)
    rank[order] = np.arange(len(groups)) - np.repeat(new, sizes)
    totals = np.cumsum(np.bincount(rank, weights=costs))
    return np.flatnonzero(rank < max(1, int(np.searchsorted(totals, most, "right"))))
