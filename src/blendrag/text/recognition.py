"""Find known chunks in a prompt by their text."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from blendrag.text.chunking import canonical
from blendrag.text.matches import (
    Match,
    SearchArea,
    Spans,
    best_cover,
    common_prefix,
    matched_chars,
    unescaped,
)

U64 = np.uint64
_BASE = 0x9E3779B97F4A7C15 | 1  # odd, so that it has an inverse modulo 2⁶⁴
_INVERSE = pow(_BASE, -1, 1 << 64)
_MIX = U64(0xFF51AFD7ED558CCD)


class PrefixSums:
    """Hashes of any part of a text in constant time."""

    def __init__(self, text: str) -> None:
        codes = _codes(text)
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
        """Hashes of ``text[start : start + length]`` for each pair; all must fit."""
        with np.errstate(over="ignore"):
            raw = self._sums[starts + lengths] - self._sums[starts]
            raw *= self._inverses[starts]
            return _mixed(raw)


class Filter:
    """Which of many hashes are surely not among a few: tells most apart by one look, the rest by two."""

    def __init__(self, hashes: np.ndarray) -> None:
        bits = max(16, min(24, (16 * max(1, len(hashes))).bit_length()))
        self._mask = U64((1 << bits) - 1)
        self._tables = tuple(np.zeros(1 << bits, np.bool_) for _ in _SHIFTS)
        for table, shift in zip(self._tables, _SHIFTS, strict=True):
            table[(hashes >> shift) & self._mask] = True

    def maybe(self, hashes: np.ndarray) -> np.ndarray:
        """Places of those that may be among them, ascending."""
        first, second = self._tables
        places = np.flatnonzero(self._look(first, hashes))
        return places[self._look(second, hashes[places] >> _SHIFTS[1])]

    def _look(self, table: np.ndarray, hashes: np.ndarray) -> np.ndarray:
        # clip: no bounds to check, which takes half of the time (numpy 2.4); an index's sign bit is 0
        return table.take((hashes & self._mask).view(np.int64), mode="clip")


#: Which bits of a hash each table looks at.
_SHIFTS = (U64(0), U64(32))


class _Powers:
    """1, base, base², …, computed once and then longer as needed. Safe to share between threads."""

    def __init__(self, base: int) -> None:
        self._base = base
        self._known = np.ones(1, U64)

    def upto(self, size: int) -> np.ndarray:
        """[size]"""
        known = self._known
        if len(known) < size:
            steps = np.full(max(size, 2 * len(known)), self._base, U64)
            steps[0] = 1
            known = self._known = np.cumprod(steps, dtype=U64)
        return known[:size]


_POWERS = _Powers(_BASE)
_POWERS_OF_INVERSE = _Powers(_INVERSE)


def _codes(text: str) -> np.ndarray:
    """Code points, plus one so that leading NULs count.  [N] uint64"""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(U64) + U64(1)


def _mixed(raw: np.ndarray) -> np.ndarray:
    """Spreads the polynomials' values over all bits and drops one, in place."""
    raw ^= raw >> U64(33)
    raw *= _MIX
    raw ^= raw >> U64(33)
    raw >>= U64(1)
    return raw


#: Characters of the beginnings that are hashed: the first for chunks too short for the second.
LEVELS = (16, *(32 << i for i in range(10)))
SHORT, ANCHOR = LEVELS[:2]


class ChunkHashes(NamedTuple):
    """What is persisted of a chunk: every hash fits a signed 64-bit column."""

    chunk_id: str
    anchor_hash: int
    """Of the first 32 characters; of the first 16 where there are fewer than 32; 0 below."""
    length: int
    digest: int
    """Of the whole text."""
    heads: tuple[int, ...] = ()
    """Of the first 64, 128, 256, … characters, as far as the text goes."""


def row_of(chunk_id: str, text: str) -> ChunkHashes:
    """The row to persist for a chunk."""
    sums = PrefixSums(canonical(text))
    heads = head_lengths(sums.size)
    lengths = np.array([*heads, sums.size], np.intp)
    *hashes, digest = sums.hashes(np.zeros(len(lengths), np.intp), lengths).tolist()
    return ChunkHashes(chunk_id, hashes[0] if heads else 0, sums.size, digest, tuple(hashes[1:]))


