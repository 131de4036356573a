"""Streamed answers in pieces, and which of their text can be shown while tool calls may follow."""

from __future__ import annotations

import contextvars
import re
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from blendrag.frameworks.tools import call_form

if TYPE_CHECKING:
    from blendrag.engine import Answer, BlendEngine, Options, Prompt
    from blendrag.model.tokens import Tokens

T = TypeVar("T")


class Piece(NamedTuple):
    """Some text of an answer; the last piece brings the whole answer with its metrics."""

    text: str
    answer: Answer | None = None


def stream_pieces(engine: BlendEngine, prompt: Prompt, options: Options) -> Iterator[Piece]:
    """An answer piece by piece. Leaving the loop early stops generation."""
    pieces = engine.stream(prompt, options)
    streamed = False
    try:
        for text in pieces:
            streamed = True
            yield Piece(text)
        yield _last(pieces.answer, streamed)
    finally:
        pieces.close()


async def astream_pieces(
    engine: BlendEngine, prompt: Prompt, options: Options
) -> AsyncGenerator[Piece, None]:
    """:func:`stream_pieces` without blocking the event loop."""
    streamed = False
    async with aclosing(engine.astream(prompt, options)) as pieces:
        async for text in pieces:
            streamed = True
            yield Piece(text)
        yield _last(pieces.answer, streamed)


def _last(answer: Answer, streamed: bool) -> Piece:
    # transformers does not stream beams and several sequences: all their text comes at the end
    return Piece("" if streamed else answer.text, answer)


async def to_thread(call: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """``asyncio.to_thread`` that raises :class:`NoThreadError` where no thread can be started."""
    from blendrag.engine.answers import in_pool

    context = contextvars.copy_context()
    return await in_pool(partial(context.run, call, *args, **kwargs))


class StreamedText:
    """The text of a growing answer that is certainly no part of a tool call.

    What may become a call is held back until the whole answer can be parsed (:func:`tools.parse`).
    """

    #: The beginning of a call in a model's template, before its name: a tag, or JSON.
    _OPENER = re.compile(r"<[^<>]+>|\[[A-Z_]+\]|\{")

    def __init__(self, tokens: Tokens | None = None, opening: str = "") -> None:
        """``tokens``: the model's, if it was offered tools; without, all text is shown.
        ``opening``: the beginning of a call that was written for the model."""
        self._shown: list[str] = []
        self._held = ""  # what follows the shown text, and may belong to a call
        self._is_call = bool(opening)
        self._holds_back = tokens is not None
        form = None if tokens is None else call_form(tokens)
        before = "" if form is None else form.before.lstrip()
        found = self._OPENER.match(before)
        openers = [found[0]] if found is not None else before.split()[:1]
        self._is_bare_json = openers == ["{"]
        # beginnings of calls, and control tokens, which are never shown
        specials = () if tokens is None else tokens.special_texts
        marks = {*openers, *specials} - {"", "{"}
        self._marks = re.compile("|".join(map(re.escape, marks)) or r"(?!)")
        self._beginnings = {mark[:size] for mark in marks for size in range(1, len(mark))}
        self._longest = max(map(len, marks), default=0)

    def add(self, piece: str) -> str:
        """The text that ``piece`` adds."""
        if self._is_call:
            return ""
        if self._holds_back:
            held = self._held + piece
            if not held.strip():  # a call or more text may follow
                self._held = held
                return ""
            size = self._certain(held)
            piece, self._held = held[:size], held[size:]
        self._shown.append(piece)
        return piece

    @property
    def text(self) -> str:
        """All text that was added."""
        self._shown = ["".join(self._shown)]
        return self._shown[0]

    def rest(self, whole: str) -> str:
        """The text that ``whole``, the final text without its calls, adds at the end."""
        if whole.startswith(self.text):
            return whole[len(self.text) :]
        return whole.lstrip()[len(self.text.lstrip()) :]  # text next to calls is stripped

    def _certain(self, held: str) -> int:
        """Characters of ``held`` that can be shown: up to a mark or what may become one, and to white space
        before it."""
        if self._is_bare_json:
            self._is_call = held.lstrip()[:1] == "{"  # a call without marks is the whole answer
            if self._is_call:
                return 0
            self._is_bare_json = False
        end = len(held)
        if found := self._marks.search(held):
            self._is_call, end = True, found.start()
        else:
            for at in range(max(0, end - self._longest + 1), end):
                if held[at:] in self._beginnings:
                    end = at
                    break
        return len(held[:end].rstrip())
