"""The known chunks of a rendered prompt, and what else of it is tokenised as plain text.

Chunks are searched only inside contents, so that a document of template markup cannot turn markup into plain
text. If contents are unknown (the caller rendered the prompt), no match covers a control token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from blendrag.text.matches import Match
from blendrag.text.passages import FreshText
from blendrag.text.questions import split_question
from blendrag.text.recognition import ChunkIndex
from blendrag.text.rendered import Rendered
from blendrag.text.spans import Span, gaps, merged, overlapping, without


class ChunkText(Protocol):
    """A chunk as the corpus has it."""

    @property
    def text(self) -> str: ...
    @property
    def source(self) -> str: ...


@dataclass(frozen=True)
class KnownChunks:
    chunks: tuple[Match, ...] = ()
    """Document chunks, ascending and disjoint."""
    stored: Mapping[str, ChunkText] = field(default_factory=dict)
    """The chunks as the corpus has them, by id."""
    plain: tuple[Span, ...] = ()
    """Other text to tokenise as plain text; ascending, outside chunks."""
    notes: tuple[str, ...] = ()
    fresh: FreshText | None = None
    """``None`` if the prompt's chunks were given."""


#: Returns, by id, those of the given chunks that the corpus has.
LookUp = Callable[[Sequence[Match]], Mapping[str, ChunkText]]


def recognise(
    rendered: Rendered, control: Sequence[Span], index: ChunkIndex | None, look_up: LookUp
) -> KnownChunks:
    """The chunks of ``index`` in ``rendered``. ``control``: what looks like control tokens in it."""
    if rendered.chunks is not None:  # looked up, but not searched for
        stored = look_up(rendered.chunks)
        there = tuple(match for match in rendered.chunks if match.chunk_id in stored)
        holes = [(match.start, match.end) for match in there]
        rest = [*without(rendered.contents or (), holes), *without(rendered.plain, holes)]
        return KnownChunks(there, stored, tuple(overlapping(merged(rest), control)))
    text, contents = rendered.text, rendered.contents
    within = gaps(control, len(text)) if contents is None else contents
    turn = rendered.turn
    if turn is None:  # the last piece between control tokens with more than a role's name
        said = [span for span in within if len(text[slice(*span)].split()) > 1]
        turn = said[-1] if said else (0, len(text))
    found, notes = index.found_in(text, within) if index is not None else ([], ())
    chunks, why_computed = split_question(found, text, turn)
    taken = [(match.start, match.end) for match in found]
    replies = set(rendered.replies)
    asked = [span for span in within if span not in replies]
    fresh = FreshText(text, tuple(without(asked, taken)), tuple(found), turn, tuple(control))
    if index is None:
        return KnownChunks(plain=rendered.plain, fresh=fresh)
    holes = [(match.start, match.end) for match in chunks]
    maybe = without(rendered.plain, holes)
    if contents is not None and overlapping(contents, control):
        left = without(contents, holes)
        maybe += index.loosely_in(text, left, found)
    stored = look_up(chunks)
    there = tuple(match for match in chunks if match.chunk_id in stored)
    removed = [(m.start, m.end) for m in chunks if m.chunk_id not in stored]  # by another process
    plain = [*overlapping(merged(maybe), control), *overlapping(control, removed)]
    return KnownChunks(there, stored, tuple(merged(plain)), (*notes, *why_computed), fresh)
