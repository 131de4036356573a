"""Random requests to a real server: whole, streamed, abandoned, wrong, too long, many at once.

Checks that every greedy answer is the one that the same request gets alone, that nothing is left waiting or
running, and that threads, files and memory do not grow. Prints a line per tenth, then the outcomes.

    make soak-server REQUESTS=1000 CLIENTS=64 SEED=7
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil

import tiny
from blendrag.demo import demo_corpus_path
from blendrag.engine import BlendEngine
from server.conftest import FILES
from server.live import Live, live

CHAT = "/v1/chat/completions"
QUESTIONS = (
    "Which sport does Anna Bell enjoy?",
    "Who is Hans Ellis?",
    "When is the Apple festival?",
    "Hello",
)
WRONG: tuple[dict[str, Any], ...] = (
    {"temperature": -1},
    {"max_tokens": 0},
    {"max_tokens": 9999},
    {"n": 99},
    {"stream": "yes"},
    {"blendrag": {"mode": "fast"}},
    {"messages": [{"role": "user", "content": "word " * 9000}]},
)
#: Growth of memory in the second half that counts as a leak.
LEAK = 0.1


class Soak:
    def __init__(self, server: Live, client: httpx.AsyncClient, seed: int) -> None:
        self.server = server
        self.client = client
        self.random = random.Random(seed)
        self.alone: dict[str, str] = {}
        """Answers to greedy requests that were sent alone."""
        self.ended: Counter[str] = Counter()

    def greedy(self) -> list[dict[str, Any]]:
        """All greedy requests that are sent."""
        return [
            {
                "messages": [{"role": "user", "content": question + " word" * padding}],
                "max_tokens": tokens,
                "retrieve": retrieve,
            }
            for question in QUESTIONS
            for padding in (0, 150)
            for tokens in (1, 12)
            for retrieve in (False, True)
        ]

    async def ask_each_alone(self) -> None:
        for body in self.greedy():
            self.alone[json.dumps(body)] = await self.whole(body)

    async def one(self) -> None:
        """One random request."""
        draw = self.random
        body = draw.choice(self.greedy())
        kind = draw.choice(("whole", "stream", "stream", "sampled", "leave", "leave", "wrong"))
        if kind == "wrong":
            response = await self.client.post(CHAT, json=body | draw.choice(WRONG))
            assert response.status_code == 400, response.text
            assert set(response.json()) == {"error"}
        elif kind == "leave":
            await self.leave(body)
        elif kind == "sampled":
            more = {"temperature": 1.0, "seed": draw.randint(0, 99), "n": draw.choice((1, 1, 3))}
            await self.whole(body | more)
        else:
            text = await (self.streamed if kind == "stream" else self.whole)(body)
            assert text == self.alone[json.dumps(body)], (body, text)
        self.ended[kind] += 1

    async def whole(self, body: dict[str, Any]) -> str:
        response = await self.client.post(CHAT, json=body)
        assert response.status_code == 200, response.text
        text: str = response.json()["choices"][0]["message"]["content"]
        return text

    async def streamed(self, body: dict[str, Any]) -> str:
        async with self.client.stream("POST", CHAT, json={**body, "stream": True}) as response:
            assert response.status_code == 200
            lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
        assert lines.pop() == "[DONE]"
        deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
        return "".join(delta.get("content", "") for delta in deltas)

    async def leave(self, body: dict[str, Any]) -> None:
        """Close the connection after a while, or after some events."""
        if self.random.random() < 0.5:
            try:
                async with asyncio.timeout(0.3 * self.random.random()):
                    await self.whole(body)
            except TimeoutError:
                pass
            return
        events = self.random.randint(0, 3)
        async with self.client.stream("POST", CHAT, json={**body, "stream": True}) as response:
            async for _ in response.aiter_lines():
                events -= 1
                if events < 0:
                    return


async def run(server: Live, requests: int, clients: int, seed: int) -> None:
    process, mebibytes = psutil.Process(), []
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
        soak, free = Soak(server, client, seed), asyncio.Semaphore(clients)
        await soak.ask_each_alone()

        async def when_free() -> None:
            async with free:
                await soak.one()

        for done in range(requests // 10, requests + 1, requests // 10):
            await asyncio.gather(*(when_free() for _ in range(requests // 10)))
            mebibytes.append(process.memory_info().rss >> 20)
            held = f"{process.num_threads()} threads, {process.num_fds()} files"
            print(f"{done} requests: {dict(soak.ended)}; {mebibytes[-1]} MiB, {held}", flush=True)
    server.settled()
    half = mebibytes[len(mebibytes) // 2]
    assert mebibytes[-1] < (1 + LEAK) * half, f"memory grew: {mebibytes} MiB"
    print(json.dumps(dict(server.service.admission.outcomes)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        BlendEngine("demo", Path(folder) / "store", chunk_tokens=64, dtype="float32") as engine,
    ):
        engine.resources.__dict__["embedder"] = tiny.WordEmbedder()
        engine.ingest([demo_corpus_path() / name for name in FILES]).whole()
        with live(engine) as server:
            asyncio.run(run(server, given.requests, given.clients, given.seed))


if __name__ == "__main__":
    main()
