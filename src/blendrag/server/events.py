"""Server-sent events, and clients that go away."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Send

from blendrag.errors import BlendragError
from blendrag.server.refusals import ClientGoneError, refusal_of

log = logging.getLogger(__name__)
T = TypeVar("T")
Chunk = Mapping[str, Any]

#: Seconds that a client may leave what was sent unread before it counts as gone.
SEND_TIMEOUT_S = 60.0

_DONE = "data: [DONE]\n\n"


def _event(fields: Chunk) -> str:
    return f"data: {json.dumps(fields, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def streamed(request: Request, chunks: AsyncGenerator[Chunk, None]) -> EventStream:
    """``chunks`` as events. The first is awaited here: an error before it has a status."""
    return EventStream(await while_connected(request, anext(chunks)), chunks)


class EventStream(StreamingResponse):
    """Chunks as events, as they come. If the client leaves or stops reading, ``chunks`` is closed.

    An error is an event, because the status was sent.
    """

    def __init__(self, first: Chunk, chunks: AsyncGenerator[Chunk, None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        self._chunks = chunks
        super().__init__(self._events(first), headers=headers, media_type="text/event-stream")

    async def stream_response(self, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await send(message)
            except TimeoutError:
                raise ClientGoneError(f"nothing was read for {SEND_TIMEOUT_S:g} s") from None

        async with aclosing(self._chunks):
            with suppress(ClientGoneError):  # the server closes the connection
                await super().stream_response(send_in_time)

    async def _events(self, first: Chunk) -> AsyncGenerator[str, None]:
        try:
            yield _event(first)
            async for chunk in self._chunks:
                yield _event(chunk)
        except Exception as exc:
            if not isinstance(exc, BlendragError):
                log.exception("a streamed answer failed")
            yield _event(refusal_of(exc).fields)
        yield _DONE


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of ``work``, which is cancelled if the client leaves; then :class:`ClientGoneError`.

    The body of ``request`` must have been read.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError("the client closed the connection")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait((working, leaving))


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
