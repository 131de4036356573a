"""Replicas on a Ray cluster of this machine: one killed, and more and fewer of them under load.

1. From one replica to the most while clients ask: no request fails.
2. SIGKILL of a replica while streams run: the streams of the others go on, those that the killed one
   had begun end with an error, and new requests are answered.
3. Back to one replica while a client asks: no request fails. (Not with two replicas at most.)

Every whole answer is compared with that of one process. Prints the counts as JSON.

    make soak-ray STREAMS=20 REPLICAS=3
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

#: Name of the application.
NAME = "blendrag"
DOCUMENTS = 6
#: Follows the load within seconds: half a request at a time is work for a replica.
QUICK = {
    "target_ongoing_requests": 0.5, "upscale_delay_s": 0.5, "downscale_delay_s": 3.0,
    "metrics_interval_s": 0.5, "look_back_period_s": 2.0,
}  # fmt: skip
#: Seconds between two requests of a client while there is load, and while there is little.
BUSY_S, IDLE_S = 0.2, 3.0
#: Longest wait for a number of replicas; their start imports torch.
START_S = 600.0
#: Seconds in which requests arrive at replicas, before one is killed.
AT_REPLICAS_S = 0.05
COMPLETIONS, ASKED = "/v1/completions", "asked.json"


@dataclass(frozen=True)
class RayWorkload:
    """Short requests and long streams; what one process answers to each, by its JSON."""

    load: list[dict[str, Any]]
    long: list[dict[str, Any]]
    alone: dict[str, str]


def prepare(directory: Path, streams: int, tokens: int, load: int = 12) -> None:
    """Fill a store and ask one process, for :func:`measure`."""
    from blendrag.engine import BlendEngine
    from server.live import live

    texts = fill(directory)
    short = [body(texts, number, 12) for number in range(load)]
    long = [body(texts, number, tokens) for number in range(100, 100 + streams)]
    engine = BlendEngine(**model_and_store(directory), learn=False)
    with engine, live(engine) as server, server.client() as client:
        alone = {
            json.dumps(asked): client.post(COMPLETIONS, json=asked).json()["choices"][0]["text"]
            for asked in (*short, *long)
        }
    (directory / ASKED).write_text(json.dumps(asdict(RayWorkload(short, long, alone))))


def model_and_store(directory: Path) -> dict[str, Any]:
    """float32, so that a token does not depend on the requests that are decoded with it."""
    model, store = str(directory / "model"), str(directory / "store")
    return {"model": model, "store": store, "dtype": "float32"}


def fill(directory: Path) -> list[str]:
    """The embedded model, but without an end of its answers, and a store of it; the texts of its chunks."""
    from blendrag.demo import demo_corpus_path, demo_model_path
    from blendrag.engine import BlendEngine
    from blendrag.engine.library import Entry

    files = sorted(demo_corpus_path().iterdir())[:DOCUMENTS]
    texts = [file.read_text(encoding="utf-8").split("\n\n")[0] for file in files]
    model = Path(shutil.copytree(demo_model_path(), directory / "model"))
    for name in ("config.json", "generation_config.json"):
        fields = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps(fields | {"eos_token_id": None}))
    with BlendEngine(**model_and_store(directory), learn=False) as engine:
        entries = [Entry(file.name, text) for file, text in zip(files, texts, strict=True)]
        engine.library.add(entries, embed=False)
    return texts


def body(texts: list[str], number: int, tokens: int) -> dict[str, Any]:
    """A seeded request over two chunks."""
    first, second = texts[number % len(texts)], texts[(number * 5 + 1) % len(texts)]
    return {
        "prompt": f"{first}\n\n{second}\n\nQuestion: who?\nAnswer:", "max_tokens": tokens, "seed": number,
        "temperature": 2.0,
    }  # fmt: skip


class RaySoak:
    def __init__(self, base_url: str, asked: RayWorkload) -> None:
        self.client = httpx.AsyncClient(base_url=base_url, timeout=300)
        self.asked = asked
        self.ended: Counter[str] = Counter()

    async def ask(self, asked: dict[str, Any]) -> None:
        """A whole answer; ``ended`` has how it went."""
        try:
            reply = await self.client.post(COMPLETIONS, json=asked)
        except httpx.HTTPError as error:
            self.ended[type(error).__name__] += 1
            return
        if reply.status_code != 200:
            self.ended[f"status {reply.status_code}"] += 1
        else:
            self._compare(asked, reply.json()["choices"][0]["text"])

    async def stream(self, asked: dict[str, Any], begun: asyncio.Semaphore) -> None:
        """A streamed answer; ``begun`` is released at its first piece, or at its end."""
        text, error = "", ""
        sending = self.client.stream("POST", COMPLETIONS, json={**asked, "stream": True})
        async with sending as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    error = event.get("error", {}).get("message", "")
                    piece = event["choices"][0]["text"] if event.get("choices") else ""
                    if piece and not text:
                        begun.release()
                    text += piece
        if not text:
            begun.release()
        if error:
            self.ended["ended with an error"] += 1
        else:
            self._compare(asked, text)

    def _compare(self, asked: dict[str, Any], text: str) -> None:
        same = text == self.asked.alone[json.dumps(asked)]
        self.ended["answered" if same else "another answer"] += 1

    def taken(self) -> dict[str, int]:
        """What ended since the last call."""
        ended, self.ended = dict(self.ended), Counter()
        return ended


def running() -> int:
    from ray import serve

    deployment = serve.status().applications[NAME].deployments["Replica"]
    return deployment.replica_states.get("RUNNING", 0)


def oldest_replica() -> int:
    """Its process."""
    titles = [(each, each.cmdline()) for each in psutil.Process().children(recursive=True)]
    found = [each for each, title in titles if title and f":{NAME}:Replica" in title[0]]
    return min(found, key=lambda each: each.create_time()).pid


async def until(count: int, soak: RaySoak, clients: int, pause_s: float) -> None:
    """Ask with so many clients, again and again, until there are ``count`` replicas."""
    end, over = time.monotonic() + START_S, asyncio.Event()
    load = soak.asked.load

    async def client(number: int) -> None:
        while not over.is_set():
            await soak.ask(load[number % len(load)])
            await asyncio.sleep(pause_s)
            number += clients

    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(client(number))
        while await asyncio.to_thread(running) != count and time.monotonic() < end:
            await asyncio.sleep(0.5)
        over.set()
    assert await asyncio.to_thread(running) == count, f"expected {count} replicas"


async def run(soak: RaySoak, most: int, busy_s: float) -> dict[str, Any]:
    report: dict[str, Any] = {}
    await until(most, soak, most, busy_s)
    report["more replicas"] = soak.taken()
    begun = asyncio.Semaphore(0)
    async with asyncio.TaskGroup() as group:
        for asked in soak.asked.long:
            group.create_task(soak.stream(asked, begun))
        for _ in soak.asked.long:
            await begun.acquire()
        victim = oldest_replica()
        for asked in soak.asked.load[:most]:  # those of the killed replica are sent to another one
            group.create_task(soak.ask(asked))
        await asyncio.sleep(AT_REPLICAS_S)
        os.kill(victim, signal.SIGKILL)
    report["streams, a replica killed"] = soak.taken()
    async with asyncio.TaskGroup() as group:
        for asked in soak.asked.load:
            group.create_task(soak.ask(asked))
    report["new requests after that"] = soak.taken()
    if most > 2:  # of two, one is left already
        await until(1, soak, 1, IDLE_S)
        report["fewer replicas"] = soak.taken()
    return report


def measure(
    directory: Path, replicas: int, busy_s: float = BUSY_S, **autoscaling: float
) -> dict[str, Any]:
    """What :func:`run` counted; ``autoscaling`` replaces fields of :data:`QUICK`."""
    from blendrag_ray.application import deployed
    from blendrag_ray.ray_session import ray_session
    from blendrag_ray.settings import ServedCluster

    os.environ["RAY_TMPDIR"] = str(directory)
    asked = RayWorkload(**json.loads((directory / ASKED).read_text()))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    served = ServedCluster(**model_and_store(directory), max_replicas=replicas)
    options: dict[str, Any] = {
        "autoscaling_config": {"min_replicas": 1, "max_replicas": replicas, **QUICK, **autoscaling}
    }
    if replicas == 2:  # Serve would wait in the end for the replica that replaces the killed one
        options["graceful_shutdown_timeout_s"] = 0.5
    with ray_session(replicas), deployed(served, "127.0.0.1", port, **options):
        return asyncio.run(run(RaySoak(f"http://127.0.0.1:{port}", asked), replicas, busy_s))


def faults(report: dict[str, Any]) -> list[str]:
    """What must not be in a report."""
    wrong = []
    for phase, ended in report.items():
        lost = {"ended with an error"} if "killed" in phase else set()
        if set(ended) != {"answered"} | lost:
            wrong.append(f"{phase}: {ended}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--prepared", type=Path, help="directory that prepare() filled")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="br", dir="/tmp") as scratch:
        directory = given.prepared or Path(scratch)
        if given.prepared is None:
            prepare(directory, given.streams, given.tokens)
        report = measure(directory, given.replicas)
    print(json.dumps(report), flush=True)
    sys.exit("\n".join(faults(report)) or 0)


if __name__ == "__main__":
    main()
