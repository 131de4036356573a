"""``blendrag bench remote``: time to first token from a cold remote against full prefill.

Whenever a request begins, its chunks are only in the remote: a temporary directory, or ``--remote``. A
throttled remote delivers no earlier than a line of that throughput would, which all requests share. The
controller decides by the first bytes whether it loads or computes, as in an engine.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from blendrag.cli.options import Remote
from blendrag.config import settings
from blendrag.errors import InvalidInputError
from blendrag.planning.measure import prefill_token_s
from blendrag.store.remote.objects import ObjectBytes, RemoteObjects
from blendrag.store.remote.root import name_of
from blendrag.store.remote.tier import RemoteTier
from blendrag.store.tiered import KVStore, open_store
from blendrag_lab.bench import options
from blendrag_lab.bench.geometry import TimedModel
from blendrag_lab.bench.rounds import MeasuredNothingError, Tick, Timing, clock, run_rounds, silent
from blendrag_lab.bench.scratch import scratch
from blendrag_lab.bench.tiers import AMPLE_BYTES, BenchTier, Throttle, TierStore, parse_tier
from blendrag_lab.bench.workload import BlendResult, PromptBench, Workload, conditions
from blendrag_lab.tables import NOTHING, ResultTable, table, times

FULL, FAST = "full prefill", "fast"
#: Requests share a line in portions that take so long.
PORTION_S = 0.01


@dataclass(frozen=True)
class RemoteRow:
    """Full prefill, or requests from a remote of one throughput."""

    remote: str
    ms: Timing
    over_full: float
    """Against full prefill, 1.0 being as long; the median of the rounds' ratios."""
    loaded: float | None
    """Chunks that were loaded, not computed; the mean of the rounds."""


@dataclass(frozen=True, kw_only=True)
class RemoteResult(BlendResult):
    prompt_tokens: int
    kv_bytes: int
    token_ms: float
    """What the controller takes a token to cost."""
    rows: tuple[RemoteRow, ...]


def remote_table(result: RemoteResult) -> ResultTable:
    return table(
        [
            ("remote", lambda row: row.remote),
            ("TTFT ms (lowest to highest)", lambda row: str(row.ms)),
            ("over full prefill", lambda row: times(row.over_full)),
            ("chunks loaded", lambda row: NOTHING if row.loaded is None else f"{row.loaded:g}"),
        ],
        result.rows,
        f"{result.prompt_tokens:,} tokens, {result.kv_bytes / 1e6:,.1f} MB of KV: {result.about}",
    )


class NetworkLink:
    """What all requests share: so many bytes per second, ``None`` being no limit, and a latency."""

    def __init__(self, latency_s: float) -> None:
        self._latency_s = latency_s
        self._throttle: Throttle | None = None

    def limit(self, bytes_per_s: float | None) -> None:
        self._throttle = Throttle(bytes_per_s) if bytes_per_s is not None else None
        self._portion_bytes = math.ceil(PORTION_S * (bytes_per_s or 0))

    async def deliver(self, piece: ObjectBytes) -> ObjectBytes:
        """The piece, when it has come over the line."""
        await asyncio.sleep(self._latency_s)
        left = len(piece.data)
        while (throttle := self._throttle) is not None and left > 0:
            portion_bytes = min(left, self._portion_bytes)
            there_at = throttle.begin(portion_bytes)
            await asyncio.sleep(max(0.0, there_at - time.perf_counter()))
            left -= portion_bytes
        latency_s = piece.latency_s + self._latency_s
        return piece._replace(latency_s=latency_s, arrived_at=time.monotonic())


class LineObjects(RemoteObjects):
    """Objects that are read over a line."""

    def __init__(self, url: str, timeout_s: float, line: NetworkLink) -> None:
        super().__init__(url, timeout_s)
        self._line = line

    async def _found(
        self, ask: Callable[[], Coroutine[Any, Any, ObjectBytes]]
    ) -> ObjectBytes | None:
        piece = await super()._found(ask)
        return None if piece is None else await self._line.deliver(piece)


class ColdRemote(TierStore):
    """A store whose KV is only in the remote when a measurement begins."""

    store: KVStore

    def __init__(self, store: KVStore, root: Path, line: NetworkLink) -> None:
        super().__init__(BenchTier("a cold remote"), store, root)
        self.line = line

    @cached_property
    def entries(self) -> list[tuple[str, str]]:
        """Namespace and key of everything that was put, once it is in the remote."""
        self.store.flush()
        namespaces = {path.name for path in (self._root / "kv").iterdir()}
        return [(namespace, key) for namespace in namespaces for key in self.store.keys(namespace)]

    def prepare(self) -> None:
        """Without a limit to its line, so that what is read in the background is soon here."""
        self.line.limit(None)
        self.store.drain()
        if self.store.trouble:
            raise MeasuredNothingError(self.store.trouble)
        for entry in self.entries:
            self.store.delete(*entry)


