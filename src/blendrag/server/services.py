"""The stores that one server answers from; requests choose one by the field ``model``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from blendrag.corpus.embedding_turns import Check, proceed
from blendrag.server.service import ANY_MODEL, Service, not_served
from blendrag.serving.thread_queue import QueueState


class Services:
    """Services that share limits, keys and threads. The first is meant by requests that name no model."""

    def __init__(self, *services: Service) -> None:
        self.first, self._all = services[0], services

    def __iter__(self) -> Iterator[Service]:
        return iter(self._all)

    def of(self, name: str | None) -> Service:
        """The one that a request names. Raises :class:`Refusal` 404."""
        if not name or name == ANY_MODEL:
            return self.first
        for service in self._all:
            if name in service.names:
                return service
        raise not_served(name, *(service.model_id for service in self._all))

    def of_embedder(self, name: str | None, check: Check = proceed) -> Service:
        """The one whose embedder a request names, or whose own name it gives. Raises :class:`Refusal` 404."""
        if not name or name == ANY_MODEL:
            return self.first
        for service in self._all:
            check()
            if name == service.name or name in service.embedder_names:
                return service
        raise not_served(name, *dict.fromkeys(service.embedder_id for service in self._all))

    @property
    def queues(self) -> Sequence[QueueState]:
        """Those that are shared, and those of each engine, by name."""
        shared = {queue.name: queue for queue in self.first.queues}
        for service in self._all[1:]:
            for queue in service.engine.own_queues:
                same = shared[queue.name]
                shared[queue.name] = replace(
                    same,
                    waiting=same.waiting + queue.waiting,
                    running=same.running + queue.running,
                    still_s=max(same.still_s, queue.still_s),
                )
        return [*shared.values()]
