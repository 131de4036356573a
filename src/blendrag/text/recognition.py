"""Find known chunks in a prompt by their text; the prompt carries no marks.

1. Hash the 32 characters at every position of the prompt and look each hash up among the beginnings of
   all chunks. Chinese has no word starts, so positions are not limited to them.
2. Where a beginning is known, hash 64, 128, 256, … characters until it is not. This tells chunks apart
   whose first pages are equal.
3. Compare whole chunks by length and hash, in constant time from prefix sums, and then by text: a hash
   collision costs time and never gives a wrong match.
4. Of whole chunks that overlap, keep those that cover most characters together. So a new chunk never
   lowers the number of characters that whole chunks cover.
5. Fill the gaps with chunks whose tail is cut off in the prompt.

Chunks of 16 to 31 characters (enough where characters are ideographs) are found by their first 16.
Shorter chunks and chunks whose head is cut off are not found; their text is computed like any other.
Where a prompt or a corpus repeats itself, the ``MAX_`` constants bound the work: every beginning is tried
where it first occurs, as often as fits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from blendrag.text.chunking import canonical
from blendrag.text.matches import (
    DisjointMatches,
    Match,
    SearchArea,
    best_cover,
    common_prefix,
    unescaped,
)

U64 = np.uint64
#: Lengths of the beginnings that are hashed. The first is for chunks shorter than the second.
LEVELS = (16, *(32 << i for i in range(10)))
SHORT, FIRST = LEVELS[:2]
#: Pairs of a position and a length that are compared by hash in one prompt, per level.
MAX_COMPARED = 1 << 16
#: Positions in one prompt where the texts of whole chunks are compared.
MAX_WHOLE = 4096
#: Positions where a chunk may begin whose tail is cut off, and chunks compared at each of them.
MAX_TAIL_CUT_STARTS = 512
MAX_TAIL_CUT_CANDIDATES = 16
#: What must be left of a chunk whose tail is cut off: characters, and share of the chunk.
MIN_TAIL_CUT_CHARS = 64
MIN_TAIL_CUT_SHARE = 0.25
#: Recently added chunks are kept apart until there are this many, or this share of the others.
RECENT = 1024
RECENT_SHARE = 1 / 16


# -- hashes -----------------------------------------------------------------------------------------
# Polynomials over code points modulo 2⁶⁴, reduced to 63 bits to fit a signed column. The corpus stores
# them, so they never change. They need not withstand deliberate collisions: texts are compared at last.

_BASE = 0x9E3779B97F4A7C15 | 1  # odd, so that it has an inverse modulo 2⁶⁴
_MIX = U64(0xFF51AFD7ED558CCD)


class _Powers:
    """1, base, base², …, extended as needed. Safe to share between threads."""

    def __init__(self, base: int) -> None:
        self._base = base
        self._known = np.ones(1, U64)

    def upto(self, size: int) -> np.ndarray:
        known = self._known
        if len(known) < size:
            steps = np.full(max(size, 2 * len(known)), self._base, U64)
            steps[0] = 1
            known = self._known = np.cumprod(steps, dtype=U64)
        return known[:size]


_POWERS = _Powers(_BASE)
_POWERS_OF_INVERSE = _Powers(pow(_BASE, -1, 1 << 64))


class PrefixSums:
    """Hashes of any part of a text in constant time."""

    def __init__(self, text: str) -> None:
        # Code points plus one, so that leading NULs count.
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        codes = codes.astype(U64) + U64(1)
        self.size = len(codes)
        with np.errstate(over="ignore"):
            self._inverses = _POWERS_OF_INVERSE.upto(self.size + 1)
            self._sums = np.zeros(self.size + 1, U64)
            np.cumsum(codes * _POWERS.upto(self.size), out=self._sums[1:])

    def windows(self, width: int) -> np.ndarray:
        """Hashes of ``text[i : i + width]`` for every i.  [size - width + 1]"""
        if self.size < width:
            return np.zeros(0, U64)
        with np.errstate(over="ignore"):
            raw = self._sums[width:] - self._sums[:-width]
            raw *= self._inverses[: self.size - width + 1]
            return _mixed(raw)

    def hashes(self, starts: np.ndarray, lengths: np.ndarray | int) -> np.ndarray:
        """Hashes of ``text[start : start + length]`` for each pair; all must lie in the text."""
        with np.errstate(over="ignore"):
            raw = self._sums[starts + lengths] - self._sums[starts]
            raw *= self._inverses[starts]
            return _mixed(raw)


def _mixed(raw: np.ndarray) -> np.ndarray:
    """Spread the polynomials' values over all bits and drop one bit, in place."""
    raw ^= raw >> U64(33)
    raw *= _MIX
    raw ^= raw >> U64(33)
    raw >>= U64(1)
    return raw


