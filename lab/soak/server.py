"""Random requests to a real server: whole, streamed, abandoned, wrong, late, many at once.

In every tenth 200 more clients ask and read nothing while others are answered; some of their answers are
longer than all buffers. Forwards of the model fail now and then. Checks that every greedy answer is the one
that the same request gets alone, that nothing is left waiting, running or in memory, and that threads, files
and memory do not grow. Prints a line per tenth, then the outcomes.

    make soak-server REQUESTS=1000 CLIENTS=64 SEED=7
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import socket
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil

import tiny
from blendrag.demo import demo_corpus_path
from blendrag.engine import BlendEngine
from blendrag.engine.stream import AnswerStream
from blendrag.fusor.cache import BlendCache
from blendrag.planning.controller import IN_MEMORY
from blendrag.server import events
from blendrag.serving.chunk_pool import RequestKV
from blendrag.serving.coroutine import Coroutine
from integrity import check_tree
from server.conftest import FILES
from server.live import Live, live
from server.random_client import CHAT, WRONG, RandomClient, Reply

QUESTIONS = (
    "Which sport does Anna Bell enjoy?",
    "Who is Hans Ellis?",
    "When is the Apple festival?",
    "Hello",
)
KINDS = ("whole", "stream", "stream", "sampled", "leave", "leave", "late", "wrong")
#: Clients that read nothing while others are answered.
HELD = 200
#: So many of them ask for :data:`LONG`, and every fifth of all leaves in the end.
SLOW = 8
#: Its answer has some 200 KB, more than buffers take.
LONG = {
    "messages": [{"role": "user", "content": "word " * 30}],
    "max_tokens": 120,
    "logprobs": True,
    "top_logprobs": 20,
}
#: How many of 1,000 forwards fail.
FAULTS = 4.0
#: Seconds without any bytes after which a request counts as stuck.
STUCK_S = 1800
#: Growth of memory in the second half that counts as a leak.
LEAK = 0.1
#: What must not outlive its request.
TRANSIENT = (AnswerStream, Coroutine, RequestKV, BlendCache)


class ServerSoak(RandomClient):
    def __init__(self, server: Live, client: httpx.AsyncClient, seed: int) -> None:
        super().__init__(client, seed)
        self.server = server
        self.right: dict[str, set[str]] = {}
        """Answers to greedy requests: what each got alone, and in mode full, as beginnings that waiting
        requests share are computed exactly."""

    def greedy(self) -> list[dict[str, Any]]:
        """All short greedy requests that are sent."""
        asked = [
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
        imports = [f"<anna/><user>{question}</user>" for question in QUESTIONS]
        return asked + [
            {"messages": [{"role": "user", "content": text}], "max_tokens": 12, "schema": "people"}
            for text in imports
        ]

    async def ask_each_alone(self) -> None:
        for body in (*self.greedy(), LONG):
            alone = [await self.whole(body)]
            if body.get("retrieve"):
                alone.append(await self.whole(body | {"blendrag": {"mode": "full"}}))
            self.right[_name(body)] = {reply.text for reply in alone if reply is not None}

    # -- one request ----------------------------------------------------------------------------------

    async def one(self) -> None:
        """One random request."""
        draw = self.random
        body, kind = draw.choice(self.greedy()), draw.choice(KINDS)
        if kind == "wrong":
            await self.refused(body | draw.choice(WRONG))
        elif kind == "leave":
            await self.leave(body)
        elif kind == "sampled":
            more = {"temperature": 1.0, "seed": draw.randint(0, 99), "n": draw.choice((1, 1, 3))}
            await self.whole(body | more)
        elif kind == "late":
            self.check(
                body, await self.whole(body | {"blendrag": {"timeout_s": 2 * draw.random()}})
            )
        else:
            self.check(body, await (self.streamed if kind == "stream" else self.whole)(body))
        self.ended[kind] += 1

    def check(self, body: dict[str, Any], reply: Reply | None) -> None:
        """``reply`` is right, or ``None``."""
        if reply is None:
            return
        assert reply.text in self.right[_name(body)], (body, reply.text)
        self.ended["over exact beginnings"] += any(
            chunk["reason"] == IN_MEMORY.text for chunk in reply.about[0]["chunks"]
        )

    # -- clients that read nothing --------------------------------------------------------------------

    async def while_held(self, work: Callable[[], Awaitable[object]]) -> None:
        """Do ``work`` while others have asked and read nothing. Then they read their answers, or leave."""
        asked = [LONG] * SLOW + self.random.choices(self.greedy(), k=HELD - SLOW)
        held = [await self.asking(body) for body in asked]
        await work()
        while self.server.engine.scheduler.waiting or self.server.engine.scheduler.running:
            await asyncio.sleep(0.1)
        # these are computed, and their connections are full
        assert self.server.engine.scheduler.requests.counts[1] >= SLOW
        for number, (body, (reader, writer)) in enumerate(zip(asked, held, strict=True)):
            if number % 5:
                head, _, lines = (await reader.read()).decode().partition("\r\n\r\n")
                assert head.startswith(("HTTP/1.1 200 ", "HTTP/1.1 500 ")), head
                self.check(body, self.read(lines.splitlines()))
            writer.close()
        self.ended["held"] += len(held)

    async def asking(
        self, body: dict[str, Any]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection that has sent a request; little of the answer is read ahead."""
        sent = json.dumps({**body, "stream": True}).encode()
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.setblocking(False)
        await asyncio.get_running_loop().sock_connect(made, ("127.0.0.1", self.server.port))
        reader, writer = await asyncio.open_connection(sock=made, limit=1024)
        head = f"POST {CHAT} HTTP/1.0\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent)
        await writer.drain()
        return reader, writer


