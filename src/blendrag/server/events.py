"""Server-sent events, and clients that go away."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from anyio import CancelScope
from fastapi import Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Send

from blendrag.errors import BlendragError
from blendrag.server.refusals import ClientGoneError, refusal_of

log = logging.getLogger(__name__)
T = TypeVar("T")
Chunk = Mapping[str, Any]
Chunks = AsyncGenerator[Chunk | None, None]

#: Seconds without an event until a comment is sent, which clients skip.
PING_S = 3.0
PING = ": ping\n\n"
#: Seconds that a client may leave what was sent unread before it counts as gone.
SEND_TIMEOUT_S = 60.0

_DONE = "data: [DONE]\n\n"


def _event(fields: Chunk) -> str:
    return f"data: {json.dumps(fields, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def streamed(request: Request, chunks: Chunks) -> EventStream:
    """``chunks`` as events. An error before the first item has a status, unless it takes longer than
    :data:`PING_S`."""
    first = asyncio.ensure_future(anext(chunks))
    try:
        await while_connected(request, asyncio.wait({first}, timeout=PING_S))
        if first.done():
            first.result()  # raises
        return EventStream(first, chunks)
    except BaseException:
        await _ended(first)
        raise


class EventStream(StreamingResponse):
    """Chunks as events, as they come. If the client leaves or stops reading, ``chunks`` is closed.

    It begins with a comment, and sends one whenever :data:`PING_S` seconds have no event, so that no client
    or proxy gives up during a prefill or in the queue. An error is an event, because the status was sent.
    """

    def __init__(self, first: asyncio.Future[Chunk | None], chunks: Chunks) -> None:
        """``first``: the first item of ``chunks``, which may still be awaited. ``None`` among the items is no
        event."""
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        self._first = first
        self._chunks = chunks
        super().__init__(self._events(), headers=headers, media_type="text/event-stream")

    async def stream_response(self, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await send(message)
            except TimeoutError:
                raise ClientGoneError(f"nothing was read for {SEND_TIMEOUT_S:g} s") from None

        async with aclosing(self._chunks), aclosing(self.body_iterator):
            with suppress(ClientGoneError):  # the server closes the connection
                await super().stream_response(send_in_time)

    async def _events(self) -> AsyncGenerator[str, None]:
        coming = self._first
        try:
            yield PING
            while True:
                if not (await asyncio.wait({coming}, timeout=PING_S))[0]:
                    yield PING
                    continue
                if (chunk := coming.result()) is not None:
                    yield _event(chunk)
                coming = asyncio.ensure_future(anext(self._chunks))
        except StopAsyncIteration:
            pass
        except Exception as exc:
            if not isinstance(exc, BlendragError):
                log.exception("a streamed answer failed")
            yield _event(refusal_of(exc).fields)
        finally:
            await _ended(coming)
        yield _DONE


async def _ended(task: asyncio.Future[Any]) -> None:
    task.cancel()
    # anyio, and so Starlette, cancels whatever a cancelled task awaits
    with CancelScope(shield=True):
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # else asyncio logs one that nobody read


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
