"""The ingress: recognises chunks and modules of a request and passes it to a replica. It holds no model."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from blendrag.engine.exposition import joined
from blendrag.errors import BlendragError
from blendrag.server.access import UPLOAD, AccessControlMiddleware, Limits
from blendrag.server.admission import RETRY_AFTER_S
from blendrag.server.cross_origin import CrossOriginMiddleware
from blendrag.server.refusals import Refusal
from blendrag_ray.chunk_keys import ChunkKeys
from blendrag_ray.forwarding import Relayed, WholeRequest
from blendrag_ray.nodes import check_versions
from blendrag_ray.settings import ServedCluster

log = logging.getLogger(__name__)

#: Replicas that a request is sent to, one after another, if they end before they have sent anything.
MAX_REPLICAS_TRIED = 3
METRICS_S = 5.0
#: Requests that would change the corpus of one node.
CHANGING_ROUTES = {
    ("POST", "/v1/ingest"),
    ("DELETE", "/v1/documents"),
    ("GET", "/v1/uploads"),
    UPLOAD,
}
CHANGES_REFUSED = (
    "replicas do not change documents; use blendrag ingest and blendrag remove on the store, and with a "
    "remote blendrag store publish, which the replicas follow"
)
REPLICA_LOST = "the replica that answered ended; send the request again"


class Ingress:
    """Deployment that Serve's proxies pass HTTP requests to."""

    def __init__(self, served: ServedCluster, versions: Mapping[str, str], replicas: Any) -> None:
        check_versions(versions)
        self._all = replicas
        self._replicas = replicas.options(method_name="answer", stream=True)
        self._keys = ChunkKeys(served.engine(is_ingress=True))
        max_body_bytes = Limits(**served.limits).max_body_bytes
        door = AccessControlMiddleware(
            self._pass_on, served.keys(), max_body_bytes, served.allow_hosts
        )
        origins = served.cors_origins
        self._door = CrossOriginMiddleware(door, origins) if origins else door

    async def __call__(self, request: Request) -> Response:
        return _ThroughApp(self._door)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (scope["method"], scope["path"]) in CHANGING_ROUTES:
            return await Refusal(403, CHANGES_REFUSED).response()(scope, receive, send)
        if scope["path"] == "/metrics":
            return await (await self._metrics())(scope, receive, send)
        return await self._forward(scope, receive, send)

    async def _metrics(self) -> Response:
        from blendrag.server.app import EXPOSITION

        try:
            texts = await self._all.broadcast("metrics").results_async(
                timeout_s=METRICS_S, return_exceptions=True
            )
        except TimeoutError:
            texts = []
        by_replica = (
            (f'replica="{each[0]}"', each[1]) for each in texts if isinstance(each, tuple)
        )
        return PlainTextResponse(joined(by_replica), media_type=EXPOSITION)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]  # AccessControlMiddleware has read all of it
        chunks = await asyncio.to_thread(self._chunks_of, body) if body else {}
        request = WholeRequest.of(scope, body)
        reply = Relayed(send)
        try:
            for _ in range(MAX_REPLICAS_TRIED):
                if await self._is_answered(request, chunks, reply):
                    return
            raise Refusal(503, REPLICA_LOST)
        except BackPressureError:
            refusal = Refusal(
                429,
                "too many requests wait; ask again later",
                code="server_overloaded",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )
        except Refusal as lost:
            refusal = lost
        finally:
            if request.progress is not None:
                request.progress.has_ended = True
        if reply.is_stream:
            await reply.fail(json.dumps(refusal.fields).encode())
        else:
            await refusal.response()(scope, receive, send)

    async def _is_answered(
        self, request: WholeRequest, chunks: dict[str, int], reply: Relayed
    ) -> bool:
        """``False`` if the replica ended before it sent anything but comments."""
        try:
            async for message in self._replicas.remote(request, chunks=chunks):
                await reply.pass_on(message)
                if request.progress is not None and reply.is_answer:
                    request.progress.begun_at = request.progress.begun_at or time.monotonic()
        except RayActorError:
            if not reply.has_content:
                return False
            if not reply.is_stream:
                raise
            await reply.fail(json.dumps(Refusal(503, REPLICA_LOST).fields).encode())
        return True

    def _chunks_of(self, body: bytes) -> dict[str, int]:
        try:
            return self._keys.of(body)
        except (BlendragError, OSError) as error:
            log.warning("the chunks of a request are not known, so any replica gets it: %s", error)
            return {}


class _ThroughApp(Response):
    """What Serve takes as a response: an ASGI application that answers."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)
