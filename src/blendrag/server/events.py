"""Server-sent events, and clients that go away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Send

from blendrag.server.refusals import ClientGoneError

T = TypeVar("T")

#: Seconds that a client may leave what was sent unread before it counts as gone.
SEND_TIMEOUT_S = 60.0

DONE = "data: [DONE]\n\n"


def event(fields: Mapping[str, Any]) -> str:
    """One event."""
    return f"data: {json.dumps(fields, ensure_ascii=False, separators=(',', ':'))}\n\n"


class EventStream(StreamingResponse):
    """Events as they come. If the client leaves or stops reading, ``events`` is closed."""

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._events = events

    async def stream_response(self, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await send(message)
            except TimeoutError:
                raise ClientGoneError(f"nothing was read for {SEND_TIMEOUT_S:g} s") from None

        async with aclosing(self._events):
            with suppress(ClientGoneError):  # the server closes the connection
                await super().stream_response(send_in_time)


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
