"""Finding known chunks in a prompt that nobody marked up.

Owns the anchor index: the hash of every chunk's first characters, and how a prompt is searched with
it. Does not know what renders prompts, how they are tokenised or where chunk texts are kept (it
asks for a text when it needs one).

How a chunk is found: the hash of the 32 characters at *every* position of the prompt (Chinese has
no word starts) is looked up among the anchors. For each length that a candidate has, the hash of
so much prompt is compared, in constant time from prefix sums, and at last the text itself, so a
hash collision costs time and never a wrong match. Hashes are polynomials over code points modulo
2⁶⁴: the same in every process, and computed for all positions at once.

What is recognised: whole chunks of at least 32 characters; chunks of 16 to 31 characters by a
second, shorter anchor; chunks whose tail is cut off, if enough is left. What is not, and is
computed as ordinary text: chunks under 16 characters, and chunks whose head is cut off.
"""

from __future__ import annotations

import bisect
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from blendrag.chunking import canonical

U64 = np.uint64
_BASE = 0x9E3779B97F4A7C15 | 1  # odd, so that it has an inverse modulo 2⁶⁴
_INVERSE = pow(_BASE, -1, 1 << 64)
_MIX = U64(0xFF51AFD7ED558CCD)

#: Bits of the table that tells most positions apart from all anchors before any look-up.
_FILTER_BITS = 20
#: Distinct lengths of one anchor's chunks compared at one position, the longest ones; a header
#: shared by chunks of more lengths than this leaves the rest unrecognised (computed), never wrong.
MAX_LENGTHS = 4096
#: Candidates of one anchor whose common prefix with the prompt is measured, and how many
#: measurements one prompt may cost.
MAX_TAIL_CUT_CANDIDATES = 16
MAX_TAIL_CUT_TRIES = 512
#: What must be left of a chunk whose tail is cut off: characters, and share of the chunk.
MIN_TAIL_CUT_CHARS = 64
MIN_TAIL_CUT_SHARE = 0.25


@dataclass(frozen=True)
class Match:
    """A chunk's text at ``prompt[start:end]``.

    ``complete`` is False where the chunk's tail is cut off: then ``prompt[start:end]`` is a proper
    prefix of the chunk's text.
    """

    chunk_id: str
    start: int
    end: int
    complete: bool


class AnchorRow(NamedTuple):
    """What is persisted of a chunk: both hashes fit a signed 64-bit column."""

    chunk_id: str
    anchor_hash: int
    length: int
    digest: int