@contextmanager
def cold_remote(url: str | None, line: NetworkLink) -> Iterator[ColdRemote]:
    """``url``: by default a temporary directory. Objects are removed afterwards."""
    given = settings()
    secret = given.remote_key
    with scratch() as directory, ExitStack() as opened:
        (directory / "remote").mkdir()
        where = url or (directory / "remote").as_uri()
        objects = opened.enter_context(closing(LineObjects(where, given.remote_timeout_s, line)))

        def remote() -> RemoteTier:
            tier = RemoteTier(where, secret, given.remote_timeout_s)
            tier.objects = objects
            return tier

        root = directory / "store"
        store = opened.enter_context(closing(open_store(root, 0, AMPLE_BYTES, remote=remote)))
        there = ColdRemote(store, root, line)
        try:
            yield there
        finally:
            if "entries" in vars(there):
                objects.delete(*(name_of(*entry) for entry in there.entries))


@options.bench(remote_table, rounds=3, ratio=0.3)
@torch.inference_mode()
def remote(
    timed: TimedModel,
    workload: Workload,
    throughputs: Annotated[
        str, typer.Option(help=f"Comma-separated: {FAST} (no limit), or such as 16MB/s.")
    ] = f"{FAST},64MB/s,16MB/s,4MB/s,1MB/s",
    latency_ms: Annotated[float, options.number("Added to every request.", 0)] = 0.0,
    remote: Remote = None,
    tick: Tick = silent,
) -> RemoteResult:
    limits = {name.strip(): _bytes_per_s(name.strip()) for name in throughputs.split(",")}
    line = NetworkLink(latency_ms / 1e3)
    with cold_remote(remote, line) as there:
        tick("encoding the chunks")
        bench = PromptBench(timed.adapter, workload, there)
        tick("timing a token")
        token_s = prefill_token_s(timed.adapter)
        ways: dict[str, Callable[[], tuple[float, int | None]]] = {FULL: partial(full, bench)}
        for name, limit in limits.items():
            ways[name] = partial(request, bench, line, limit, token_s)
        runs = run_rounds(ways, workload.rounds, tick)
        there.prepare()
    return RemoteResult(
        **conditions(timed.adapter, workload, there.tier.name),
        prompt_tokens=workload.prompt_tokens,
        kv_bytes=bench.kv_bytes,
        token_ms=1e3 * token_s,
        rows=tuple(_row(name, found, runs[FULL]) for name, found in runs.items()),
    )


def full(bench: PromptBench) -> tuple[float, None]:
    bench.there.prepare()
    began = clock(bench.adapter.device)
    bench.full()
    return clock(bench.adapter.device) - began, None


def request(
    bench: PromptBench, line: NetworkLink, limit: float | None, token_s: float
) -> tuple[float, int]:
    """One request as an engine without a profile plans it: seconds, and how many chunks were loaded."""
    bench.there.prepare()
    line.limit(limit)
    controller = replace(bench.controller, token_s=lambda: token_s)
    began = clock(bench.adapter.device)
    with bench.opened(controller) as plan:
        if plan.spans:
            bench.prefill(plan.request(bench.prompt_tokens))
        else:
            bench.full()
    return clock(bench.adapter.device) - began, len(plan.spans)


def _row(
    name: str, runs: Sequence[tuple[float, int | None]], full: Sequence[tuple[float, int | None]]
) -> RemoteRow:
    pairs = zip(runs, full, strict=True)
    loaded = [count for _, count in runs if count is not None]
    return RemoteRow(
        name,
        Timing.of([1e3 * seconds for seconds, _ in runs]),
        statistics.median(seconds / other for (seconds, _), (other, _) in pairs),
        statistics.fmean(loaded) if loaded else None,
    )


def _bytes_per_s(name: str) -> float | None:
    if name == FAST:
        return None
    try:
        found = parse_tier(name).bytes_per_s
    except InvalidInputError:
        found = None
    if found is None:
        raise InvalidInputError(
            f"throughput {name!r}: expected {FAST} or a throughput of 1KB/s or more, such as 16MB/s"
        )
    return found
