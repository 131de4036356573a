"""Chats while others embed long texts and leave: how much longer is the time to first token?

Half of the clients chat. The other half send ``--bytes`` of text to be embedded and close their connections
after a moment. Phases with and without these take turns, so that both see the same machine.
Prints the times to first token of each phase and the ratio of all; fails if the ratio of the medians is
above ``--most``, or if the server keeps anything afterwards.

    make soak-embeddings CLIENTS=64 ROUNDS=3 SECONDS=30
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

import httpx
import psutil

from blendrag.demo import demo_corpus_path
from blendrag.engine import BlendEngine
from cli.commands import start
from server.conftest import FILES

CHAT = "/v1/chat/completions"
QUESTIONS = ("Which sport does Anna Bell enjoy?", "Who is Hans Ellis?", "Hello")
#: Longest time until a client that embeds leaves.
LEAVES_S = 2.0
#: What the server has in its queues, by the names of its metrics.
_LEFT = re.compile(
    r"^blendrag_(requests_waiting|requests_running|queue_waiting|queue_running)(\{.*\})? (\d+)$",
    re.MULTILINE,
)


@dataclass
class LoadPhase:
    """What the clients of one phase saw."""

    ttft_s: list[float] = field(default_factory=list)
    """Times to first token of chats."""
    ended: Counter[str] = field(default_factory=Counter)


class EmbeddingLoad:
    def __init__(self, client: httpx.AsyncClient, size_bytes: int, seed: int) -> None:
        self.client = client
        self.random = random.Random(seed)
        words = ["".join(self.random.choices("abcdefgh", k=4)) for _ in range(1000)]
        text = " ".join(self.random.choices(words, k=size_bytes // 5 + 1))
        self.long = json.dumps({"input": text[:size_bytes]}).encode()

    async def chat(self, phase: LoadPhase) -> None:
        """A plain chat, read to its end."""
        asked = {"role": "user", "content": self.random.choice(QUESTIONS)}
        body = {"messages": [asked], "stream": True, "max_tokens": 16}
        began, first_s = time.perf_counter(), None
        async with self.client.stream("POST", CHAT, json=body) as response:
            assert response.status_code == 200, response.status_code
            async for line in response.aiter_lines():
                if first_s is None and '"content":"' in line and '"content":""' not in line:
                    first_s = time.perf_counter() - began
        phase.ended["chats"] += 1
        if first_s is not None:
            phase.ttft_s.append(first_s)

    async def embed(self, phase: LoadPhase) -> None:
        """Embed the long text and leave."""
        headers = {"Content-Type": "application/json"}
        try:
            async with asyncio.timeout(LEAVES_S * self.random.random()):
                response = await self.client.post(
                    "/v1/embeddings", content=self.long, headers=headers
                )
            assert response.status_code in (200, 429), response.text[:200]
            phase.ended[f"embeddings: {response.status_code}"] += 1
        except (TimeoutError, httpx.TransportError):
            phase.ended["left"] += 1

    async def phase(self, chats: int, embedders: int, seconds: float) -> LoadPhase:
        phase, until = LoadPhase(), time.monotonic() + seconds

        async def again(one: Callable[[LoadPhase], Awaitable[None]]) -> None:
            while True:
                await one(phase)
                if time.monotonic() >= until:
                    return

        clients = [again(self.chat) for _ in range(chats)]
        clients += [again(self.embed) for _ in range(embedders)]
        await asyncio.gather(*clients)
        return phase

    async def settled(self, seconds: float = 60.0) -> None:
        """Wait until the server has nothing waiting or running."""
        until = time.monotonic() + seconds
        left: list[str] = ["?"]
        while left:
            assert time.monotonic() < until, f"left behind: {left}"
            text = (await self.client.get("/metrics")).text
            left = [f"{name}{labels} {n}" for name, labels, n in _LEFT.findall(text) if int(n)]
            await asyncio.sleep(0.05)


async def run(
    url: str, clients: int, rounds: int, seconds: float, size_bytes: int, seed: int
) -> float:
    """Ratio of the medians of times to first token with and without clients that embed."""
    limits = httpx.Limits(max_connections=2 * clients, max_keepalive_connections=clients)
    without, beside = LoadPhase(), LoadPhase()
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        load = EmbeddingLoad(client, size_bytes, seed)
        await load.phase(max(1, clients // 8), 0, 0)  # opens what the first request opens
        for number in range(1, rounds + 1):
            for total, embedders in ((without, 0), (beside, clients - clients // 2)):
                phase = await load.phase(clients // 2, embedders, seconds)
                await load.settled()
                total.ttft_s += phase.ttft_s
                total.ended += phase.ended
                print(
                    f"round {number}, {embedders} embed: {_times(phase)}; {dict(phase.ended)}",
                    flush=True,
                )
    ratio = median(beside.ttft_s) / median(without.ttft_s)
    print(
        f"without: {_times(without)}\nbeside: {_times(beside)}\nratio of the medians: {ratio:.2f}"
    )
    return ratio


def _times(phase: LoadPhase) -> str:
    tenths = quantiles(phase.ttft_s, n=10) if len(phase.ttft_s) > 1 else [phase.ttft_s[0]] * 9
    return f"first token after {median(phase.ttft_s):.3f} s, nine of ten within {tenths[-1]:.3f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each phase")
    parser.add_argument("--bytes", type=int, default=1_000_000)
    parser.add_argument("--most", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        with BlendEngine("demo", store, chunk_tokens=64, embedder="minilm-offline") as engine:
            engine.ingest([demo_corpus_path() / name for name in FILES]).whole()
        process = start("serve", "--store", str(store), "--port", "0")
        try:
            assert process.stderr is not None
            line = next(line for line in process.stderr if line.startswith("serving: "))
            url = line.split(" at ")[1].strip().removesuffix("/v1")
            about = given.clients, given.rounds, given.seconds, given.bytes, given.seed
            ratio = asyncio.run(run(url, *about))
            server = psutil.Process(process.pid)
            held = f"{server.num_threads()} threads, {server.num_fds()} files"
            print(f"left: {server.memory_info().rss >> 20} MiB, {held}")
        finally:
            process.terminate()
            process.wait(timeout=60)
    assert ratio <= given.most, f"the ratio is {ratio:.2f}, expected at most {given.most}"


if __name__ == "__main__":
    main()