#: Bytes of :func:`chunk_hashes`.
HASHES_BYTES = 8 * (2 + len(LEVELS))


def chunk_hashes(text: str) -> bytes:
    """What a chunk is found by: its length, the hash of its text and of its beginning at each level.

    Little-endian int64; 0 for levels that are not used.
    """
    sums = PrefixSums(canonical(text))
    levels = LEVELS[:1] if sums.size < FIRST else LEVELS[1:]
    levels = tuple(level for level in levels if level <= sums.size)
    lengths = np.array([sums.size, *levels], np.intp)
    numbers = np.zeros(2 + len(LEVELS), "<i8")
    numbers[0] = sums.size
    columns = [1, *(2 + LEVELS.index(level) for level in levels)]
    numbers[columns] = sums.hashes(np.zeros(len(lengths), np.intp), lengths)
    return numbers.tobytes()


class _Filter:
    """Which of many hashes are surely not among a few: one look-up rules out most, a second the rest."""

    _SHIFTS = (U64(0), U64(32))  # the bits of a hash that each table uses

    def __init__(self, hashes: np.ndarray) -> None:
        bits = max(16, min(24, (16 * max(1, len(hashes))).bit_length()))
        self._mask = U64((1 << bits) - 1)
        self._tables = tuple(np.zeros(1 << bits, np.bool_) for _ in self._SHIFTS)
        for table, shift in zip(self._tables, self._SHIFTS, strict=True):
            table[(hashes >> shift) & self._mask] = True

    def maybe(self, hashes: np.ndarray) -> np.ndarray:
        """Indices of hashes that may be among them, ascending."""
        first, second = self._tables
        places = np.flatnonzero(self._look_up(first, hashes))
        return places[self._look_up(second, hashes[places] >> self._SHIFTS[1])]

    def _look_up(self, table: np.ndarray, hashes: np.ndarray) -> np.ndarray:
        # clip skips the bounds check, half of the time (numpy 2.4); an index's sign bit is 0
        return table.take((hashes & self._mask).view(np.int64), mode="clip")


# -- many chunks in sorted arrays -------------------------------------------------------------------


class _Beginnings(NamedTuple):
    """Where the prompt has the first ``level`` characters of chunks.

    For each start, the slice of the level's arrays with those chunks.
    """

    level: int
    starts: np.ndarray
    low: np.ndarray
    high: np.ndarray


