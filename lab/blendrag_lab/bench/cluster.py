"""``blendrag bench cluster``: routing by resident KV against round robin, on replicas of this machine.

Every replica has a store of its own, as on a machine of its own, which holds a part of the corpus. KV comes
from a directory as remote. Requests ask over one document each, drawn by Zipf's law. Both ways of routing
take turns on the same replicas; before each turn the local KV is removed.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from ray import serve
from ray.serve.request_router import PendingRequest, RunningReplica

from blendrag.engine import BlendEngine
from blendrag.engine.library import Entry
from blendrag.server.running import bound_socket
from blendrag_lab.bench import options
from blendrag_lab.bench.rounds import Tick, silent
from blendrag_lab.tables import ResultTable, table, times
from blendrag_ray.application import NAME, deployed
from blendrag_ray.ray_session import ray_session
from blendrag_ray.replica import Replica
from blendrag_ray.resident_router import ASSUMED_S, REPORT_S, ResidentRouter
from blendrag_ray.routing import QUEUED_SHARE
from blendrag_ray.settings import ServedCluster

RESIDENT, ROUND_ROBIN = WAYS = ("resident", "round robin")
#: Header of a request that says how it is routed.
ROUTING = "x-routing"
HOST = "127.0.0.1"
NEW_TOKENS = 8


@dataclass(frozen=True)
class Routed:
    """The requests of all rounds that were routed one way."""

    way: str
    requests: int
    remote_bytes: int
    ttft_p50_s: float
    ttft_p95_s: float


@dataclass(frozen=True)
class ClusterResult:
    replicas: int
    corpus_bytes: int
    local_bytes: int
    """What the store of a replica may hold."""
    zipf: float
    clients: int
    routed: list[Routed]
    remote_share: float
    """Remote bytes of routing by resident KV, of those of round robin."""


def cluster_table(result: ClusterResult) -> ResultTable:
    return table(
        [
            ("routing", lambda row: row.way),
            ("requests", lambda row: f"{row.requests:,}"),
            ("remote MB", lambda row: f"{row.remote_bytes / 1e6:,.1f}"),
            ("TTFT p50 ms", lambda row: f"{1e3 * row.ttft_p50_s:,.0f}"),
            ("TTFT p95 ms", lambda row: f"{1e3 * row.ttft_p95_s:,.0f}"),
        ],
        result.routed,
        f"{result.replicas} replicas, {result.clients} clients, documents by Zipf {result.zipf:g}; a store "
        f"of {result.local_bytes / 1e6:,.0f} MB each for a corpus of {result.corpus_bytes / 1e6:,.0f} MB",
        [f"remote bytes by resident KV: {times(result.remote_share)} round robin's"],
    )


class OwnStoreReplica(Replica):
    """A replica whose store no other process uses."""

    def __init__(self, served: ServedCluster, versions: Mapping[str, str]) -> None:
        own = {"store": f"{served.store}-{os.getpid()}"}
        super().__init__(served.model_copy(update=own), versions)

    def reset(self) -> int:
        """Remove the KV; the bytes that were read from the remote so far."""
        store = self._engine.store
        assert store.remote is not None
        store.drain()
        namespace = self._engine.adapter.identity.namespace
        for key in list(store.disk.keys(namespace)):
            store.delete(namespace, key)
        return store.remote.counters["read_bytes"]


class EitherRouter(ResidentRouter):
    """Routes a request as its header says."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            headers = dict(pending_request.args[0].scope["headers"])
            if headers.get(ROUTING.encode()) == ROUND_ROBIN.encode():
                self._turn = getattr(self, "_turn", -1) + 1
                at = self._turn % len(candidate_replicas)
                return [[candidate_replicas[at]]]
        return await super().choose_replicas(candidate_replicas, pending_request)


