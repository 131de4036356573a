"""One replica: an engine and the server over it, called by the ingress."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from ray import serve
from starlette.types import Message

from blendrag.errors import StoreUnavailableError
from blendrag.server.access import Limits
from blendrag_ray.forwarding import WholeRequest, answered
from blendrag_ray.nodes import check_versions
from blendrag_ray.resident_router import DISK, MEMORY, digest
from blendrag_ray.settings import ServedCluster

log = logging.getLogger(__name__)

#: Most keys that a replica reports of each tier, the most recently used.
REPORTED_KEYS = 1 << 14


class Replica:
    """Deployment whose requests come from :class:`blendrag_ray.ingress.Ingress`."""

    def __init__(self, served: ServedCluster, versions: Mapping[str, str]) -> None:
        check_versions(versions)
        from blendrag.server.app import create_app
        from blendrag.server.service import Service, open_engine

        served.documents()  # a store that has vanished is not made anew
        self._engine = served.engine()
        if refused := open_engine(self._engine, needs_blending=not served.schemas):
            log.warning("%s", refused)
        self._routing_keys = self._engine.schemas.routing_keys()
        limits, hosts = Limits(**served.limits), served.allow_hosts
        self._service = Service(self._engine, limits, served.keys(), hosts)
        self._app = create_app(self._service)

    async def answer(
        self, request: WholeRequest, chunks: Mapping[str, int]
    ) -> AsyncGenerator[Message, None]:
        """The ASGI messages of an answer; ``chunks`` are for the router."""
        async with aclosing(answered(self._app, request)) as messages:
            async for message in messages:
                yield message

    async def metrics(self) -> tuple[str, str]:
        """The name of this replica and its counters as Prometheus text."""
        name = serve.get_replica_context().replica_id.unique_id
        store = await self._service.read_or_last("metrics", self._engine.prometheus)
        return name, store + self._service.exposition()

    def record_routing_stats(self) -> dict[str, bytes]:
        """Whose KV is here, for :class:`blendrag_ray.resident_router.ResidentRouter`."""
        store = self._engine.store
        memory, disk = (
            [self._routing_keys.get(key, key) for key in keys]
            for keys in store.resident(REPORTED_KEYS)
        )
        return {MEMORY: digest(memory), DISK: digest(disk)}

    async def check_health(self) -> None:
        """Serve replaces a replica for which this raises."""
        self._service.check_open()
        self._service.check_moving()
        root = self._engine.root
        if not root.exists():
            raise StoreUnavailableError(f"store {root} is gone; restore it, or ingest again")

    def __del__(self) -> None:
        engine: Any = self.__dict__.get("_engine")
        if engine is not None:
            engine.close()
