"""Known chunks, and finding them in a prompt.

Owns what is taken where several chunks may stand, and how the index grows: most chunks are in one
segment, what came lately in a small one beside it, which is made anew when more comes.

Where whole chunks overlap, those are taken that cover most of the prompt together. So a chunk that
somebody adds never lowers the number of characters that whole chunks cover: to displace another it must
itself stand in the prompt, word for word, and cover more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from blendrag.text.chunking import canonical
from blendrag.text.recognition.area import SearchArea
from blendrag.text.recognition.escapes import unescaped
from blendrag.text.recognition.hashing import PrefixSums
from blendrag.text.recognition.rows import ANCHOR, SHORT, AnchorRow, packed, row_of
from blendrag.text.recognition.segment import Beginning, Heads, Segment, Whole, first_of_each
from blendrag.text.recognition.spans import Match, Spans, best_cover, common_prefix, matched_chars

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


class AnchorIndex:
    """Chunks by how they begin. Safe for use from several threads."""

    ANCHOR_CHARS = ANCHOR
    SHORT_ANCHOR_CHARS = SHORT

    def __init__(self, text_of: Callable[[str], str]) -> None:
        """``text_of`` gives a chunk's canonical text; it raises where the chunk is gone."""
        self._text_of = text_of
        self._lock = threading.Lock()
        self._settled = Segment()
        self._recent: dict[str, AnchorRow] = {}
        self._recent_segment: Segment | None = None

    def __len__(self) -> int:
        return len(self._settled) + len(self._recent)

    def __contains__(self, chunk_id: object) -> bool:
        return chunk_id in self._recent or chunk_id in self._settled.slots

    def rows(self) -> Iterator[AnchorRow]:
        with self._lock:
            return iter([*self._settled.rows(), *self._recent.values()])

    def ids(self) -> list[str]:
        with self._lock:
            return [*self._settled.slots, *self._recent]

    def add(self, chunk_id: str, text: str) -> None:
        """Makes a chunk findable. Adding it again changes nothing."""
        if chunk_id not in self:
            self.add_row(row_of(chunk_id, text))

    def add_row(self, row: AnchorRow) -> None:
        self.add_rows([row])

    def add_rows(self, rows: Iterable[AnchorRow]) -> None:
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


def _segment_of(rows: Iterable[AnchorRow]) -> Segment:
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