class AnchorIndex:
    """Chunks by the hash of their first characters. Safe for use from several threads."""

    ANCHOR_CHARS = 32
    SHORT_ANCHOR_CHARS = 16

    def __init__(self, text_of: Callable[[str], str]) -> None:
        """``text_of`` gives a chunk's canonical text; it raises where the chunk is gone."""
        self._text_of = text_of
        self._lock = threading.Lock()
        self._rows: dict[str, AnchorRow] = {}
        # width → anchor hash → the chunks that begin so
        self._buckets: dict[int, dict[int, _Bucket]] = {
            self.ANCHOR_CHARS: {},
            self.SHORT_ANCHOR_CHARS: {},
        }
        self._filters = {width: np.zeros(1 << _FILTER_BITS, np.bool_) for width in self._buckets}

    @classmethod
    def row_of(cls, chunk_id: str, text: str) -> AnchorRow:
        """The row to persist for a chunk."""
        codes = _codes(canonical(text))
        width = cls._width(len(codes))
        anchor = _hash_whole(codes[:width]) if width else 0
        return AnchorRow(chunk_id, anchor, len(codes), _hash_whole(codes))

    @classmethod
    def _width(cls, length: int) -> int:
        """Characters of the anchor of a chunk of this length, 0 where it is too short."""
        if length >= cls.ANCHOR_CHARS:
            return cls.ANCHOR_CHARS
        return cls.SHORT_ANCHOR_CHARS if length >= cls.SHORT_ANCHOR_CHARS else 0

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, chunk_id: object) -> bool:
        return chunk_id in self._rows

    def rows(self) -> Iterator[AnchorRow]:
        with self._lock:
            return iter(list(self._rows.values()))

    def add(self, chunk_id: str, text: str) -> None:
        """Makes a chunk findable. Adding it again changes nothing."""
        if chunk_id not in self._rows:
            self.add_row(self.row_of(chunk_id, text))

    def add_row(self, row: AnchorRow) -> None:
        with self._lock:
            if row.chunk_id in self._rows:
                return
            self._rows[row.chunk_id] = row
            if width := self._width(row.length):
                self._buckets[width].setdefault(row.anchor_hash, _Bucket()).add(row)
                self._filters[width][row.anchor_hash & ((1 << _FILTER_BITS) - 1)] = True

    def discard(self, chunk_id: str) -> None:
        """Forgets a chunk; one that is not known is no error."""
        with self._lock:
            row = self._rows.pop(chunk_id, None)
            if row is None or not (width := self._width(row.length)):
                return
            bucket = self._buckets[width][row.anchor_hash]
            bucket.remove(row)
            if not bucket.rows:  # the filter keeps its bit: it may be others', and only costs time
                del self._buckets[width][row.anchor_hash]

    def find(self, prompt: str) -> list[Match]:
        """Chunks in ``prompt``, without overlap, by start.

        Whole chunks come first, the longest first; tail-cut ones fill what is left.
        """
        if not self._rows or len(prompt) < self.SHORT_ANCHOR_CHARS:
            return []
        texts = _Texts(self._text_of)
        candidates = self._candidates(prompt)
        taken = _Spans()
        # 1) whole chunks, longest first
        whole = [(row.length, at.start, row.chunk_id) for at in candidates for row in at.whole]
        for length, start, chunk_id in sorted(whole, key=lambda hit: (-hit[0], hit[1], hit[2])):
            end = start + length
            if taken.free(start, end) and prompt[start:end] == texts[chunk_id]:
                taken.add(Match(chunk_id, start, end, complete=True))
        # 2) chunks whose tail is cut off, first come first served
        tries = MAX_TAIL_CUT_TRIES
        for at in candidates:
            room = taken.room(at.start, len(prompt))
            if tries > 0 and room >= MIN_TAIL_CUT_CHARS:
                tries -= len(at.longest)
                if match := _tail_cut(prompt, at.start, room, at.longest, texts):
                    taken.add(match)
        return taken.matches()

    def _candidates(self, prompt: str) -> list[_Candidates]:
        """Positions where an anchor stands, with what may follow. Asks for no text.

        Texts are asked for after the lock is released: who gives them may hold a lock of its own.
        """
        sums = _PrefixSums(_codes(prompt))
        found: list[_Candidates] = []
        with self._lock:
            for width, buckets in self._buckets.items():
                hashes = sums.windows(width)
                maybe = np.flatnonzero(self._filters[width][hashes & U64((1 << _FILTER_BITS) - 1)])
                for start, anchor in zip(maybe.tolist(), hashes[maybe].tolist(), strict=True):
                    if bucket := buckets.get(anchor):
                        whole = bucket.equal(sums, start)
                        found.append(_Candidates(start, whole, bucket.longest()))
        return sorted(found, key=lambda at: at.start)

    def looks_escaped(self, prompt: str) -> bool:
        """Whether chunks stand in ``prompt`` only as ``repr`` or JSON would write them.

        Such text cannot be matched (its tokens are others); the caller warns once and says why.
        """
        if "\\" not in prompt:
            return False
        return _matched_chars(self.find(_unescaped(prompt))) > _matched_chars(self.find(prompt))


class _Candidates(NamedTuple):
    """What may stand at ``start``: whole chunks by their hash, and chunks that only begin so."""

    start: int
    whole: list[AnchorRow]
    longest: list[AnchorRow]


class _PrefixSums:
    """Polynomial hashes of any part of a prompt in constant time."""

    def __init__(self, codes: np.ndarray) -> None:
        size = len(codes)
        with np.errstate(over="ignore"):
            powers = _powers(_BASE, size)
            self._inverses = _powers(_INVERSE, size + 1)
            self._sums = np.zeros(size + 1, U64)
            np.cumsum(codes * powers, out=self._sums[1:])

    def windows(self, width: int) -> np.ndarray:
        """Hashes of ``prompt[i : i + width]`` for every i."""
        if len(self._sums) <= width:
            return np.zeros(0, U64)
        with np.errstate(over="ignore"):
            raw = (self._sums[width:] - self._sums[:-width]) * self._inverses[: -width or None]
            return _mixed(raw)

    def hashes(self, start: int, lengths: np.ndarray) -> np.ndarray:
        """Hashes of ``prompt[start : start + n]`` for each n of ``lengths``; all must fit."""
        with np.errstate(over="ignore"):
            raw = (self._sums[start + lengths] - self._sums[start]) * self._inverses[start]
            return _mixed(raw)

    def room(self, start: int) -> int:
        return len(self._sums) - 1 - start