class _Level:
    """Chunks with at least ``level`` characters, sorted by the hash of that beginning."""

    def __init__(
        self, hashes: np.ndarray, slots: np.ndarray, lengths: np.ndarray, next_level: int
    ) -> None:
        order = np.lexsort((lengths[slots], hashes))
        self.hashes, self.slots = hashes[order], slots[order]
        self.lengths = lengths[self.slots]
        # For each place, where the run of equal hashes ends.
        ends = np.append(np.flatnonzero(self.hashes[1:] != self.hashes[:-1]) + 1, len(self.hashes))
        self.run_end = np.repeat(ends, np.diff(ends, prepend=0)).astype(np.int32)
        # Different pairs of hash and length, of chunks that do not reach the next level.
        first = self.lengths < next_level
        first[1:] &= (self.hashes[1:] != self.hashes[:-1]) | (self.lengths[1:] != self.lengths[:-1])
        self.whole_lengths = self.lengths[first]
        self.whole_before = np.concatenate([[0], np.cumsum(first)]).astype(np.int32)

    def find(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of the hashes are known, and for those the place of the first chunk."""
        low = np.searchsorted(self.hashes, hashes, "left")
        is_known = self.hashes[np.minimum(low, len(self.hashes) - 1)] == hashes
        return is_known, low[is_known]


class _Found(NamedTuple):
    """What one table has for one prompt."""

    table: _Table
    whole: list[tuple[np.ndarray, np.ndarray, np.ndarray]]
    """Starts, lengths and hashes of chunks that may be in the prompt whole."""
    beginnings: list[_Beginnings]


class _Table:
    """Chunks in sorted arrays, searched with a whole prompt at once. Chunks can only be discarded."""

    def __init__(self, ids: Sequence[str], numbers: np.ndarray) -> None:
        """``numbers``: the :func:`chunk_hashes` of each chunk.  int64 [chunks, 2 + levels]"""
        self.ids, self.numbers = ids, numbers
        self.slots = {chunk_id: slot for slot, chunk_id in enumerate(ids)}
        self._lengths = numbers[:, 0].astype(np.intp)
        digests, heads = numbers[:, 1].astype(U64), numbers[:, 2:].astype(U64)
        self._levels: dict[int, _Level] = {}
        for column, level in enumerate(LEVELS):
            next_level = (*LEVELS, np.iinfo(np.intp).max)[column + 1]
            belongs = self._lengths >= level
            if level == SHORT:
                belongs &= self._lengths < next_level
            if len(slots := np.flatnonzero(belongs)):
                hashes = heads[slots, column]
                self._levels[level] = _Level(hashes, slots, self._lengths, next_level)
        self._filters = {
            level: _Filter(self._levels[level].hashes)
            for level in (SHORT, FIRST)
            if level in self._levels
        }
        self._by_digest = np.argsort(digests)
        self._sorted_digests = digests[self._by_digest]
        self._digest_filter = _Filter(digests)

    @classmethod
    def of(cls, ids: Sequence[str], hashes: Sequence[bytes]) -> _Table:
        numbers = np.frombuffer(b"".join(hashes), "<i8").reshape(-1, 2 + len(LEVELS))
        return cls(ids, numbers)

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def discarded(self) -> int:
        """Chunks discarded, which still cost time."""
        return len(self.ids) - len(self.slots)

    def merged(self, more: _Table) -> _Table:
        """A table of both tables' chunks, without the discarded ones of this one."""
        kept = np.fromiter(self.slots.values(), np.intp, len(self.slots))
        return _Table([*self.slots, *more.ids], np.concatenate([self.numbers[kept], more.numbers]))

    def search(self, sums: PrefixSums, area: SearchArea) -> _Found:
        found = _Found(self, [], [])
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
                is_known, low = table.find(hashes)
                starts = starts[is_known]
                if not len(starts):
                    break
                begins = _Beginnings(level, starts, low, table.run_end[low])
                found.beginnings.append(begins)
                found.whole.append(self._whole(sums, area, table, begins))
        return found

    def _whole(
        self, sums: PrefixSums, area: SearchArea, table: _Level, found: _Beginnings
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Starts, lengths and hashes of chunks that end before the next level, as the prompt has them."""
        first = table.whole_before[found.low]
        counts = table.whole_before[found.high] - first
        kept = first_of_each(found.low, counts, MAX_COMPARED)
        starts, first, counts = found.starts[kept], first[kept], counts[kept]
        # Pair each start with each length that a chunk with this beginning has.
        begins = np.repeat(np.cumsum(counts) - counts, counts)
        lengths = table.whole_lengths[np.repeat(first, counts) + np.arange(len(begins)) - begins]
        at = np.repeat(starts, counts)
        fits = area.may_hold(at, lengths)
        at, lengths = at[fits], lengths[fits]
        digests = sums.hashes(at, lengths)
        maybe = self._digest_filter.maybe(digests)
        return at[maybe], lengths[maybe], digests[maybe]

    def with_digest(self, digest: np.uint64, length: int) -> list[str]:
        """Ids of the chunks with this hash and length."""
        low, high = (
            int(np.searchsorted(self._sorted_digests, digest, s)) for s in ("left", "right")
        )
        slots = self._by_digest[low:high].tolist()
        ids = [self.ids[slot] for slot in slots if self._lengths[slot] == length]
        return [chunk_id for chunk_id in ids if chunk_id in self.slots]

    def beginning_at(
        self, found: _Beginnings, start: int, longest: int, most: int
    ) -> Iterator[tuple[str, int]]:
        """Ids and lengths of chunks that share the beginning at ``start``, the longest first.

        At most ``most`` chunks, none longer than ``longest``.
        """
        at = int(np.searchsorted(found.starts, start))
        if at == len(found.starts) or found.starts[at] != start:
            return
        table, low = self._levels[found.level], int(found.low[at])
        # np.intp is the array's own type; for any other, searchsorted would convert the whole array
        lengths = table.lengths[low : int(found.high[at])]
        high = low + int(lengths.searchsorted(np.intp(longest), "right"))
        for slot in table.slots[max(low, high - most) : high][::-1].tolist():
            if self.ids[slot] in self.slots:
                yield self.ids[slot], int(self._lengths[slot])


def first_of_each(groups: np.ndarray, costs: np.ndarray, most: int) -> np.ndarray:
    """Indices of the first R members of every group, for the largest R whose costs sum to at most
    ``most``, but at least 1."""
    if costs.sum() <= most:
        return np.arange(len(groups))
    order = np.argsort(groups, kind="stable")
    new = np.flatnonzero(np.diff(groups[order], prepend=groups[order[0]] - groups.dtype.type(1)))
    sizes = np.diff(new, append=len(groups))
    rank = np.empty(len(groups), np.intp)
    rank[order] = np.arange(len(groups)) - np.repeat(new, sizes)
    totals = np.cumsum(np.bincount(rank, weights=costs))
    return np.flatnonzero(rank < max(1, int(np.searchsorted(totals, most, "right"))))


# -- the index --------------------------------------------------------------------------------------


class ChunkIndex:
    """The chunks of a corpus, found by content. Safe for use from several threads.

    Most chunks are in one table. Chunks added recently are in a small one, which is rebuilt on changes.
    """

    def __init__(self, text_of: Callable[[str], str]) -> None:
        """``text_of`` gives a chunk's canonical text; it raises :class:`LookupError` if it is gone."""
        self._text_of = text_of
        self._lock = threading.Lock()
        self._settled = _Table.of([], [])
        self._recent: dict[str, bytes] = {}
        self._recent_table: _Table | None = None

    def __len__(self) -> int:
        return len(self._settled) + len(self._recent)

    def __contains__(self, chunk_id: object) -> bool:
        return chunk_id in self._recent or chunk_id in self._settled.slots

    def ids(self) -> list[str]:
        with self._lock:
            return [*self._settled.slots, *self._recent]

    def add(self, chunk_id: str, text: str) -> None:
        """Add a chunk. Adding a known one changes nothing."""
        if chunk_id not in self:
            self.add_hashes([chunk_id], [chunk_hashes(text)])

    def add_hashes(self, ids: Sequence[str], hashes: Sequence[bytes]) -> None:
        """Add many chunks by their :func:`chunk_hashes`; known ones stay as they are."""
        with self._lock:
            new = {i: h for i, h in zip(ids, hashes, strict=True) if i not in self}
            if len(new) > RECENT:
                self._settled = self._settled.merged(_Table.of([*new], [*new.values()]))
            elif new:
                self._recent |= new
                self._recent_table = None

    def discard(self, chunk_id: str) -> None:
        """Remove a chunk, if it is known."""
        with self._lock:
            if self._recent.pop(chunk_id, None) is not None:
                self._recent_table = None
            else:
                self._settled.slots.pop(chunk_id, None)

    def find(
        self,
        prompt: str,
        within: Sequence[tuple[int, int]] | None = None,
        strict: bool = True,
    ) -> list[Match]:
        """Chunks in ``prompt`` that do not overlap, by start.

        Args:
            within: ascending, disjoint spans; each match lies in one of them. ``None``: the whole prompt.
            strict: matches begin and end at word boundaries and are too long to occur by chance
                (:mod:`blendrag.text.matches`). Otherwise: all whole chunks of at least 16 characters.
        """
        if not len(self) or len(prompt) < SHORT:
            return []
        sums, area = PrefixSums(prompt), SearchArea(prompt, within, strict)
        with self._lock:
            found = [table.search(sums, area) for table in self._tables()]
        # Outside the lock: text_of may take a lock, too.
        search = _Search(prompt, area, found, self._text_of)
        taken = DisjointMatches()
        for match in best_cover(search.whole_chunks()):
            taken.add(match)
        if strict:
            search.add_tail_cut(taken)
        return taken.matches

    def _tables(self) -> list[_Table]:
        """All chunks; the caller holds the lock."""
        if self._recent_table is None:
            self._recent_table = _Table.of([*self._recent], [*self._recent.values()])
        changes = len(self._recent) + self._settled.discarded
        if changes > max(RECENT, RECENT_SHARE * len(self._settled)):
            self._settled = self._settled.merged(self._recent_table)
            self._recent, self._recent_table = {}, _Table.of([], [])
        return [table for table in (self._settled, self._recent_table) if len(table)]

    def looks_escaped(self, prompt: str, matches: Sequence[Match]) -> bool:
        """Whether ``prompt`` has chunks only as ``repr`` or JSON writes them.

        Escaped text has other tokens, so it cannot be matched; the caller warns. ``matches``: what
        :meth:`find` found in ``prompt``.
        """
        plain = unescaped(prompt)
        if plain == prompt:
            return False
        covered, covered_plain = (
            sum(match.end - match.start for match in found) for found in (matches, self.find(plain))
        )
        return covered_plain > covered


@dataclass
class _Search:
    """The candidates of one prompt, compared with the chunks' texts."""

    prompt: str
    area: SearchArea
    found: list[_Found]
    text_of: Callable[[str], str]
    texts: dict[str, str] = field(default_factory=dict)

    def _text(self, chunk_id: str) -> str:
        """The chunk's text, asked for once; empty, so that nothing matches, if the chunk is gone."""
        if chunk_id not in self.texts:
            try:
                self.texts[chunk_id] = canonical(self.text_of(chunk_id))
            except LookupError:
                self.texts[chunk_id] = ""
        return self.texts[chunk_id]

    def whole_chunks(self) -> list[Match]:
        """Chunks that are in the prompt whole; they may overlap."""
        listed = [whole for found in self.found for whole in found.whole]
        if not listed:
            return []
        starts, lengths, digests = map(np.concatenate, zip(*listed, strict=True))
        kept = first_of_each(digests, np.ones(len(digests), np.intp), MAX_WHOLE)
        matches: dict[tuple[int, int], Match] = {}
        for i in kept.tolist():
            start, length = int(starts[i]), int(lengths[i])
            for chunk_id in sorted(
                each for found in self.found for each in found.table.with_digest(digests[i], length)
            ):
                text = self._text(chunk_id)
                if len(text) == length and self.prompt.startswith(text, start):
                    match = Match(chunk_id, start, start + length, complete=True)
                    matches.setdefault((start, length), match)
        return list(matches.values())

    def add_tail_cut(self, taken: DisjointMatches) -> None:
        """Add chunks whose tail is cut off where nothing is taken, from the prompt's start on."""
        starts = np.array(sorted(set(self._tail_cut_starts())), np.intp)
        for start, end in zip(starts.tolist(), self.area.ends(starts).tolist(), strict=True):
            room = taken.room(start, end)
            if room < MIN_TAIL_CUT_CHARS:
                continue
            for candidates in self._candidates(start, room):
                if match := self._tail_cut(start, room, candidates):
                    taken.add(match)
                    break

    def _tail_cut_starts(self) -> Iterator[int]:
        for found in self.found:
            for each in found.beginnings:
                if each.level == MIN_TAIL_CUT_CHARS:
                    ones = np.ones(len(each.starts), np.intp)
                    kept = first_of_each(each.low, ones, MAX_TAIL_CUT_STARTS)
                    yield from each.starts[kept].tolist()

    def _candidates(self, start: int, room: int) -> Iterator[list[tuple[str, int]]]:
        """Chunks that may share enough text with the prompt at ``start``, level by level from the longest:
        everything in one list shares more than anything in the next."""
        left = MAX_TAIL_CUT_CANDIDATES
        for level in reversed(LEVELS):
            if not MIN_TAIL_CUT_CHARS <= level <= room or left <= 0:
                continue
            longest = int(min(room, 2 * level) / MIN_TAIL_CUT_SHARE)
            candidates = [
                chunk
                for found in self.found
                for each in found.beginnings
                if each.level == level
                for chunk in found.table.beginning_at(each, start, longest, left)
            ]
            if candidates:
                left -= len(candidates)
                yield candidates

    def _tail_cut(self, start: int, room: int, candidates: list[tuple[str, int]]) -> Match | None:
        """The candidate that shares the longest prefix with the prompt, if it is long enough."""
        best: Match | None = None
        for chunk_id, length in candidates:
            needed = max(MIN_TAIL_CUT_CHARS, int(length * MIN_TAIL_CUT_SHARE))
            if room < needed:
                continue
            text = self._text(chunk_id)
            shared = common_prefix(self.prompt[start : start + min(room, len(text))], text)
            if shared == length or (best is not None and start + shared <= best.end):
                continue
            end = self.area.cut(start, start + shared)
            if end - start >= needed and (best is None or end > best.end):
                best = Match(chunk_id, start, end, complete=False)
        return best
