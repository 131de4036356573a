"""A rendered prompt becomes a :class:`PromptPlan`: fresh and chunk segments with ids and positions.

Owns the cutting. Chunks are found by content, not by a separator, and the prompt is tokenised as one text:
its ids are those of the stock tokenizer. A chunk lends its KV to the tokens that are its own; a last token
that merged with the text behind it (``".\\n\\n"``) is computed. A chunk is tokenised apart, as plain text,
where its text looks like control tokens or merges with what is before it.

Does not know stores: whether a chunk has KV is decided later. The mode ``full`` means a stock prefill of
exactly ``plan.ids``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, Protocol

#: Most tokens at its end that a chunk may lose to the text behind it before it is tokenised apart.
SEAM_TOKENS = 8


class Encoded(NamedTuple):
    """Ids of a text, and from which to which character each goes."""

    ids: list[int]
    offsets: list[tuple[int, int]]


class Tokenizes(Protocol):
    """What a prompt is tokenised with (:class:`blendrag.model.tokens.Tokens`)."""

    def encode_prompt(self, text: str, begins: bool) -> Encoded: ...
    def encode_text(self, text: str) -> list[int]: ...
    def control_spans(self, text: str) -> list[tuple[int, int]]: ...


class ChunkMatch(Protocol):
    """A chunk found at ``prompt[start:end]`` (:class:`blendrag.text.recognition.Match`)."""

    @property
    def chunk_id(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def complete(self) -> bool: ...


@dataclass(frozen=True)
class Segment:
    """A stretch of the prompt, beginning at token ``position``."""

    text: str
    ids: tuple[int, ...]
    position: int
    chunk_id: str | None = None
    stored_ids: tuple[int, ...] = ()
    """Ids of the whole chunk; ``ids`` is a prefix of them."""
    complete: bool = True
    """Whether all of the chunk's text is in the prompt."""

    @property
    def end(self) -> int:
        return self.position + len(self.ids)


@dataclass(frozen=True)
class PromptPlan:
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
        """Ids before the first chunk; all of them where there is none."""
        ids: list[int] = []
        for segment in self.segments:
            if segment.chunk_id is not None:
                break
            ids.extend(segment.ids)
        return tuple(ids)


def make_plan(
    rendered: str,
    matches: Sequence[ChunkMatch],
    tokens: Tokenizes,
    chunk_ids: Callable[[str], tuple[int, ...]],
    plain: Sequence[tuple[int, int]] = (),
) -> PromptPlan:
    """Tokenise ``rendered`` and cut it at ``matches`` (ascending, disjoint).

    ``chunk_ids(chunk_id)`` gives the ids of the whole chunk. ``plain``: spans outside of matches,
    ascending, in which what looks like control tokens is text.
    """
    return _Cutting(rendered, matches, tokens, chunk_ids, plain).plan()


class _Piece(NamedTuple):
    """A stretch of the prompt that is tokenised as one text."""

    start: int
    end: int
    matches: tuple[int, ...] = ()
    """Numbers of the chunks in it."""
    is_plain: bool = False


class _Cutting:
    """One prompt on its way to a plan.

    Everything is one piece at first. A chunk whose ids are not those of the piece's tokens begins a piece;
    where that does not help, it is a piece.
    """

    def __init__(
        self,
        rendered: str,
        matches: Sequence[ChunkMatch],
        tokens: Tokenizes,
        chunk_ids: Callable[[str], tuple[int, ...]],
        plain: Sequence[tuple[int, int]],
    ) -> None:
        self._text, self._matches, self._tokens = rendered, matches, tokens
        self._stored = [tuple(chunk_ids(match.chunk_id)) for match in matches]
        self._plain = plain
        self._begins: set[int] = set()
        self._apart: set[int] = set()
        self._encoded: dict[tuple[int, int], Encoded] = {}

    def plan(self) -> PromptPlan:
        while True:
            pieces = self._pieces()
            wrong = [
                number
                for piece in pieces
                for number in piece.matches
                if not piece.is_plain and self._shared(piece, number) is None
            ]
            if not wrong:
                break
            for number in wrong:
                at_start = any(piece.start == self._matches[number].start for piece in pieces)
                (self._apart if at_start else self._begins).add(number)
        return PromptPlan(tuple(self._segments(pieces)))

    def _pieces(self) -> list[_Piece]:
        matches = self._matches
        cuts = {0, len(self._text)}
        alone = {(matches[n].start, matches[n].end) for n in self._apart}
        cuts.update(edge for span in (*self._plain, *alone) for edge in span)
        cuts.update(matches[number].start for number in self._begins)
        edges = sorted(cuts)
        pieces = []
        for start, end in pairwise(edges):
            inside = [n for n, m in enumerate(matches) if start <= m.start < end]
            is_plain = (start, end) in alone or (start, end) in self._plain
            pieces.append(_Piece(start, end, tuple(inside), is_plain))
        return pieces

    def _encode(self, piece: _Piece) -> Encoded:
        key = (piece.start, piece.end)
        if key not in self._encoded:
            text = self._text[piece.start : piece.end]
            self._encoded[key] = self._tokens.encode_prompt(text, piece.start == 0)
        return self._encoded[key]

    def _shared(self, piece: _Piece, number: int) -> tuple[int, int] | None:
        """From which to which token of the piece the ids are the chunk's; ``None`` if too few are."""
        match, stored, encoded = self._matches[number], self._stored[number], self._encode(piece)
        low, high = (
            bisect_left(encoded.offsets, (at - piece.start, 0)) for at in (match.start, match.end)
        )
        end = low + _common_prefix(encoded.ids[low:high], stored)
        lost = (len(stored) if match.complete else high - low) - (end - low)
        if end == low or lost > SEAM_TOKENS:
            return None
        if end < high:
            begin, stop = encoded.offsets[end][0], encoded.offsets[high - 1][1]
            if self._tokens.control_spans(self._text[piece.start + begin : piece.start + stop]):
                return None
        return low, end

    def _segments(self, pieces: Sequence[_Piece]) -> list[Segment]:
        made: list[Segment] = []
        position = 0

        def add(ids: Sequence[int], text: str, number: int | None = None) -> None:
            nonlocal position
            if not ids:
                return
            if number is None:
                made.append(Segment(text, tuple(ids), position))
            else:
                match, stored = self._matches[number], self._stored[number]
                made.append(
                    Segment(text, tuple(ids), position, match.chunk_id, stored, match.complete)
                )
            position += len(ids)

        for piece in pieces:
            text = self._text[piece.start : piece.end]
            if piece.is_plain:
                number = piece.matches[0] if piece.matches else None
                if number is not None and self._matches[number].complete:
                    add(self._stored[number], text, number)
                    continue
                ids = self._tokens.encode_text(text)
                # The cut may fall inside a token: only the ids both tokenisations share are the chunk's.
                shared = 0 if number is None else _common_prefix(ids, self._stored[number])
                add(ids[:shared], text, number)
                add(ids[shared:], "" if shared else text)
                continue
            encoded, at, seen = self._encode(piece), 0, 0
            for number in piece.matches:
                match = self._matches[number]
                low, end = self._shared(piece, number) or (at, at)
                start = match.start - piece.start
                add(encoded.ids[at:low], text[seen:start])
                seen = match.end - piece.start
                add(encoded.ids[low:end], text[start:seen], number)
                at = end
            add(encoded.ids[at:], text[seen:])
        return made


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens that both begin with, found by comparing halves: no loop over tokens."""
    a, b = tuple(a), tuple(b)
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
