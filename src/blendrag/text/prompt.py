"""Cut a rendered prompt into segments: known chunks, and the text between them, with ids and positions.

The prompt is tokenised as one text, so its ids are those of the stock tokenizer, and mode ``full`` is a
stock prefill of them. A chunk's KV is used for the tokens that equal the chunk's own ids. A last token that
merged with the text after the chunk (``".\\n\\n"``) is computed. A chunk is tokenised separately, as plain
text, if it contains what looks like a control token or merges with the text before it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, Protocol

from blendrag.text.chunking import scope_of
from blendrag.text.matches import Match, common_prefix

#: Most tokens at its end that a chunk may lose to the text after it before it is tokenised separately.
SEAM_TOKENS = 8


class Encoded(NamedTuple):
    """Ids of a text, and each id's span of characters."""

    ids: list[int]
    offsets: list[tuple[int, int]]


class Tokenizes(Protocol):
    """What tokenises a prompt (:class:`blendrag.model.tokens.Tokens`)."""

    def encode_prompt(self, text: str, begins: bool) -> Encoded: ...
    def encode_text(self, text: str) -> list[int]: ...
    def control_spans(self, text: str) -> list[tuple[int, int]]: ...


@dataclass(frozen=True)
class Segment:
    """A part of the prompt that begins at token ``position``."""

    text: str
    ids: tuple[int, ...]
    position: int
    chunk_id: str | None = None
    stored_ids: tuple[int, ...] = ()
    """Ids of the whole chunk; ``ids`` equal those from ``first`` on."""
    complete: bool = True
    """Whether the whole text of the chunk is in the prompt."""
    first: int = 0
    """The chunk's token that the segment begins with; 0 unless its head is cut off."""

    @property
    def end(self) -> int:
        return self.position + len(self.ids)

    @property
    def scope(self) -> str | None:
        """Where the chunk was learned from prompts; ``None`` if it is one of a document."""
        return None if self.chunk_id is None else scope_of(self.chunk_id)


@dataclass(frozen=True)
class SegmentedPrompt:
    """Segments in order; together they are the prompt."""

    segments: tuple[Segment, ...]

    @cached_property
    def ids(self) -> tuple[int, ...]:
        return tuple(i for segment in self.segments for i in segment.ids)

    @property
    def chunks(self) -> tuple[Segment, ...]:
        return tuple(segment for segment in self.segments if segment.chunk_id is not None)

    @property
    def leading_ids(self) -> tuple[int, ...]:
        """Ids before the first chunk; all ids if there is no chunk."""
        chunks = self.chunks
        return self.ids[: chunks[0].position] if chunks else self.ids


def segment_prompt(
    rendered: str,
    matches: Sequence[Match],
    tokens: Tokenizes,
    chunk_ids: Callable[[str], tuple[int, ...]],
    plain: Sequence[tuple[int, int]] = (),
) -> SegmentedPrompt:
    """Tokenise ``rendered`` and cut it at ``matches`` (ascending, disjoint).

    ``chunk_ids(chunk_id)`` gives the ids of the whole chunk. ``plain``: spans outside of matches,
    ascending, in which what looks like control tokens is text.
    """
    stored = [tuple(chunk_ids(match.chunk_id)) for match in matches]
    return _Cutting(rendered, matches, tokens, stored, plain).segments()


class _Piece(NamedTuple):
    """A part of the prompt that is tokenised as one text."""

    start: int
    end: int
    matches: tuple[int, ...]
    """Numbers of the matches in it."""
    is_plain: bool


class _Shared(NamedTuple):
    """Tokens ``[start, end)`` of a text that equal a chunk's ids from ``first`` on."""

    start: int
    end: int
    first: int = 0


def _aligned(ids: tuple[int, ...], stored: tuple[int, ...], is_inside: bool) -> _Shared:
    """The longest beginning of ``ids`` that ``stored`` begins with.

    ``is_inside``: the text begins inside of the chunk, so it is found anywhere in ``stored``; its first
    tokens, at most :data:`SEAM_TOKENS`, may be others there.
    """
    if not is_inside:
        return _Shared(0, common_prefix(ids, stored))
    # as text, since finding a text in another takes linear time, whatever they repeat
    text, within = ("".join(map(chr, each)) for each in (ids, stored))
    found = _Shared(0, 0)
    for start in range(min(SEAM_TOKENS, len(ids))):
        low, high = found.end - found.start, len(ids) - start
        while low < high:
            middle = (low + high + 1) // 2
            if text[start : start + middle] in within:
                low = middle
            else:
                high = middle - 1
        if low > found.end - found.start:
            found = _Shared(start, start + low, within.find(text[start : start + low]))
    return found