@options.bench(cluster_table)
def cluster(
    replicas: options.Count = 3,
    documents: options.Count = 48,
    chunks: options.Count = 3,
    chunk_tokens: options.Count = 96,
    requests: options.Count = 300,
    rounds: options.Count = 2,
    clients: options.Count = 3,
    zipf: Annotated[float, typer.Option(help="Exponent of the documents' popularity.")] = 1.0,
    local: Annotated[
        float, options.number("Share of the corpus that the store of a replica may hold.", 0, 1)
    ] = 0.4,
    queued_share: Annotated[
        float, options.number("Price of a queued request, as a share of the KV of the next.", 0)
    ] = QUEUED_SHARE,
    tick: Tick = silent,
) -> ClusterResult:
    os.environ["BLENDRAG_LEARN"] = "0"
    # paths of sockets are limited to 107 characters
    with tempfile.TemporaryDirectory(prefix="br") as directory:
        root = Path(directory)
        os.environ.setdefault("RAY_TMPDIR", directory)
        remote = root / "remote"
        remote.mkdir()
        tick("publishing a corpus")
        texts = list(_texts(documents, chunks, chunk_tokens))
        corpus_bytes = _publish(root / "origin", remote.as_uri(), texts)
        served = ServedCluster(
            model="demo",
            store=str(root / "local"),
            remote=remote.as_uri(),
            ram_bytes=0,
            disk_bytes=int(local * corpus_bytes),
            min_replicas=replicas,
            max_replicas=replicas,
            queued_share=queued_share,
        )
        with bound_socket(HOST, 0) as at:
            port = at.getsockname()[1]
        tick("starting replicas")
        own: dict[str, Any] = {
            "replica": OwnStoreReplica,
            "router": f"{__name__}:{EitherRouter.__name__}",
        }
        with ray_session(replicas), deployed(served, HOST, port, **own):
            turns = _turns(f"http://{HOST}:{port}", texts, requests, rounds, clients, zipf, tick)
    routed = [_summary(way, [turn for each, *turn in turns if each == way]) for way in WAYS]
    share = routed[0].remote_bytes / routed[1].remote_bytes
    return ClusterResult(
        replicas, corpus_bytes, served.disk_bytes or 0, zipf, clients, routed, share
    )


def _texts(documents: int, chunks: int, tokens: int) -> Iterator[list[str]]:
    """The texts of each document's chunks: random words, about as many as tokens."""
    words = [word for word in Path(random.__file__).read_text().split() if word.isalpha()]
    drawing = random.Random(0)
    for document in range(documents):
        yield [
            " ".join([f"Document {document}, part {part}.", *drawing.choices(words, k=tokens // 2)])
            for part in range(chunks)
        ]


def _publish(store: Path, remote: str, texts: list[list[str]]) -> int:
    """Ingest and publish the texts; bytes of their KV."""
    with BlendEngine("demo", store, remote=remote, learn=False) as engine:
        entries = [Entry(text[:40], text) for each in texts for text in each]
        engine.library.add(entries, embed=False)
        engine.publish()
        return engine.stats().size_bytes


def _turns(
    url: str,
    texts: list[list[str]],
    requests: int,
    rounds: int,
    clients: int,
    zipf: float,
    tick: Tick,
) -> list[tuple[str, int, list[float]]]:
    """Way, remote bytes and times to first token of each turn."""
    handle = serve.get_deployment_handle("Replica", NAME)
    weights = list(accumulate((rank + 1) ** -zipf for rank in range(len(texts))))
    found = []
    for number in range(rounds):
        drawing = random.Random(number)
        asked = drawing.choices(range(len(texts)), cum_weights=weights, k=requests)
        for way in WAYS if number % 2 == 0 else WAYS[::-1]:
            before = sum(handle.broadcast("reset").results())
            time.sleep(REPORT_S + ASSUMED_S)
            tick(f"round {number + 1} of {rounds}, {way}")
            ttft_s = asyncio.run(_asked(url, way, [texts[document] for document in asked], clients))
            found.append((way, sum(handle.broadcast("reset").results()) - before, ttft_s))
    return found


async def _asked(url: str, way: str, contexts: list[list[str]], clients: int) -> list[float]:
    """Times to first token; each client sends its next request after the answer to the last."""
    ttft_s: list[float] = []
    waiting = iter(enumerate(contexts))

    async def client(http: httpx.AsyncClient) -> None:
        for number, context in waiting:
            question = f"Question: what is number {number}?"
            message = {"role": "user", "content": "\n\n".join([*context, question])}
            body = {"messages": [message], "stream": True, "max_tokens": NEW_TOKENS}
            began = time.perf_counter()
            is_first = True
            async with http.stream("POST", "/v1/chat/completions", json=body) as reply:
                reply.raise_for_status()
                async for line in reply.aiter_lines():
                    if is_first and line.startswith("data:"):
                        ttft_s.append(time.perf_counter() - began)
                        is_first = False

    headers = {ROUTING: way}
    async with (
        httpx.AsyncClient(base_url=url, timeout=300, headers=headers) as http,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(clients):
            group.create_task(client(http))
    return ttft_s


def _summary(way: str, turns: list[Any]) -> Routed:
    ttft_s = sorted(value for _, values in turns for value in values)
    p95_s = statistics.quantiles(ttft_s, n=20)[-1]
    remote_bytes = sum(size_bytes for size_bytes, _ in turns)
    return Routed(way, len(ttft_s), remote_bytes, statistics.median(ttft_s), p95_s)
