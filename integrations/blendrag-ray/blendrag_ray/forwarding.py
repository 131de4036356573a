"""HTTP over a handle of Ray Serve: the ingress sends a whole request, the replica answers in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Message, Scope, Send

from blendrag.serving.open_requests import OpenRequest

#: What is kept of a request's scope.
_KEPT = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers",
         "client", "server")  # fmt: skip
#: Paths whose answers the model computes; others keep no replica busy.
COMPUTED = ("/v1/chat/completions", "/v1/completions")


@dataclass(frozen=True)
class WholeRequest:
    """A request whose body was read."""

    scope: dict[str, Any]
    body: bytes
    progress: OpenRequest | None = None
    """How far it is, if it computes an answer: for the router, which is in the process of the ingress. A
    replica does not use it."""

    @classmethod
    def of(cls, scope: Scope, body: bytes) -> WholeRequest:
        progress = OpenRequest() if scope["path"] in COMPUTED else None
        return cls({name: scope[name] for name in _KEPT if name in scope}, body, progress)


class Relayed:
    """What a client has got of an answer. Another replica may begin it anew while only comments were sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.is_stream = False
        """Whether the headers of a stream were sent."""
        self.has_content = False
        """Whether anything was sent that another replica cannot send again."""
        self._is_ok = False
        self._error: bytes | None = None
        """What an error that came after the headers holds so far."""

    @property
    def is_answer(self) -> bool:
        """Whether a part of an answer was sent, no error."""
        return self.has_content and self._is_ok

    async def pass_on(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._begin(message)
            return
        body = message.get("body", b"")
        if self._error is not None:
            self._error += body
            if not message.get("more_body", False):
                await self.fail(self._error)
            return
        if body and not (self.is_stream and body.startswith(b":")):
            self.has_content = True
        await self._send(message)

    async def fail(self, error: bytes) -> None:
        """End the stream with an error, which is JSON."""
        self.has_content = True
        ending = b"data: " + error + b"\n\ndata: [DONE]\n\n"
        await self._send({"type": "http.response.body", "body": ending, "more_body": False})

    async def _begin(self, message: Message) -> None:
        """Send the head of an answer, unless one was sent. What is then no stream is an error."""
        is_stream = any(
            name == b"content-type" and b"event-stream" in value
            for name, value in message["headers"]
        )
        if self.is_stream:
            self._error = None if is_stream else b""
            return
        self.is_stream = is_stream
        self.has_content = not is_stream
        self._is_ok = message["status"] == HTTPStatus.OK
        await self._send(message)


async def answered(app: ASGIApp, request: WholeRequest) -> AsyncGenerator[Message, None]:
    """The messages with which ``app`` answers. Closing or cancelling this ends the request in ``app``."""
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    body: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]
    left = asyncio.Event()

    async def receive() -> Message:
        if body:
            return body.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app({**request.scope, "root_path": ""}, receive, messages.put)
        finally:
            messages.put_nowait(None)

    running = asyncio.ensure_future(run())
    try:
        while (message := await messages.get()) is not None:
            yield message
        await running  # raises what it raised
    finally:
        left.set()
        running.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await running
