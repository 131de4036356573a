"""Streamed answers in pieces."""

from __future__ import annotations

import contextvars
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from blendrag.chat.reply import Reasoning

if TYPE_CHECKING:
    from blendrag.engine import Answer, BlendEngine, Options, Prompt
    from blendrag.engine.answers import AnswerIterator

T = TypeVar("T")


class Piece(NamedTuple):
    """Some text or reasoning of an answer; the last piece brings the whole answer with its metrics."""

    text: str
    answer: Answer | None = None
    reasoning: str = ""
    is_queued: bool = False
    """Whether it only tells that the request was checked and waits."""


def stream_pieces(engine: BlendEngine, prompt: Prompt, options: Options) -> Iterator[Piece]:
    """An answer piece by piece. Leaving the loop early stops generation.

    Raises here, not in the loop, for a request that is wrong.
    """
    pieces = engine.stream(prompt, options)
    pieces.with_reasoning = True
    return _pieces(pieces)


def _pieces(pieces: AnswerIterator) -> Iterator[Piece]:
    streamed = False
    try:
        for text in pieces:
            streamed = True
            yield _piece(text)
        yield _last(pieces.answer, streamed)
    finally:
        pieces.close()


async def astream_pieces(
    engine: BlendEngine, prompt: Prompt, options: Options, tells_queued: bool = False
) -> AsyncGenerator[Piece, None]:
    """:func:`stream_pieces` without blocking the event loop; with ``tells_queued``, the first piece
    ``is_queued``."""
    streamed = False
    async with aclosing(engine.astream(prompt, options)) as pieces:
        pieces.with_reasoning = True
        if tells_queued:
            await pieces.submitted()
            yield Piece("", is_queued=True)
        async for text in pieces:
            streamed = True
            yield _piece(text)
        yield _last(pieces.answer, streamed)


def _piece(text: str) -> Piece:
    return Piece("", None, str(text)) if isinstance(text, Reasoning) else Piece(text)


def _last(answer: Answer, streamed: bool) -> Piece:
    # transformers does not stream beams and several sequences: all their text comes at the end
    return Piece("", answer) if streamed else Piece(answer.text, answer, answer.reasoning)


async def to_thread(call: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """``asyncio.to_thread`` that raises :class:`NoThreadError` where no thread can be started."""
    from blendrag.engine.answers import in_pool

    context = contextvars.copy_context()
    return await in_pool(partial(context.run, call, *args, **kwargs))