class _Bucket:
    """Chunks that begin with the same characters; arrays are made on first use, by length."""

    def __init__(self) -> None:
        self.rows: list[AnchorRow] = []
        self._sorted = False

    def add(self, row: AnchorRow) -> None:
        self.rows.append(row)
        self._sorted = False

    def remove(self, row: AnchorRow) -> None:
        self.rows.remove(row)
        self._sorted = False

    def _sort(self) -> None:
        self.rows.sort(key=lambda row: row.length)
        lengths = np.array([row.length for row in self.rows], np.intp)
        self._digests = np.array([row.digest for row in self.rows], U64)
        self._lengths, self._length_at = np.unique(lengths, return_inverse=True)
        self._sorted = True

    def equal(self, sums: _PrefixSums, start: int) -> list[AnchorRow]:
        """Chunks whose length and digest are those of the prompt from ``start`` on."""
        if not self._sorted:
            self._sort()
        fitting = int(np.searchsorted(self._lengths, sums.room(start), side="right"))
        first = max(0, fitting - MAX_LENGTHS)
        if first == fitting:
            return []
        hashes = np.zeros(len(self._lengths), U64)
        hashes[first:fitting] = sums.hashes(start, self._lengths[first:fitting])
        return [self.rows[i] for i in np.flatnonzero(hashes[self._length_at] == self._digests)]

    def longest(self) -> list[AnchorRow]:
        """Candidates for a chunk whose tail is cut off. After :meth:`equal`."""
        return self.rows[-MAX_TAIL_CUT_CANDIDATES:]


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


class _Spans:
    """Matches that do not overlap, kept sorted by start."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._matches: list[Match] = []

    def free(self, start: int, end: int) -> bool:
        return self.room(start, end) == end - start

    def room(self, start: int, limit: int) -> int:
        """Characters from ``start`` to the next match or ``limit``, 0 inside a match."""
        at = bisect.bisect_right(self._starts, start)
        if at and self._matches[at - 1].end > start:
            return 0
        return min(limit, self._starts[at] if at < len(self._starts) else limit) - start

    def add(self, match: Match) -> None:
        at = bisect.bisect_right(self._starts, match.start)
        self._starts.insert(at, match.start)
        self._matches.insert(at, match)

    def matches(self) -> list[Match]:
        return self._matches


def _tail_cut(
    prompt: str, start: int, room: int, candidates: list[AnchorRow], texts: _Texts
) -> Match | None:
    """The candidate that shares the longest prefix with the prompt, if it is long enough."""
    best: Match | None = None
    for row in candidates:
        shared = _common_prefix(prompt, start, start + room, texts[row.chunk_id])
        needed = max(MIN_TAIL_CUT_CHARS, int(row.length * MIN_TAIL_CUT_SHARE))
        if needed <= shared < row.length and (best is None or shared > best.end - start):
            best = Match(row.chunk_id, start, start + shared, complete=False)
    return best


def _common_prefix(prompt: str, start: int, limit: int, text: str) -> int:
    """Characters that ``prompt[start:limit]`` and ``text`` have in common from their starts."""
    low, high = 0, min(limit - start, len(text))
    while low < high:
        middle = (low + high + 1) // 2
        if prompt.startswith(text[low:middle], start + low):
            low = middle
        else:
            high = middle - 1
    return low


_ESCAPE = re.compile(r"""\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|([ntr"'\\/]))""")
_PLAIN = {"n": "\n", "t": "\t", "r": "\r"}


def _unescaped(prompt: str) -> str:
    def plain(escape: re.Match[str]) -> str:
        code = escape[1] or escape[2]
        return chr(int(code, 16)) if code else _PLAIN.get(escape[3], escape[3])

    text = _ESCAPE.sub(plain, prompt)
    # JSON writes characters beyond the first plane as two escapes.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _matched_chars(matches: list[Match]) -> int:
    return sum(match.end - match.start for match in matches)


def _codes(text: str) -> np.ndarray:
    """Code points, plus one so that leading NULs count.  [N] uint64"""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(U64) + U64(1)


def _powers(base: int, size: int) -> np.ndarray:
    """1, base, base², …  [size]"""
    steps = np.full(size, base, U64)
    steps[:1] = 1
    return np.cumprod(steps, dtype=U64)


def _hash_whole(codes: np.ndarray) -> int:
    with np.errstate(over="ignore"):
        total = (codes * _powers(_BASE, len(codes))).sum(dtype=U64)
        return int(_mixed(np.array([total], U64))[0])


def _mixed(raw: np.ndarray) -> np.ndarray:
    """Spreads the polynomial's value over all bits and drops one, to fit a signed column."""
    mixed = (raw ^ (raw >> U64(33))) * _MIX
    return (mixed ^ (mixed >> U64(33))) >> U64(1)