@dataclass
class _Cutting:
    """One prompt while it is cut."""

    text: str
    matches: Sequence[Match]
    tokens: Tokenizes
    stored: Sequence[tuple[int, ...]]
    """Ids of each match's whole chunk."""
    plain: Sequence[tuple[int, int]]
    apart: Counter[int] = field(default_factory=Counter)
    """By the match's number: 1 if it begins a piece, 2 if it is a piece of plain text."""
    encoded: dict[_Piece, Encoded] = field(default_factory=dict)

    def segments(self) -> SegmentedPrompt:
        # At first the whole prompt is one piece. A chunk whose ids differ from the piece's begins a new one;
        # if that does not help, it becomes a piece of plain text.
        pieces = self._pieces()
        while wrong := [n for p in pieces for n in p.matches if self._shared(p, n) is None]:
            self.apart.update(wrong)
            pieces = self._pieces()
        found: list[Segment] = []
        for part in (part for piece in pieces for part in self._parts(piece) if part.ids):
            found.append(replace(part, position=found[-1].end if found else 0))
        return SegmentedPrompt(tuple(found))

    def _pieces(self) -> list[_Piece]:
        matches = self.matches
        alone = [matches[number] for number, times in self.apart.items() if times > 1]
        plain = {*self.plain, *((match.start, match.end) for match in alone)}
        cuts = {0, len(self.text), *(edge for span in plain for edge in span)}
        cuts.update(matches[number].start for number in self.apart)
        return [
            _Piece(
                start,
                end,
                tuple(n for n, match in enumerate(matches) if start <= match.start < end),
                (start, end) in plain,
            )
            for start, end in pairwise(sorted(cuts))
        ]

    def _encode(self, piece: _Piece) -> Encoded:
        if piece not in self.encoded:
            text = self.text[piece.start : piece.end]
            whole = [number for number in piece.matches if self.matches[number].complete]
            if not piece.is_plain:
                self.encoded[piece] = self.tokens.encode_prompt(text, piece.start == 0)
            else:
                ids = self.stored[whole[0]] if whole else self.tokens.encode_text(text)
                self.encoded[piece] = Encoded(list(ids), [])
        return self.encoded[piece]

    def _shared(self, piece: _Piece, number: int) -> _Shared | None:
        """The tokens of the piece that equal the chunk's ids; ``None`` if too few."""
        match, stored, encoded = self.matches[number], self.stored[number], self._encode(piece)
        if piece.is_plain:  # the ends of a cut chunk may fall inside a token
            return _aligned(tuple(encoded.ids), stored, bool(match.head))
        low, high = (
            bisect_left(encoded.offsets, (at - piece.start, 0)) for at in (match.start, match.end)
        )
        shared = _aligned(tuple(encoded.ids[low:high]), stored, bool(match.head))
        start, end = low + shared.start, low + shared.end
        lost = (len(stored) if match.complete else high - start) - (end - start)
        if end == start or lost > SEAM_TOKENS:
            return None
        for before, after in ((low, start), (end, high)):
            if before < after:
                begin, stop = encoded.offsets[before][0], encoded.offsets[after - 1][1]
                if self.tokens.control_spans(self.text[piece.start + begin : piece.start + stop]):
                    return None
        return _Shared(start, end, shared.first)

    def _parts(self, piece: _Piece) -> Iterator[Segment]:
        """The segments of the piece, without their positions; some may have no ids."""
        ids = tuple(self._encode(piece).ids)
        at, seen = 0, piece.start  # tokens and characters so far
        for number in piece.matches:
            match, shared = self.matches[number], self._shared(piece, number)
            assert shared is not None  # the pieces were cut until every chunk shares its tokens
            low, end, first = shared
            if low < end:
                yield Segment(self.text[seen : match.start], ids[at:low], 0)
                text, stored = self.text[match.start : match.end], self.stored[number]
                yield Segment(text, ids[low:end], 0, match.chunk_id, stored, match.complete, first)
                at, seen = end, match.end
        yield Segment(self.text[seen : piece.end], ids[at:], 0)
