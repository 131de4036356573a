"""HTTP over a handle of Ray Serve: the ingress sends a whole request, the replica answers in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from blendrag.cluster.backlog import Progress

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
    progress: Progress | None = None
    """Of a request that computes an answer, for the router; a replica does not use it."""

    @classmethod
    def of(cls, scope: Scope, body: bytes) -> WholeRequest:
        progress = Progress() if scope["path"] in COMPUTED else None
        return cls({name: scope[name] for name in _KEPT if name in scope}, body, progress)


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
