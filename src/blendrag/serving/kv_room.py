"""Room for the next token of every running call, the oldest first.

An answer grows within the memory for running requests (:mod:`blendrag.serving.kv_budget`). If that is short,
the newest calls wait, and their KV is put aside if older ones need its place.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from blendrag.model.adapter import ModelAdapter
from blendrag.serving.chunk_pool import ChunkPool
from blendrag.serving.coroutine import Coroutine
from blendrag.serving.hybrid_rows import HybridPool
from blendrag.serving.kv_budget import KVBudget
from blendrag.serving.kv_pool import KVPool

log = logging.getLogger(__name__)


class KVRoom:
    """The KV of the running calls, within a budget. Used on one thread."""

    def __init__(self, budget: KVBudget) -> None:
        self.budget = budget
        self._pools: dict[ModelAdapter, KVPool[Any]] = {}

    def pool_of(self, call: Coroutine) -> KVPool[Any]:
        """What calls on the model of ``call`` hold."""
        adapter = call.adapter
        assert adapter is not None
        if adapter not in self._pools:
            self._pools[adapter] = (
                ChunkPool(adapter, self.budget.limit_bytes)
                if adapter.composition is None
                else HybridPool(adapter)
            )
        return self._pools[adapter]

    def close(self) -> None:
        """Forget the models, once no call runs any more."""
        self._pools.clear()

    def leave(self, call: Coroutine) -> None:
        if call.kv is not None and call.adapter in self._pools:
            self._pools[call.adapter].leave(call.kv)

    def ready(
        self, running: Sequence[Coroutine]
    ) -> tuple[list[Coroutine], dict[Coroutine, Exception]]:
        """Those of ``running``, the oldest first, that have room for their next token or get it now, and the
        errors of those that end because room cannot be allocated or their time is over while they wait.

        One call always goes on, whatever it takes. Calls that are paused are neither.
        """
        calls = [call for call in running if not call.is_paused]
        if all(call.has_room for call in calls):
            self.budget.is_short = False
            return calls, {}
        ready: list[Coroutine] = []
        waiting: list[Coroutine] = []
        failed: dict[Coroutine, Exception] = {}
        with torch.inference_mode():
            for call in calls:
                try:
                    # none comes back before one that is older
                    has_room = call.has_room or (
                        not (call.is_aside and waiting) and self._get_room(call, running)
                    )
                except Exception as exc:  # memory is shorter than its limit says
                    failed[call] = exc
                else:
                    (ready if has_room else waiting).append(call)
            while waiting and not ready and len(calls) == len(running):
                oldest = waiting.pop(0)
                try:
                    self._grow(oldest)
                    ready.append(oldest)
                except Exception as exc:
                    failed[oldest] = exc
        self.budget.is_short = bool(waiting)
        for call in waiting:
            try:
                assert call.share is not None
                call.share.check()
            except Exception as over:
                failed[call] = over
        return ready, failed

    def _get_room(self, call: Coroutine, running: Sequence[Coroutine]) -> bool:
        """Make room for the next token of ``call``, from newer calls if need be; ``False``: there is none."""
        assert call.share is not None
        newer = [*running[running.index(call) + 1 :]]
        while not self.budget.fits(call.share.needed_bytes):
            while newer and not newer[-1].may_be_put_aside:
                newer.pop()
            if not newer:
                return False
            try:
                kv, share = newer[-1].kv, newer[-1].share
                assert kv is not None
                assert share is not None
                self.pool_of(newer[-1]).put_aside(kv)
                share.is_aside = True
            except Exception as exc:  # no place for it, such as a full disk: it stays
                log.warning("the KV of a request could not be put aside: %s", exc)
            newer.pop()
        self._grow(call)
        return True

    def _grow(self, call: Coroutine) -> None:
        """Allocate the room that ``call`` needs."""
        share, kv = call.share, call.kv
        assert share is not None
        before, share.room = share.room, share.needed_room
        left = share.room - share.used + 1
        if share.is_aside:
            assert kv is not None
            self.pool_of(call).take_back(kv, left)
            share.is_aside = False
        elif kv is not None and call.step is not None and share.room > before:
            if kv.is_part:
                share.pinned_tokens = before
            self.pool_of(call).reserve(kv, left)
