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
6. Fill what is left with parts of chunks whose head is cut off, too. Of the 32 characters at every
   position of a chunk, those are kept whose hash ends in seven zero bits: about one position in 128. The same
   positions of a prompt are looked up (content-defined, as in LBFS, SOSP'01). Of parts with 500 characters,
   39 in 40 have one.

Passages that were learned from other prompts are only found whole. Chunks of 16 to 31 characters (enough
where characters are ideographs) are found by their first 16. Shorter chunks are not found; their text is
computed like any other.
Where a prompt or a corpus repeats itself, the ``MAX_`` constants bound the work: every beginning is tried
where it first occurs, as often as fits.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from blendrag.text.chunking import canonical
from blendrag.text.matches import Match, SearchArea, best_cover, common_prefix, unescaped

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
#: Samples of one prompt that are looked up, and chunks compared at each of them.
MAX_SAMPLES = 512
MAX_SAMPLE_CANDIDATES = 16
#: What must be there of a chunk that is cut: characters, and share of the chunk. All of its KV is read.
MIN_PART_CHARS = 64
MIN_PART_SHARE = 0.125
#: One in so many positions of a chunk is a sample, a power of two; and the most that are kept of a chunk.
SAMPLE_EVERY = 128
MAX_KEPT_SAMPLES = 256
#: Recently added chunks are kept apart until there are this many, or this share of the others.
RECENT = 1024
RECENT_SHARE = 1 / 16


# -- hashes -----------------------------------------------------------------------------------------
# Polynomials over code points modulo 2⁶⁴, reduced to 63 bits to fit a signed column. The corpus stores
# them, so they never change. They need not withstand deliberate collisions: texts are compared at last.

_BASE = 0x9E3779B97F4A7C15 | 1  # odd, so that it has an inverse modulo 2⁶⁴
_INVERSE = pow(_BASE, -1, 1 << 64)
_MIX = U64(0xFF51AFD7ED558CCD)


@cache
def _powers(base: int, size: int) -> np.ndarray:
    """1, base, base², …  uint64 [size]"""
    steps = np.full(size, base, U64)
    steps[0] = 1
    return np.cumprod(steps, dtype=U64)


class PrefixSums:
    """Hashes of any part of a text in constant time."""

    def __init__(self, text: str) -> None:
        # Code points plus one, so that leading NULs count.
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        codes = codes.astype(U64) + U64(1)
        self.size = len(codes)
        known = 1 << self.size.bit_length()  # a power of two, so that few sizes are cached
        self._inverses = _powers(_INVERSE, known)
        self._sums = np.zeros(self.size + 1, U64)
        np.cumsum(codes * _powers(_BASE, known)[: self.size], out=self._sums[1:])

    def windows(self, width: int) -> np.ndarray:
        """Hashes of ``text[i : i + width]`` for every i.  [size - width + 1]"""
        after = self._sums[width:]
        return _mixed((after - self._sums[: len(after)]) * self._inverses[: len(after)])

    def hashes(self, starts: np.ndarray | int, lengths: np.ndarray | int) -> np.ndarray:
        """Hashes of ``text[start : start + length]`` for each pair; all must lie in the text."""
        raw = self._sums[starts + lengths] - self._sums[starts]
        return _mixed(raw * self._inverses[starts])


def _mixed(raw: np.ndarray) -> np.ndarray:
    """Spread the polynomials' values over all bits and drop one bit, in place."""
    raw ^= raw >> U64(33)
    raw *= _MIX
    raw ^= raw >> U64(33)
    raw >>= U64(1)
    return raw


def _samples(sums: PrefixSums) -> tuple[np.ndarray, np.ndarray]:
    """Positions that a text is found by wherever it is cut, and the hashes of the :data:`FIRST` characters
    there."""
    hashes = sums.windows(FIRST)
    at = np.flatnonzero((hashes & U64(SAMPLE_EVERY - 1)) == 0)
    return at, hashes[at]


#: Bytes of :func:`chunk_hashes` before its samples.
HASHES_BYTES = 8 * (2 + len(LEVELS))


def chunk_hashes(text: str) -> bytes:
    """What a chunk is found by: its length, the hashes of its text, of its beginning at each level, and of
    its samples.

    Little-endian int64; 0 for levels that are not used.
    """
    sums = PrefixSums(canonical(text))
    lengths = np.array([sums.size, *LEVELS], np.intp)
    used = lengths <= sums.size
    used[1] = SHORT <= sums.size < FIRST
    numbers = np.zeros(1 + len(lengths), "<i8")
    numbers[0] = sums.size
    numbers[1:][used] = sums.hashes(0, lengths[used])
    _, samples = _samples(sums)
    return numbers.tobytes() + np.unique(samples)[:MAX_KEPT_SAMPLES].astype("<i8").tobytes()


class _Filter:
    """Rules out most of many hashes that are not among a few: a Bloom filter with two bits per hash."""

    def __init__(self, hashes: np.ndarray) -> None:
        bits = max(16, min(24, (16 * len(hashes)).bit_length()))
        self._mask = U64((1 << bits) - 1)
        self._table = np.zeros(1 << bits, np.bool_)
        for part in (hashes, hashes >> U64(32)):
            self._table[part & self._mask] = True

    def maybe(self, hashes: np.ndarray) -> np.ndarray:
        """Indices of hashes that may be among them, ascending."""
        found = np.flatnonzero(self._has(hashes))
        return found[self._has(hashes[found] >> U64(32))]

    def _has(self, part: np.ndarray) -> np.ndarray:
        # clip skips the bounds check, half of the time (numpy 2.4); an index's sign bit is 0
        return self._table.take((part & self._mask).view(np.int64), mode="clip")


def _look_up(known: np.ndarray, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which of ``hashes`` are in the sorted array ``known``, and the first place of those that are."""
    low = np.searchsorted(known, hashes)
    is_known = known[np.minimum(low, len(known) - 1)] == hashes
    return is_known, low[is_known]


# -- many chunks in sorted arrays -------------------------------------------------------------------


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


class _Beginnings(NamedTuple):
    """Where the prompt has the first ``size`` characters of a table's chunks."""

    table: _Table
    level: _Level
    size: int
    starts: np.ndarray
    low: np.ndarray
    """For each start, ``low`` and ``high`` limit the chunks with this beginning in the level's arrays."""
    high: np.ndarray

    def chunks_at(self, start: int, longest: int, most: int) -> Iterator[tuple[str, int]]:
        """Ids and lengths of chunks that share the beginning at ``start``, the longest first.

        At most ``most`` chunks, none longer than ``longest``.
        """
        at = int(np.searchsorted(self.starts, start))
        if at == len(self.starts) or self.starts[at] != start:
            return
        low, level = int(self.low[at]), self.level
        # np.intp is the array's own type; for any other, searchsorted would convert the whole array
        lengths = level.lengths[low : int(self.high[at])]
        high = low + int(lengths.searchsorted(np.intp(longest), "right"))
        for place in range(high - 1, max(low, high - most) - 1, -1):
            chunk_id = self.table.ids[level.slots[place]]
            if chunk_id in self.table.hashes:
                yield chunk_id, int(level.lengths[place])


class _Table:
    """Chunks in sorted arrays, searched with a whole prompt at once.

    Adding chunks makes a new table. A chunk deleted from ``hashes`` is no longer found, but costs time.
    """

    def __init__(self, hashes: dict[str, bytes]) -> None:
        """``hashes``: the :func:`chunk_hashes` of each chunk, by id."""
        self.hashes, self.ids = hashes, list(hashes)
        packed = b"".join(each[:HASHES_BYTES] for each in hashes.values())
        numbers = np.frombuffer(packed, "<i8").reshape(-1, 2 + len(LEVELS))
        self._lengths = numbers[:, 0].astype(np.intp)
        digests, heads = numbers[:, 1].astype(U64), numbers[:, 2:].astype(U64)
        self._levels: dict[int, _Level] = {}
        self._filters: dict[int, _Filter] = {}
        for column, (level, next_level) in enumerate(pairwise((*LEVELS, np.iinfo(np.intp).max))):
            belongs = self._lengths >= level
            if level == SHORT:
                belongs &= self._lengths < next_level
            if len(slots := np.flatnonzero(belongs)):
                beginnings = heads[slots, column]
                self._levels[level] = _Level(beginnings, slots, self._lengths, next_level)
                if level in (SHORT, FIRST):
                    self._filters[level] = _Filter(beginnings)
        self._by_digest = np.argsort(digests)
        self._sorted_digests = digests[self._by_digest]

    @cached_property
    def _samples(self) -> tuple[np.ndarray, np.ndarray]:
        """Hashes of all samples, ascending, and the slot of each one's chunk."""
        packed = [self.hashes.get(chunk_id, b"")[HASHES_BYTES:] for chunk_id in self.ids]
        hashes = np.frombuffer(b"".join(packed), "<i8").astype(U64)
        slots = np.repeat(np.arange(len(packed)), [len(each) // 8 for each in packed])
        order = np.argsort(hashes, kind="stable")
        return hashes[order], slots[order]

    def with_sample(self, sample: np.uint64, most: int) -> list[str]:
        """Ids of at most so many chunks that have the ``sample``."""
        hashes, slots = self._samples
        low = int(np.searchsorted(hashes, sample))
        high = int(np.searchsorted(hashes, sample, "right"))
        ids = [self.ids[slot] for slot in slots[low : min(high, low + most)].tolist()]
        return [chunk_id for chunk_id in ids if chunk_id in self.hashes]

    def has_sample(self, samples: np.ndarray) -> np.ndarray:
        """Which of ``samples`` any chunk has."""
        hashes, _ = self._samples
        if not len(hashes):
            return np.zeros(len(samples), np.bool_)
        return _look_up(hashes, samples)[0]

    def beginnings(self, sums: PrefixSums, area: SearchArea) -> Iterator[_Beginnings]:
        """Where the prompt has beginnings of chunks, level by level."""
        for first, filtered in self._filters.items():
            starts = filtered.maybe(sums.windows(first))
            starts = starts[area.may_begin(starts)]
            for size in (first,) if first == SHORT else LEVELS[1:]:
                starts = starts[starts + size <= sums.size]
                if size not in self._levels or not len(starts):
                    break
                level, hashes = self._levels[size], sums.hashes(starts, size)
                is_known, low = _look_up(level.hashes, hashes)
                starts = starts[is_known]
                yield _Beginnings(self, level, size, starts, low, level.run_end[low])

    def whole(
        self, sums: PrefixSums, area: SearchArea, found: _Beginnings
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Starts, lengths and hashes of chunks that end before the next level, as the prompt has them."""
        level = found.level
        first = level.whole_before[found.low]
        counts = level.whole_before[found.high] - first
        kept = first_of_each(found.low, counts, MAX_COMPARED)
        starts, first, counts = found.starts[kept], first[kept], counts[kept]
        # Pair each start with each length that a chunk with this beginning has.
        begins = np.repeat(np.cumsum(counts) - counts, counts)
        lengths = level.whole_lengths[np.repeat(first, counts) + np.arange(len(begins)) - begins]
        at = np.repeat(starts, counts)
        fits = area.may_hold(at, lengths)
        at, lengths = at[fits], lengths[fits]
        digests = sums.hashes(at, lengths)
        is_known, _ = _look_up(self._sorted_digests, digests)
        return at[is_known], lengths[is_known], digests[is_known]

    def with_digest(self, digest: np.uint64, length: int) -> list[str]:
        """Ids of the chunks with this hash and length."""
        low = int(np.searchsorted(self._sorted_digests, digest))
        high = int(np.searchsorted(self._sorted_digests, digest, "right"))
        slots = self._by_digest[low:high].tolist()
        ids = [self.ids[slot] for slot in slots if self._lengths[slot] == length]
        return [chunk_id for chunk_id in ids if chunk_id in self.hashes]


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

    Most chunks are in one table. Chunks added recently are in a small one, which is rebuilt on additions.
    """

    def __init__(self, text_of: Callable[[str], str], base: ChunkIndex | None = None) -> None:
        """``text_of`` gives a chunk's canonical text; it raises :class:`LookupError` if it is gone.

        ``base``: an index whose chunks are found, too. Those of this one are then found only whole, so that a
        prompt with a part of their text shows nothing of them.
        """
        self._text_of = text_of
        self._base = base
        self._lock = threading.Lock()
        self._settled, self._recent = _Table({}), _Table({})

    def __len__(self) -> int:
        own = len(self._settled.hashes) + len(self._recent.hashes)
        return own if self._base is None else own + len(self._base)

    def __contains__(self, chunk_id: object) -> bool:
        if chunk_id in self._recent.hashes or chunk_id in self._settled.hashes:
            return True
        return self._base is not None and chunk_id in self._base

    def ids(self) -> list[str]:
        """Without those of the base."""
        with self._lock:
            return [*self._settled.hashes, *self._recent.hashes]

    def add(self, hashes: Mapping[str, bytes]) -> None:
        """Add chunks by their :func:`chunk_hashes`; known ones stay as they are."""
        with self._lock:
            new = {i: packed for i, packed in hashes.items() if i not in self}
            if len(new) > RECENT:
                self._settled = _Table(self._settled.hashes | new)
            elif new:
                self._recent = _Table(self._recent.hashes | new)

    def discard(self, chunk_id: str) -> None:
        """Remove a chunk, if it is known."""
        with self._lock:
            for table in (self._settled, self._recent):
                table.hashes.pop(chunk_id, None)

    def find(
        self, prompt: str, within: Sequence[tuple[int, int]] | None = None, strict: bool = True
    ) -> list[Match]:
        """Chunks in ``prompt`` that do not overlap, by start.

        Args:
            within: ascending, disjoint spans; each match lies in one of them. ``None``: the whole prompt.
            strict: matches begin and end at word boundaries and are too long to occur by chance
                (:mod:`blendrag.text.matches`). Otherwise: all whole chunks of at least 16 characters.
        """
        if not len(self) or len(prompt) < SHORT:
            return []
        area = SearchArea(prompt, within, strict)
        base = self if self._base is None else self._base
        cut = base._tables()
        tables = cut if base is self else [*cut, *self._tables()]
        search = _Search(prompt, area, tables, cache(self._text), len(cut))
        whole = best_cover(search.whole_chunks())
        return search.with_parts(search.with_tail_cut(whole)) if strict else whole

    def _text(self, chunk_id: str) -> str:
        try:
            return canonical(self._text_of(chunk_id))
        except LookupError:
            return ""  # the chunk is gone: nothing matches

    def _tables(self) -> list[_Table]:
        """Both tables, made one if many chunks were added or discarded."""
        with self._lock:
            settled, recent = self._settled, self._recent
            changes = len(recent.ids) + len(settled.ids) - len(settled.hashes)
            if changes > max(RECENT, RECENT_SHARE * len(settled.hashes)):
                self._settled, self._recent = _Table(settled.hashes | recent.hashes), _Table({})
            return [self._settled, self._recent]

    def found_in(
        self, prompt: str, within: Sequence[tuple[int, int]] | None = None
    ) -> tuple[list[Match], tuple[str, ...]]:
        """:meth:`find`, and a note if nothing, or not everything, was recognised."""
        matches = self.find(prompt, within)
        if not len(self):
            return matches, ()
        # text that repr or JSON has escaped has other tokens, so it cannot be matched
        plain, covered = unescaped(prompt), sum(match.end - match.start for match in matches)
        if plain != prompt and sum(m.end - m.start for m in self.find(plain)) > covered:
            return matches, (
                "chunk text arrived escaped (as JSON or a Python repr), so not all of it could be "
                "recognised; pass texts, not their representation",
            )
        if not matches:
            return matches, (
                "no known chunk was recognised in this prompt, so no chunk was reused",
            )
        return matches, ()

    def loosely_in(
        self, prompt: str, within: Sequence[tuple[int, int]], found: Sequence[Match]
    ) -> list[tuple[int, int]]:
        """What else ``within`` may be chunk text: short ones, and the rest of chunks that are cut off."""
        loose = self.find(prompt, within, strict=False)
        parts = (_with_rest(match, prompt, within) for match in found if not match.complete)
        return [*((match.start, match.end) for match in loose), *chain.from_iterable(parts)]


def _with_rest(
    match: Match, text: str, within: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """What of ``within`` may be the rest of a chunk that was matched in part: to the next blank lines."""
    for low, high in within:
        if low <= match.end < high:
            end = text.find("\n\n", match.end, high)
            yield (match.start if low <= match.start else match.end, high if end < 0 else end)
        if match.head and low < match.start <= high:
            yield (max(low, text.rfind("\n\n", low, match.start)), match.start)


@dataclass
class _Search:
    """The candidates of one prompt, compared with the chunks' texts."""

    prompt: str
    area: SearchArea
    tables: Sequence[_Table]
    text_of: Callable[[str], str]
    cut: int
    """How many of the tables, from the first on, have chunks that are found cut, too."""

    def __post_init__(self) -> None:
        self.sums = PrefixSums(self.prompt)
        listed = [list(table.beginnings(self.sums, self.area)) for table in self.tables]
        self.found = [each for found in listed for each in found]
        self.cuttable = [each for found in listed[: self.cut] for each in found]

    def whole_chunks(self) -> list[Match]:
        """Chunks that are in the prompt whole; they may overlap."""
        if not self.found:
            return []
        listed = [each.table.whole(self.sums, self.area, each) for each in self.found]
        starts, lengths, digests = map(np.concatenate, zip(*listed, strict=True))
        kept = first_of_each(digests, np.ones_like(starts), MAX_WHOLE)
        matches: dict[tuple[int, int], Match] = {}
        for i in kept.tolist():
            start, length = int(starts[i]), int(lengths[i])
            same = (table.with_digest(digests[i], length) for table in self.tables)
            for chunk_id in sorted(chain.from_iterable(same)):
                text = self.text_of(chunk_id)
                if len(text) == length and self.prompt.startswith(text, start):
                    match = Match(chunk_id, start, start + length, complete=True)
                    matches.setdefault((start, length), match)
        return list(matches.values())

    def with_tail_cut(self, taken: list[Match]) -> list[Match]:
        """``taken``, and chunks whose tail is cut off in the gaps, from the prompt's start on."""
        taken = list(taken)
        kept = [
            each.starts[first_of_each(each.low, np.ones_like(each.low), MAX_TAIL_CUT_STARTS)]
            for each in self.cuttable
            if each.size == MIN_PART_CHARS
        ]
        starts = np.unique(np.concatenate([np.zeros(0, np.intp), *kept]))
        for start, end in zip(starts.tolist(), self.area.ends(starts).tolist(), strict=True):
            at = bisect_right(taken, start, key=lambda match: match.start)
            if at and taken[at - 1].end > start:
                continue
            room = min([end, *(match.start for match in taken[at : at + 1])]) - start
            if match := self._tail_cut(start, room):
                taken.insert(at, match)
        return taken

    def _tail_cut(self, start: int, room: int) -> Match | None:
        """The chunk that shares the longest text with the prompt at ``start``, if that is long enough."""
        left = MAX_TAIL_CUT_CANDIDATES
        # From the longest level: all that share its beginning share more than any other chunk.
        for size in reversed(LEVELS):
            if not MIN_PART_CHARS <= size <= room or left <= 0:
                continue
            longest = int(min(room, 2 * size) / MIN_PART_SHARE)
            candidates = [
                chunk
                for each in self.cuttable
                if each.size == size
                for chunk in each.chunks_at(start, longest, left)
            ]
            left -= len(candidates)
            matches: list[Match] = []
            for chunk_id, length in candidates:
                text = self.text_of(chunk_id)
                shared = common_prefix(self.prompt[start : start + min(room, length)], text)
                end = self.area.cut(start, start + shared)
                if shared < length and end - start >= _least_part(length):
                    matches.append(Match(chunk_id, start, end, complete=False))
            if matches:
                return max(matches, key=lambda match: match.end)
        return None

    def with_parts(self, taken: list[Match]) -> list[Match]:
        """``taken``, and parts of chunks whose head is cut off in the gaps, from the prompt's start on."""
        taken = list(taken)
        at, samples = _samples(self.sums)
        known = np.zeros(len(at), np.bool_)
        for table in self.tables[: self.cut]:
            known |= table.has_sample(samples)
        at, samples = at[known], samples[known]
        kept = first_of_each(samples, np.ones_like(at), MAX_SAMPLES)[:MAX_SAMPLES]
        for place, sample in zip(at[kept].tolist(), samples[kept], strict=True):
            after = bisect_right(taken, place, key=lambda match: match.start)
            gap = self.area.around(place)
            low = max([gap[0], *(match.end for match in taken[after - 1 : after] if after)])
            high = min([gap[1], *(match.start for match in taken[after : after + 1])])
            if low <= place <= high - FIRST and (match := self._part(place, sample, low, high)):
                taken.insert(after, match)
        return taken

    def _part(self, place: int, sample: np.uint64, low: int, high: int) -> Match | None:
        """The chunk that shares the longest text with ``prompt[low:high]`` around ``place``."""
        found: list[Match] = []
        for table in self.tables[: self.cut]:
            for chunk_id in table.with_sample(sample, MAX_SAMPLE_CANDIDATES):
                text = self.text_of(chunk_id)
                at = text.find(self.prompt[place : place + FIRST])
                if at < 0:  # another text has the same hash
                    continue
                before, after = min(at, place - low), min(len(text) - at, high - place)
                back = common_prefix(
                    self.prompt[place - before : place][::-1], text[at - before : at][::-1]
                )
                on = common_prefix(self.prompt[place : place + after], text[at : at + after])
                start = self.area.begin(place - back, place + on)
                end = self.area.cut(start, place + on)
                if end - start >= _least_part(len(text)):
                    head = at - (place - start)
                    whole = head == 0 and end - start == len(text)
                    found.append(Match(chunk_id, start, end, whole, head))
        return max(found, key=lambda match: match.end - match.start, default=None)


def _least_part(length: int) -> int:
    """Characters that must be there of a chunk with so many."""
    return max(MIN_PART_CHARS, int(length * MIN_PART_SHARE))
