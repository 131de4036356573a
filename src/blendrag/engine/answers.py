"""An answer on its way: :class:`AnswerIterator`, and what names its sources."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace

from blendrag.engine.stream import AnswerStream
from blendrag.engine.types import Answer, Source
from blendrag.retriever.retriever import RetrievedChunk


class AnswerIterator:
    """Text pieces of one answer; :attr:`answer` once exhausted."""

    def __init__(self, stream: AnswerStream, future: Future[Answer]) -> None:
        self._stream = stream
        self._pieces = iter(stream)
        self._future = future
        self.sources: tuple[Source, ...] = ()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        try:
            return next(self._pieces)
        except StopIteration:
            self._future.result()  # an error of the worker surfaces here
            raise
        except BaseException:
            self.abandon()
            raise

    @property
    def answer(self) -> Answer:
        """The whole answer; blocks until it is there."""
        return replace(self._future.result(), sources=self.sources)

    def abandon(self) -> None:
        """Stop generation and return at once; the model is free within one layer or token."""
        self._stream.cancel()

    close = abandon

    def __del__(self) -> None:
        self._stream.cancel()


def cancel_started(starting: asyncio.Future[tuple[AnswerStream, Future[Answer]]]) -> None:
    """Abandon a request whose caller left while it was still being planned."""
    if not starting.cancelled() and starting.exception() is None:
        stream, _ = starting.result()
        stream.cancel()


def sources_of(chunks: Sequence[RetrievedChunk]) -> tuple[Source, ...]:
    """Retrieved chunks as an answer names them."""
    return tuple(Source(c.chunk_id, c.source, c.title, c.distance, c.text) for c in chunks)