def _name(body: dict[str, Any]) -> str:
    return json.dumps(body, sort_keys=True)


async def run(server: Live, requests: int, clients: int, seed: int) -> None:
    process, mebibytes = psutil.Process(), []
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=server.url, timeout=STUCK_S, limits=limits) as client:
        soak, free = ServerSoak(server, client, seed), asyncio.Semaphore(clients)
        await soak.ask_each_alone()
        server.engine.adapter.decoder_layers[1].register_forward_pre_hook(soak.fail)

        async def when_free() -> None:
            async with free:
                await soak.one()

        async def some(count: int) -> None:
            await asyncio.gather(*(when_free() for _ in range(count)))

        tenth = requests // 10
        for done in range(tenth, requests + 1, tenth):
            soak.faults = 0.0
            await soak.while_held(partial(some, max(1, tenth // 10)))
            soak.faults = FAULTS
            await some(tenth - tenth // 10)
            mebibytes.append(process.memory_info().rss >> 20)
            held = f"{process.num_threads()} threads, {process.num_fds()} files"
            print(f"{done} requests: {dict(soak.ended)}; {mebibytes[-1]} MiB, {held}", flush=True)
    server.settled()
    half = mebibytes[len(mebibytes) // 2]
    assert mebibytes[-1] < (1 + LEAK) * half, f"memory grew: {mebibytes} MiB"
    assert soak.ended["over exact beginnings"], "no request shared an exact beginning"
    print(json.dumps(dict(server.service.admission.outcomes)))


def check_nothing_left(engine: BlendEngine) -> None:
    """No request left anything in ``engine``."""
    engine.drain()
    gc.collect()
    left = Counter(
        type(one).__name__ for one in gc.get_objects() if issubclass(type(one), TRANSIENT)
    )
    assert not left, f"left in memory: {dict(left)}"
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
    tree = engine.prefixes.tree
    assert tree is not None
    check_tree(tree)
    assert not any(node.users for _, node in tree.nodes())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    logging.disable()  # of faults
    events.SEND_TIMEOUT_S = 600.0  # on a busy machine, others take long
    corpus = demo_corpus_path()
    anna = (corpus / "anna-bell.txt").read_text(encoding="utf-8")
    with (
        tempfile.TemporaryDirectory() as folder,
        BlendEngine("demo", Path(folder) / "store", chunk_tokens=64, dtype="float32") as engine,
    ):
        engine.use_embedder(tiny.WordEmbedder())
        engine.ingest([corpus / name for name in FILES]).whole()
        engine.add_schema(
            f'<schema name="people"><user><module name="anna">{anna}\n\n</module></user></schema>'
        )
        with live(engine, send_bytes=4096) as server:
            asyncio.run(run(server, given.requests, given.clients, given.seed))
        check_nothing_left(engine)


if __name__ == "__main__":
    main()
