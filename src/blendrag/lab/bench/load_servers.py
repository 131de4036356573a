"""Three ways to answer the same requests, each with what it keeps between them in equal bytes.

``full`` keeps nothing. ``prefix`` is idealised prefix caching: KV of whole chunks behind exactly the
chunks before them, in memory, least recently used goes first; taking it in costs nothing. ``blend`` is a
KV store of that size in some tier, through the controller and the fusor, as an ingest of the corpus left
it; chunks that are missing are encoded and stored before the answer, as an engine does while others wait.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from blendrag.fusor import BlendRequest, Fusor
from blendrag.fusor.loader import LoadedSpan
from blendrag.fusor.selection import Schedule, make_policy
from blendrag.lab.bench.tiers import TierStore
from blendrag.lab.bench.workload import NEW_TOKENS, PREFIX_IDS, Workload
from blendrag.model import ModelAdapter
from blendrag.planning.controller import Controller, PlanOptions
from blendrag.store import MemoryStore
from blendrag.store.identity import chunk_key
from blendrag.store.kv import ChunkKV
from blendrag.text.prompt import PromptPlan


@dataclass(frozen=True)
class Served:
    """One request: its token, seconds to it, and prompt tokens whose KV was there."""

    token: int
    first_s: float
    reused_tokens: int


class Server(Protocol):
    """Answers one request after the other."""

    def serve(self, plan: PromptPlan) -> Served: ...


class FullServer:
    """A stock prefill of every prompt."""

    def __init__(self, adapter: ModelAdapter) -> None:
        self._adapter = adapter

    def serve(self, plan: PromptPlan) -> Served:
        """See :class:`Server`."""
        adapter = self._adapter
        ids = torch.tensor([plan.ids], device=adapter.device)
        began = _now(adapter)
        out = adapter.model(input_ids=ids, use_cache=True, logits_to_keep=1)
        token = int(out.logits[0, -1].argmax())
        return Served(token, _now(adapter) - began, 0)


class PrefixServer:
    """The longest known prefix of chunks is there already; the rest goes through the fusor."""

    def __init__(self, adapter: ModelAdapter, limit_bytes: int) -> None:
        self._adapter = adapter
        self._fusor = Fusor(adapter)
        self._known = MemoryStore(limit_bytes)

    def serve(self, plan: PromptPlan) -> Served:
        """See :class:`Server`."""
        adapter, tokens = self._adapter, len(plan.ids)
        ids = torch.tensor([plan.ids], device=adapter.device)
        began = _now(adapter)
        spans = self._open(plan)
        request = BlendRequest(tokens, spans, make_policy("full"), Schedule("constant"), 1.0)
        logits, cache, _ = self._fusor.prefill(ids, request, NEW_TOKENS)
        token = int(logits[0, -1].argmax())
        first_s = _now(adapter) - began
        for span in spans:
            span.reader.close()
        self._keep(plan, cache.buffers(tokens))
        return Served(token, first_s, sum(span.tokens for span in spans))

    def _open(self, plan: PromptPlan) -> tuple[LoadedSpan, ...]:
        depth = 0
        for name in _prefixes(plan):
            if not self._known.contains("", name):
                break
            depth += 1
        layout = self._adapter.layout
        spans = []
        # The last one first: what stands behind a chunk is of no use without it, so it goes before it.
        for segment, name in reversed(list(zip(plan.chunks, _prefixes(plan), strict=True))[:depth]):
            reader = self._known.open("", name, layout, len(segment.ids))
            assert reader is not None
            at = segment.position
            spans.append(LoadedSpan(at, segment.end, reader, at, exact=True))
        return tuple(reversed(spans))

    def _keep(self, plan: PromptPlan, buffers: Sequence[torch.Tensor]) -> None:
        layout = self._adapter.layout
        for segment, name in reversed(list(zip(plan.chunks, _prefixes(plan), strict=True))):
            if not self._known.contains("", name):
                layers = [b[:, :, segment.position : segment.end].cpu() for b in buffers]
                self._known.put("", name, ChunkKV(layout, len(segment.ids), tuple(layers)))


def _prefixes(plan: PromptPlan) -> list[str]:
    """A name for each chunk behind all those before it."""
    names = [str(segment.chunk_id) for segment in plan.chunks]
    return [" ".join(names[: i + 1]) for i in range(len(names))]


class BlendServer:
    """Stored chunks wherever they stand, a share of their tokens recomputed."""

    def __init__(self, adapter: ModelAdapter, there: TierStore, workload: Workload) -> None:
        self._adapter, self._there, self._workload = adapter, there, workload
        self._fusor = Fusor(adapter)
        self._namespace = adapter.identity.encoded(workload.encoding).namespace
        self._controller = Controller(
            adapter, there.store, self._namespace, PREFIX_IDS, 1, workload.encoding
        )

    def ingest(self, corpus: Iterable[tuple[int, ...]]) -> None:
        """Encode and store its chunks in that order; of a store too small for all, the last are left."""
        for ids in corpus:
            self._encode(ids)

    def serve(self, plan: PromptPlan) -> Served:
        """See :class:`Server`."""
        adapter, workload = self._adapter, self._workload
        ids = torch.tensor([plan.ids], device=adapter.device)
        self._there.prepare()
        began = _now(adapter)
        missing = self._controller.missing(plan)
        self.ingest(missing)
        schedule = Schedule.parse(workload.schedule)
        options = PlanOptions(
            "blend", make_policy(workload.policy), lambda _: schedule, workload.ratio
        )
        load = self._controller.plan(plan, options)
        try:
            logits, _, _ = self._fusor.prefill(ids, load.request(len(plan.ids)), NEW_TOKENS)
            token = int(logits[0, -1].argmax())
            first_s = _now(adapter) - began
        finally:
            load.close()
        return Served(token, first_s, load.reused_tokens - sum(map(len, missing)))

    def _encode(self, ids: tuple[int, ...]) -> None:
        kv = self._adapter.encode(PREFIX_IDS, ids)
        kept = replace(kv, layout=kv.layout.encoded(self._workload.encoding))
        self._there.store.put(self._namespace, chunk_key(self._namespace, PREFIX_IDS, ids), kept)


def _now(adapter: ModelAdapter) -> float:
    if adapter.device.type == "cuda":
        torch.cuda.synchronize(adapter.device)
    return time.perf_counter()
