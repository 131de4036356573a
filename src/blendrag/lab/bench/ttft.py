"""Time to first token: stock prefill, idealised prefix caching, full reuse and blend in one run.

Rounds are interleaved (full, prefix, reuse, blend, full, …) and medians taken, so that a machine
that slows down slows everybody down. Inside the time: looking up, opening, reading and verifying the
chunks in the store (on disk with a warm page cache, unless another tier is asked for), re-positioning,
selecting, recomputing, the last logits and the choice of the token. Outside is the rest of a query's
way: retrieval, the chat template, finding the chunks in the prompt and tokenising (the prompt is cut
once, before the first round), the check of the model's identity, and the way to the engine's thread and
back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from transformers import DynamicCache

from blendrag.config import Mode
from blendrag.errors import InvalidInputError
from blendrag.fusor import BlendRequest, Fusor
from blendrag.fusor.loader import LoadedSpan
from blendrag.fusor.request import FusionCounts
from blendrag.fusor.selection import Schedule, make_policy
from blendrag.lab.bench.compiled import Compiled, compiled_prefill
from blendrag.lab.bench.memory import peak_bytes
from blendrag.lab.bench.rounds import interleaved
from blendrag.lab.bench.tiers import ON_DISK, BenchTier, TierStore, tier_store
from blendrag.lab.bench.ttft_results import TtftResult
from blendrag.lab.bench.workload import NEW_TOKENS, PREFIX_IDS, Workload, random_plan
from blendrag.model import ModelAdapter
from blendrag.planning.controller import Controller, PlanOptions
from blendrag.planning.plan import Plan
from blendrag.store import KVReader, KVStore, MemoryStore
from blendrag.store.encodings import stored_chunk_bytes
from blendrag.store.identity import chunk_key
from blendrag.store.kv import ChunkKV

#: Ways to prefill behind a cached first chunk; the faster one is the baseline.
PREFIX_WAYS = ("prefix_stock", "prefix_fused")


class TtftBench:
    """Chunks in a store, a prompt over them, and one callable per mode."""

    def __init__(self, adapter: ModelAdapter, workload: Workload, store: KVStore) -> None:
        adapter.require_blendable()
        self.adapter = adapter
        self.workload = workload
        self._store = store
        self.fusor = Fusor(adapter)
        self._namespace = adapter.identity.encoded(workload.encoding).namespace
        self.controller = Controller(
            adapter, store, self._namespace, PREFIX_IDS, 1, workload.encoding
        )
        self.prompt = random_plan(adapter, workload)
        self.ids = torch.tensor([self.prompt.ids], device=adapter.device)
        self._put_chunks()
        kv = adapter.encode(
            (), self.prompt.ids[: workload.chunk_tokens]
        )  # exact: nothing before it
        self._first = _on_device(kv, adapter.device)
        self._first_reader = _in_memory(kv)

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt.ids)

    @property
    def kv_bytes(self) -> int:
        """Of all chunks, as they are stored."""
        layout = self.adapter.layout.encoded(self.workload.encoding)
        return self.workload.chunks * stored_chunk_bytes(layout, self.workload.chunk_tokens)

    def full(self) -> int:
        """Stock prefill of the unmodified model, last logits only."""
        model = self.adapter.model
        out = model(input_ids=self.ids, use_cache=True, logits_to_keep=1)
        return int(out.logits[0, -1].argmax())

    def prefix_stock(self) -> int:
        """The first chunk's KV is there already; the rest is a stock prefill over a stock cache."""
        cache = DynamicCache()
        for i, (keys, values) in enumerate(self._first):
            cache.update(keys, values, i)
        rest = self.ids[:, self.workload.chunk_tokens :]
        out = self.adapter.model(
            input_ids=rest, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        return int(out.logits[0, -1].argmax())

    def prefix_fused(self) -> int:
        """The first chunk's KV is in memory already; the rest goes through the fusor, whose attention
        never repeats KV heads. Mode ``prefix`` of the engine computes the same."""
        span = LoadedSpan(0, self.workload.chunk_tokens, self._first_reader, 0, exact=True)
        request = BlendRequest(
            self.prompt_tokens, (span,), make_policy("full"), Schedule("constant"), 1.0
        )
        logits, _, _ = self.fusor.prefill(self.ids, request, NEW_TOKENS)
        return int(logits[0, -1].argmax())

    def blended(
        self, mode: Mode, policy: str, ratio: float, schedule: str = ""
    ) -> tuple[int, FusionCounts]:
        """Load from the store, fuse, choose the first token; without a schedule, by the workload's."""
        with self.opened(mode) as load:
            request = self.request(load, policy, ratio, schedule)
            logits, _, fusion = self.fusor.prefill(self.ids, request, NEW_TOKENS)
            return int(logits[0, -1].argmax()), fusion.counts()

    @contextmanager
    def opened(self, mode: Mode = "blend") -> Iterator[Plan]:
        """Every chunk of the prompt, opened in the store."""
        workload = self.workload
        schedule = Schedule.parse(workload.schedule)
        options = PlanOptions(
            mode, make_policy(workload.policy), lambda _: schedule, workload.ratio
        )
        load = self.controller.plan(self.prompt, options)
        try:
            if len(load.spans) != self.workload.chunks:
                raise InvalidInputError("a bench chunk is not in the store any more; run again")
            yield load
        finally:
            load.close()

    def request(self, load: Plan, policy: str, ratio: float, schedule: str = "") -> BlendRequest:
        return BlendRequest(
            self.prompt_tokens,
            load.spans,
            make_policy(policy),
            Schedule.parse(schedule or self.workload.schedule),
            ratio,
        )

    def reuse(self) -> int:
        """Load from the store, compute the question only."""
        return self.blended("reuse", "reuse", 0.0)[0]

    def blend(self) -> int:
        return self.blended("blend", self.workload.policy, self.workload.ratio)[0]

    def counts(self) -> FusionCounts:
        """Rows computed by a blend of this workload."""
        return self.blended("blend", self.workload.policy, self.workload.ratio)[1]

    def floor_speedup(self, counts: FusionCounts) -> float:
        """L·N / Σ_l rows computed in layer l: what the row counts alone allow, were the last layer computed
        whole, too."""
        return len(counts.rows) * self.prompt_tokens / sum(counts.rows)

    def _put_chunks(self) -> None:
        for segment in self.prompt.chunks:
            kv = self.adapter.encode(PREFIX_IDS, segment.stored_ids)
            kept = replace(kv, layout=kv.layout.encoded(self.workload.encoding))
            key = chunk_key(self._namespace, PREFIX_IDS, segment.stored_ids)
            self._store.put(self._namespace, key, kept)


def run_ttft(
    adapter: ModelAdapter,
    workload: Workload,
    tick: Callable[[str], None] = lambda text: None,
    tier: BenchTier = ON_DISK,
    with_compiled: bool = False,
) -> TtftResult:
    """Measure one workload; ``tick(text)`` reports progress. ``with_compiled``: and a compiled model."""
    with tier_store(tier) as there:
        tick("encoding the chunks")
        bench = TtftBench(adapter, workload, there.store)
        return measure(bench, there, tick, with_compiled)


@torch.inference_mode()
def measure(
    bench: TtftBench,
    there: TierStore,
    tick: Callable[[str], None] = lambda text: None,
    with_compiled: bool = False,
) -> TtftResult:
    """Interleaved rounds of every mode, then each mode's peak memory."""
    workload, adapter = bench.workload, bench.adapter
    ways: dict[str, Callable[[], int]] = {
        "full": bench.full,
        "prefix_stock": bench.prefix_stock,
        "prefix_fused": bench.prefix_fused,
        "reuse": bench.reuse,
        "blend": bench.blend,
    }
    compiled = Compiled(None)
    if with_compiled:
        tick("compiling the stock prefill")
        compiled = compiled_prefill(adapter.model, bench.ids)
        if compiled.way is not None:
            ways["full_compiled"] = compiled.way
    tick("warming up")
    for way in ways.values():
        way()
    there.settle()
    timings = interleaved(ways, workload.rounds, adapter.device, tick, lambda name: there.prepare())
    tick("measuring memory")
    peaks = {name: peak_bytes(way, adapter.device) for name, way in ways.items()}
    faster = min(PREFIX_WAYS, key=lambda name: timings[name].median)
    timings["prefix"], peaks["prefix"] = timings[faster], peaks[faster]
    counts = bench.counts()
    full = timings["full"].median
    return TtftResult(
        model=adapter.model_id,
        dtype=adapter.layout.dtype,
        device=str(adapter.device),
        prompt_tokens=bench.prompt_tokens,
        ratio=counts.ratio,
        charged_ratio=counts.charged_ratio,
        full_ms=full,
        prefix_ms=timings["prefix"].median,
        prefix_stock_ms=timings["prefix_stock"].median,
        prefix_fused_ms=timings["prefix_fused"].median,
        reuse_ms=timings["reuse"].median,
        blend_ms=timings["blend"].median,
        speedup=full / timings["blend"].median,
        reuse_speedup=full / timings["reuse"].median,
        prefix_speedup=full / timings["prefix"].median,
        floor_speedup=bench.floor_speedup(counts),
        kv_bytes=bench.kv_bytes,
        peak_bytes=peaks,
        spread_ms={name: (t.low, t.high) for name, t in timings.items()},
        policy=workload.policy,
        schedule=str(Schedule.parse(workload.schedule)),
        rounds=workload.rounds,
        threads=torch.get_num_threads(),
        tier=there.tier.name,
        encoding=workload.encoding,
        full_compiled_ms=timings["full_compiled"].median if compiled.way else None,
        compile_s=compiled.compile_s if compiled.way else None,
        notes=(compiled.refusal,) if compiled.refusal else (),
    )


def _on_device(kv: ChunkKV, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of every layer, each ``[1, Hkv, T, D]``."""
    moved = [layer.to(device) for layer in kv.layers]  # [2, Hkv, T, D]
    return [(layer[0][None], layer[1][None]) for layer in moved]


def _in_memory(kv: ChunkKV) -> KVReader:
    """A reader of ``kv`` in a memory tier of its own."""
    tier = MemoryStore(kv.size_bytes)
    tier.put("", "first", kv)
    reader = tier.open("", "first", kv.layout, kv.tokens)
    assert reader is not None
    return reader