#: Numbers of a packed row: length, digest, and the hash of the beginning at every level.
_PACKED = 2 + len(LEVELS)
#: Bytes of a packed row; the first eight are the length.
PACKED_BYTES = 8 * _PACKED


def packed(row: ChunkHashes) -> bytes:
    """Everything but the id, in as many bytes for every row."""
    numbers = np.zeros(_PACKED, "<i8")
    numbers[:2] = row.length, row.digest
    if row.length >= SHORT:
        first = 2 + (row.length >= ANCHOR)
        numbers[first : first + 1 + len(row.heads)] = (row.anchor_hash, *row.heads)
    return numbers.tobytes()


def unpacked(rows: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lengths [n], digests [n] and hashes [n, levels] of packed rows, one behind the other."""
    numbers = np.frombuffer(rows, "<i8").reshape(-1, _PACKED)
    hashes = numbers.astype(np.uint64)
    return numbers[:, 0].astype(np.intp), hashes[:, 1].copy(), hashes[:, 2:].copy()


def head_lengths(length: int) -> tuple[int, ...]:
    """Lengths of the beginnings that are hashed of a text so long."""
    if length < ANCHOR:
        return (SHORT,) if length >= SHORT else ()
    return tuple(level for level in LEVELS[1:] if level <= length)


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

    def rows(self) -> list[ChunkHashes]:
        """Of the chunks still there."""
        made = []
        for chunk_id, slot in self.slots.items():
            length = int(self._lengths[slot])
            heads = self._heads[slot, 0 if length < ANCHOR else 1 :].tolist()
            known = heads[: len(head_lengths(length))] or [0]
            digest = int(self._digests[slot])
            made.append(ChunkHashes(chunk_id, known[0], length, digest, tuple(known[1:])))
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


#: Places in one prompt where texts of whole chunks are compared. Where a prompt repeats itself there are
#: more: then every chunk is looked at where it first stands, as often as fits.
MAX_WHOLE = 4096
#: Places where a chunk may begin whose tail is cut off (likewise), and chunks compared at one of them.
MAX_TAIL_CUT_STARTS = 512
MAX_TAIL_CUT_CANDIDATES = 16
#: What must be left of a chunk whose tail is cut off: characters, and share of the chunk.
MIN_TAIL_CUT_CHARS = 64
MIN_TAIL_CUT_SHARE = 0.25
#: Chunks that came lately, before they join the others: so many, or this share of those.
RECENT = 1024
RECENT_SHARE = 1 / 16


class ChunkIndex:
    """Chunks by how they begin. Safe for use from several threads."""

    ANCHOR_CHARS = ANCHOR
    SHORT_ANCHOR_CHARS = SHORT

    def __init__(self, text_of: Callable[[str], str]) -> None:
        """``text_of`` gives a chunk's canonical text; it raises where the chunk is gone."""
        self._text_of = text_of
        self._lock = threading.Lock()
        self._settled = Segment()
        self._recent: dict[str, ChunkHashes] = {}
        self._recent_segment: Segment | None = None

    def __len__(self) -> int:
        return len(self._settled) + len(self._recent)

    def __contains__(self, chunk_id: object) -> bool:
        return chunk_id in self._recent or chunk_id in self._settled.slots

    def rows(self) -> Iterator[ChunkHashes]:
        with self._lock:
            return iter([*self._settled.rows(), *self._recent.values()])

    def ids(self) -> list[str]:
        with self._lock:
            return [*self._settled.slots, *self._recent]

    def add(self, chunk_id: str, text: str) -> None:
        """Makes a chunk findable. Adding it again changes nothing."""
        if chunk_id not in self:
            self.add_row(row_of(chunk_id, text))

    def add_row(self, row: ChunkHashes) -> None:
        self.add_rows([row])

    def add_rows(self, rows: Iterable[ChunkHashes]) -> None:
        """Makes chunks findable; those that are there stay as they are."""
        with self._lock:
            for row in rows:
                if row.chunk_id not in self:
                    self._recent[row.chunk_id] = row
                    self._recent_segment = None

    def add_packed(self, ids: Sequence[str], rows: Sequence[bytes]) -> None:
        """:meth:`add_rows` of rows as :func:`packed` made them; fast for many."""
        with self._lock:
            new = [i for i, chunk_id in enumerate(ids) if chunk_id not in self]
            made = Segment([ids[i] for i in new], b"".join(rows[i] for i in new))
            if len(made) > RECENT:
                self._settled = self._settled.merged(made)
            elif len(made):
                self._recent |= {row.chunk_id: row for row in made.rows()}
                self._recent_segment = None

    def discard(self, chunk_id: str) -> None:
        """Forgets a chunk; one that is not known is no error."""
        with self._lock:
            if self._recent.pop(chunk_id, None) is not None:
                self._recent_segment = None
            elif chunk_id in self._settled.slots:
                self._settled.discard(chunk_id)

    def find(
        self,
        prompt: str,
        within: Sequence[tuple[int, int]] | None = None,
        strict: bool = True,
    ) -> list[Match]:
        """Chunks in ``prompt``, without overlap, by start.

        Whole chunks come first, those that cover most together; tail-cut ones fill what is left.

        Args:
            within: ascending, disjoint spans; a match lies in one of them. ``None``: all of the prompt.
            strict: matches begin and end at word boundaries and are long enough that they do not stand
                there by chance (:mod:`.area`). Without it: all whole chunks of at least 16
                characters.
        """
        if not len(self) or len(prompt) < SHORT:
            return []
        sums, area = PrefixSums(prompt), SearchArea(prompt, within, strict)
        with self._lock:
            found = [_Found(segment, *segment.search(sums, area)) for segment in self._segments()]
        # Texts are asked for outside the lock: who gives them may hold a lock of its own.
        texts = _Texts(self._text_of)
        whole = _whole(prompt, found, texts)
        taken = Spans()
        for i in best_cover([(match.start, match.end) for match in whole]):
            taken.add(whole[i])
        if strict:
            self._fill_up(prompt, area, found, taken, texts)
        return taken.matches()

    def _segments(self) -> list[Segment]:
        """Under the lock: all chunks, what came lately in order again."""
        if self._recent_segment is None:
            self._recent_segment = _segment_of(self._recent.values())
        changes = len(self._recent) + self._settled.gone
        if changes > max(RECENT, RECENT_SHARE * len(self._settled)):
            self._settled = self._settled.merged(self._recent_segment)
            self._recent, self._recent_segment = {}, Segment()
        return [segment for segment in (self._settled, self._recent_segment) if len(segment)]

    def _fill_up(
        self, prompt: str, area: SearchArea, found: list[_Found], taken: Spans, texts: _Texts
    ) -> None:
        """Adds chunks whose tail is cut off, first come first served."""
        starts = np.array(sorted({start for each in found for start in each.beginnings()}), np.intp)
        for start, end in zip(starts.tolist(), area.ends(starts).tolist(), strict=True):
            room = taken.room(start, end)
            if room < MIN_TAIL_CUT_CHARS:
                continue
            for candidates in _candidates(found, start, room):
                if match := _tail_cut(prompt, area, start, room, candidates, texts):
                    taken.add(match)
                    break

    def looks_escaped(self, prompt: str, matches: Sequence[Match] | None = None) -> bool:
        """Whether chunks stand in ``prompt`` only as ``repr`` or JSON would write them.

        Such text cannot be matched (its tokens are others); the caller warns once and says why.
        ``matches``: what :meth:`find` found, if it was asked.
        """
        plain = unescaped(prompt)
        if plain == prompt:
            return False
        found = self.find(prompt) if matches is None else matches
        return matched_chars(self.find(plain)) > matched_chars(found)


class _Found(NamedTuple):
    """What one segment has for one prompt."""

    segment: Segment
    whole: list[Whole]
    heads: list[Heads]

    def beginnings(self) -> list[int]:
        """Where a chunk may begin whose tail is cut off."""
        for heads in self.heads:
            if heads.level == MIN_TAIL_CUT_CHARS:
                ones = np.ones(len(heads.starts), np.intp)
                return heads.starts[first_of_each(heads.low, ones, MAX_TAIL_CUT_STARTS)].tolist()
        return []

    def beginning(self, heads: Heads, start: int, longest: int, most: int) -> Iterator[Beginning]:
        """Chunks that begin as the prompt does at ``start``, as far as the level of ``heads`` says."""
        at = int(np.searchsorted(heads.starts, start))
        if at < len(heads.starts) and heads.starts[at] == start:
            low, high = int(heads.low[at]), int(heads.high[at])
            yield from self.segment.beginning(heads.level, low, high, longest, most)


def _whole(prompt: str, found: list[_Found], texts: _Texts) -> list[Match]:
    """Chunks that stand in the prompt whole; they may overlap."""
    listed = [whole for each in found for whole in each.whole]
    if not listed:
        return []
    starts, lengths, digests = (np.concatenate(columns) for columns in zip(*listed, strict=True))
    kept = first_of_each(digests, np.ones(len(digests), np.intp), MAX_WHOLE)
    matches: dict[tuple[int, int], Match] = {}
    for i in kept.tolist():
        start, length = int(starts[i]), int(lengths[i])
        for chunk_id in sorted(
            chunk_id for each in found for chunk_id in each.segment.of_digest(digests[i], length)
        ):
            if prompt.startswith(texts[chunk_id], start) and len(texts[chunk_id]) == length:
                matches.setdefault(
                    (start, length), Match(chunk_id, start, start + length, complete=True)
                )
    return list(matches.values())


def _segment_of(rows: Iterable[ChunkHashes]) -> Segment:
    listed = list(rows)
    return Segment([row.chunk_id for row in listed], b"".join(map(packed, listed)))


def _candidates(found: list[_Found], start: int, room: int) -> Iterator[list[Beginning]]:
    """Chunks that may share enough of the ``room`` from ``start`` on; first those that share most.

    What is in one list shares more than anything in the next: it was found at a higher level.
    """
    left = MAX_TAIL_CUT_CANDIDATES
    levels = sorted({heads.level for each in found for heads in each.heads}, reverse=True)
    for level in levels:
        if not MIN_TAIL_CUT_CHARS <= level <= room or left <= 0:
            continue
        longest = int(min(room, 2 * level) / MIN_TAIL_CUT_SHARE)
        candidates = [
            chunk
            for each in found
            for heads in each.heads
            if heads.level == level
            for chunk in each.beginning(heads, start, longest, left)
        ]
        if candidates:
            left -= len(candidates)
            yield candidates


class _Texts(dict[str, str]):
    """Texts asked for once per prompt; a chunk that is gone has no text and matches nothing."""

    def __init__(self, text_of: Callable[[str], str]) -> None:
        super().__init__()
        self._text_of = text_of

    def __missing__(self, chunk_id: str) -> str:
        try:
            text = canonical(self._text_of(chunk_id))
        except LookupError:
            text = ""
        self[chunk_id] = text
        return text


def _tail_cut(
    prompt: str,
    area: SearchArea,
    start: int,
    room: int,
    candidates: list[Beginning],
    texts: _Texts,
) -> Match | None:
    """The candidate that shares the longest prefix with the prompt, if it is long enough."""
    best: Match | None = None
    for chunk_id, length in candidates:
        needed = max(MIN_TAIL_CUT_CHARS, int(length * MIN_TAIL_CUT_SHARE))
        if room < needed:
            continue
        shared = common_prefix(prompt, start, start + room, texts[chunk_id])
        if shared == length or (best is not None and start + shared <= best.end):
            continue
        end = area.cut(start, start + shared)
        if end - start >= needed and (best is None or end > best.end):
            best = Match(chunk_id, start, end, complete=False)
    return best
