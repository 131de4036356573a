"""A rendered prompt: its text, and where its contents, chunks and answers are."""

from __future__ import annotations

from dataclasses import dataclass

from blendrag.text.matches import Match
from blendrag.text.spans import Span


@dataclass(frozen=True)
class Rendered:
    """A rendered prompt, which is not rendered again. Spans are in characters of ``text``."""

    text: str
    contents: tuple[Span, ...] | None = None
    """Contents of messages, ascending and disjoint; ``None`` if unknown."""
    turn: Span | None = None
    """Content of the last user message, if known."""
    chunks: tuple[Match, ...] | None = None
    """The chunks, if they are known. Then all other text in ``contents`` is tokenised as plain text."""
    plain: tuple[Span, ...] = ()
    """Data that looks like control tokens; ascending and disjoint."""
    replies: tuple[Span, ...] = ()
    """Contents that the model wrote."""
    notes: tuple[str, ...] = ()

    def shared_ends(self, is_begun: bool) -> tuple[int, ...]:
        """Where beginnings of the text end that later prompts may have, ascending: the system message, the
        earlier turns and, if the template begins the answer (``is_begun``), which it may not repeat, the last
        message."""
        contents, turn = self.contents or (), self.turn
        if not contents or turn is None:
            return ()
        ends = {contents[-1][1]} if is_begun else set()
        if len(contents) > 1 and contents[1] not in self.replies and contents[0][1] <= turn[0]:
            ends.add(contents[1][0])
        if len(contents) > 2:
            ends.add(turn[0])
        return tuple(sorted(ends))
