"""Random mixed requests during churn: every answer is the one that the same request gets alone.

Chats, completions, retrieval, documents, tools, prompt schemas, several sampled answers, all modes and
policies, whole, streamed, abandoned, late and wrong, at one server, in float32. Meanwhile documents are
added, replaced and removed over HTTP, KV is lost, damaged, evicted and collected, forwards fail, and between
tenths the server starts again.

Afterwards each request that was answered is asked alone at a second server over the documents of that moment
and the KV that the answer says it used, of which what an earlier prompt's prefill left is copied: greedy and
seeded texts, ends, tool calls, log probabilities, chunks and sources must be equal. A document that changed
meanwhile may be seen as before or after. Nothing may be left waiting, running or in memory, and the process
may not grow in the second half. Prints a line per tenth, with the memory of the process.

    make soak-requests REQUESTS=200 CLIENTS=8 SEED=7
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any
from xml.sax.saxutils import quoteattr

import httpx
import psutil
import torch

import scripted
import tiny
from blendrag.corpus.documents import NewEntry
from blendrag.engine import BlendEngine
from blendrag.engine.background_writer import Job
from blendrag.engine.exact_prefixes import family_of
from blendrag.engine.request import Request
from blendrag.engine.schemas import ENCODED_NOW, _key
from blendrag.engine.stream import AnswerStream
from blendrag.fusor import Fusor
from blendrag.fusor.cache import BlendCache
from blendrag.planning.controller import CORRUPT, IN_MEMORY, NO_KV, Controller
from blendrag.schema.concatenation import CachedStretch, FixedPrompt
from blendrag.server import events
from blendrag.serving.chunk_pool import RequestKV
from blendrag.serving.coroutine import Coroutine
from blendrag.store import maintenance
from blendrag.store.identity import chunk_key, is_learned, kept_namespace
from blendrag.store.kv import ChunkKV
from blendrag.text.prompt import Segment
from integrity import check_tree
from server.live import Live, live
from server.random_client import CHAT, WRONG, Choice, Fields, RandomClient, Reply

COMPLETIONS = "/v1/completions"
#: Keys of two tenants, and of one who writes.
READERS, WRITER = ("one", "two"), "writer"
KEYS = "\n".join((*READERS, f"{WRITER} write"))
#: Seconds without any bytes after which a request counts as stuck.
STUCK_S = 1800
#: Documents that the corpus may have; the passages of each.
DOCUMENTS, PASSAGES = 8, 9
#: Limit of the disk tier: too low for all documents, so that KV is evicted.
DISK_BYTES = 1_300_000
#: How many of 1,000 forwards fail.
FAULTS = 4.0
#: Growth of memory in the second half that counts as a leak.
LEAK = 0.1
#: Largest difference of log probabilities, and between two tokens that rounding may exchange.
CLOSE, TIE = 1e-3, 1e-4
#: The share of requests in whose place something is changed.
CHURN = 0.15
#: How reasons of chunks begin that are loaded as an earlier prompt's prefill left them, and how many versions
#: of such KV are remembered.
KEPT, VERSIONS = "as an earlier prompt computed it", 2
#: What must not outlive its request.
TRANSIENT = (AnswerStream, Coroutine, RequestKV, BlendCache)
ENDINGS = {"whole": 4, "stream": 4, "leave": 2, "late": 1, "wrong": 1}

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a town.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"town": "Place"}'},
}


@dataclass
class ComparedRequest:
    """One prompt that was answered while others were."""

    body: Fields
    path: str
    reply: Reply
    first: int
    """Changes of the corpus that were over when it was asked."""
    last: int
    """Those that had begun when it was answered."""
    reader: str
    """Whose key it was asked with."""
    learned: Sequence[NewEntry] = ()
    """The learned passages that were found in it."""
    known: Sequence[NewEntry] = ()
    """With those that may have been found: the last one may be taken for the question and not be told."""
    found: list[Any] = field(default_factory=list)
    """What retrieval found in each of these states."""
    kept: Mapping[tuple[str, str], Sequence[ChunkKV]] = field(default_factory=dict)
    """KV that earlier prompts had left when it was answered, the newest last, by namespace and key."""
    whys: dict[str, None] = field(default_factory=dict)
    """Its differences from the answer in each state."""

    @property
    def about(self) -> Fields:
        return self.reply.about[0]

    @property
    def sources(self) -> list[tuple[Any, ...]]:
        return [
            (one["chunk_id"], one["source"], one["start"]) for one in self.about.get("sources", ())
        ]


@dataclass
class ChurnReport:
    """What a soak found."""

    compared: int = 0
    while_changing: int = 0
    """Compared requests during which the corpus changed."""
    ties: int = 0
    """Texts that differ after a token that was as likely as another one, to rounding."""
    differences: list[str] = field(default_factory=list)
    ended: Counter[str] = field(default_factory=Counter)
    changes: Counter[str] = field(default_factory=Counter)
    mebibytes: list[int] = field(default_factory=list)
    """Memory of the process after each part."""

    def __str__(self) -> str:
        return (
            f"{self.compared} compared, {self.while_changing} of them while the corpus changed, "
            f"{self.ties} ties, {len(self.differences)} differences; {dict(self.ended)}; {dict(self.changes)}"
        )


# -- the server -----------------------------------------------------------------------------------


def schema(name: str) -> str:
    def texts(*numbers: int) -> str:
        return " ".join(map(tiny.sentence, numbers))

    return f"""
<schema name="{name}">Read about the town.
<module name="harbour">{texts(7001, 7002, 7003, 7004)} Days: <param name="days" len="4"/>.</module>
<union><module name="sea">{texts(7005, 7006, 7007)}</module><module name="hill">{texts(7008)}</module></union>
<module name="food">{texts(7009, 7010, 7011, 7012, 7013)}</module>
</schema>"""


@contextmanager
def serving(root: Path, learn: bool, disk_bytes: int | None = None) -> Iterator[Live]:
    given = {
        "tokenizer": scripted.tokenizer(), "dtype": "float32", "chunk_tokens": 96, "learn": learn,
        "max_new_tokens": 8, "ram_bytes": 200_000, "disk_bytes": disk_bytes,
    }  # fmt: skip
    with tiny.engine(tiny.llama(), root, **given) as engine:
        engine.add_schema(schema("placed"))
        engine.add_schema(schema("blended"), positions="blend")
        with live(engine, keys=KEYS) as server:
            yield server


def document(number: int, version: int) -> Fields:
    """All versions begin alike."""
    numbers = (100 * number + i + (10_000 * version if i > 3 else 0) for i in range(PASSAGES))
    text = "\n\n".join(map(tiny.sentence, numbers))
    return {"source": f"doc{number}.txt", "title": f"doc{number}", "text": text}


# -- random requests ------------------------------------------------------------------------------


class ChurnSoak(RandomClient):
    """Random requests to one server, and the changes meanwhile."""

    def __init__(self, client: httpx.AsyncClient, server: Live, seed: int) -> None:
        super().__init__(client, seed)
        self.server = server
        self.asked: list[ComparedRequest] = []
        self.changes: list[tuple[str, Fields]] = []
        """Changes of the corpus, in order."""
        self.over = 0
        """How many of them are over; the others have begun."""
        self.versions: dict[int, int] = {}
        self.counts: Counter[str] = Counter()
        self.passages: dict[str, NewEntry] = {}
        """All passages that were learned, by chunk id."""
        self.kept: dict[tuple[str, str], deque[ChunkKV]] = {}
        """KV that prompts left, the newest last, by namespace and key."""
        self._changing = asyncio.Lock()
        self._newest = 0

    @property
    def engine(self) -> BlendEngine:
        return self.server.engine

    def watch(self) -> None:
        """Note what the server learns and keeps, as it may give that up before the answer is read."""
        entries, memory = self.engine.require_corpus().entries, self.engine.store.memory
        put, put_kv = entries.put, memory.put

        def noted(new: Sequence[NewEntry]) -> Any:
            self.passages.update({each.chunk.chunk_id: each for each in new})
            return put(new)

        def noted_kv(namespace: str, key: str, kv: ChunkKV) -> Any:
            if is_learned(namespace):
                self.kept.setdefault((namespace, key), deque(maxlen=VERSIONS)).append(kv)
            return put_kv(namespace, key, kv)

        entries.put = noted  # type: ignore[method-assign, assignment]
        memory.put = noted_kv  # type: ignore[method-assign]

    async def one(self) -> None:
        """One random request, or a change."""
        if self.random.random() < CHURN:
            await self.change_something()
            return
        (kind,) = self.random.choices(list(ENDINGS), list(ENDINGS.values()))
        await self.ask(*self.request(), kind)

    async def ask(
        self, body: Fields, path: str, kind: str = "whole", reader: str | None = None
    ) -> None:
        reader = reader or self.random.choice(READERS)
        if kind == "wrong":
            await self.be_refused(body, path)
        elif kind == "leave":
            await self.leave(body, path, headers=key(reader))
        else:
            first = self.over
            if kind == "late":
                about = {**body.get("blendrag", {}), "timeout_s": self.random.random()}
                body = {**body, "blendrag": about}
            if kind == "stream" and isinstance(body.get("prompt"), list):
                body = {**body, "prompt": body["prompt"][0]}
            ask = self.streamed if kind == "stream" else self.whole
            reply = await ask(body, path, headers=key(reader))
            if reply is not None and ("seed" in body or not body.get("temperature")):
                self.note(body, path, reply, first, reader)
        self.ended[kind] += 1

    def note(self, body: Fields, path: str, reply: Reply, first: int, reader: str) -> None:
        """Keep what was answered, prompt by prompt."""
        alone = {name: value for name, value in body.items() if name != "blendrag"}
        blend = {
            name: value for name, value in body.get("blendrag", {}).items() if name != "timeout_s"
        }
        prompts = body["prompt"] if isinstance(body.get("prompt"), list) else [body.get("prompt")]
        each = len(reply.choices) // len(prompts)
        for number, prompt in enumerate(prompts):
            choices = reply.choices[number * each : (number + 1) * each]
            asked = ComparedRequest(
                {**alone, **({"prompt": prompt} if prompt else {}), "blendrag": blend},
                path,
                Reply(choices, reply.about[number : number + 1]),
                first,
                len(self.changes),
                reader,
            )
            found = {chunk["chunk_id"] for chunk in asked.about["chunks"]}
            text = " ".join(texts_in(asked.body))
            asked.learned = [each for name, each in self.passages.items() if name in found]
            asked.known = [
                each
                for name, each in self.passages.items()
                if name in found or each.chunk.text[:40] in text
            ]
            if any(chunk["reason"].startswith(KEPT) for chunk in asked.about["chunks"]):
                asked.kept = {place: tuple(each) for place, each in self.kept.items()}
                self.ended["over kept KV"] += 1
            self.ended["over exact beginnings"] += any(
                chunk["reason"] == IN_MEMORY.text for chunk in asked.about["chunks"]
            )
            self.ended["over learned passages"] += bool(asked.learned)
            self.asked.append(asked)

    async def be_refused(self, body: Fields, path: str) -> None:
        draw = self.random
        if draw.random() < 0.3:
            await self.refused(body, 401, path, headers=key("nobody"))
        elif draw.random() < 0.3:
            new = {"documents": [document(0, 0)]}
            await self.refused(new, 403, "/v1/ingest", headers=key(READERS[0]))
        else:
            right = {"messages": [{"role": "user", "content": "Hello"}]}
            await self.refused(right | draw.choice(WRONG), headers=key(READERS[0]))

    # -- what is asked ------------------------------------------------------------------------------

    def request(self) -> tuple[Fields, str]:
        """A body, and where it is sent."""
        draw = self.random
        kinds: tuple[Callable[[], Fields], ...] = (
            self.plain, self.retrieving, self.retrieving, self.retrieving, self.with_documents,
            self.with_passages, self.completing, self.importing, self.with_tools,
        )  # fmt: skip
        body = draw.choice(kinds)()
        path = COMPLETIONS if "prompt" in body else CHAT
        body["max_tokens"] = draw.choice((1, 4, 8, 8, 16, 40))
        if draw.random() < 0.2 and "tools" not in body:
            body |= {"temperature": draw.choice((0.7, 1.0)), "n": draw.choice((1, 1, 2, 3))}
            if draw.random() < 0.8:
                body["seed"] = draw.randint(0, 9)
        elif draw.random() < 0.5:
            top = draw.choice((1, 3))
            body |= (
                {"logprobs": top}
                if path == COMPLETIONS
                else {"logprobs": True, "top_logprobs": top}
            )
        if draw.random() < 0.2:
            body["stop"] = draw.choice(("e", ["own", "th"], "\n"))
        if draw.random() < 0.15:
            body["cache_salt"] = draw.choice(("one", "two"))
        return body | {"blendrag": self.blending()}, path

    def blending(self) -> Fields:
        draw = self.random
        made: Fields = {"mode": draw.choice(("blend", "blend", "blend", "full", "reuse", "prefix"))}
        if draw.random() < 0.5:
            policies = (
                *("query",) * 6,  # shares chunks in memory
                "hkvd",
                "cacheblend",
                "boundary(16)",
                "hkvd-once",
                "query+hkvd",
                "query+shift",
                "random",
                "full",
            )
            made["policy"] = draw.choice(policies)
        if draw.random() < 0.5:
            made["ratio"] = draw.choice((0.0, 0.15, 0.5, 1.0, "auto"))
        if draw.random() < 0.2:
            made["schedule"] = draw.choice(("linear", "geometric", "first:1"))
        if draw.random() < 0.1:
            made["explain"] = True
        return made

    def question(self) -> str:
        draw = self.random
        number = 100 * draw.randrange(DOCUMENTS) + draw.randrange(PASSAGES)
        return f"What did the company of Place{number * 7} build in {draw.randint(1, 3)}?"

    def chunks(self, most: int = 5, least: int = 1) -> list[str]:
        """Chunks of some documents that the corpus has now, or had, and passages that it never has."""
        draw, texts = self.random, list[str]()
        corpus = self.engine.require_corpus()
        for number in draw.sample(range(DOCUMENTS), 3):
            texts += [chunk.text for chunk in corpus.chunks_of(f"doc{number}.txt")]
        passage = 9000 + 10 * draw.randrange(5)
        texts.append("\n\n".join(map(tiny.sentence, range(passage, passage + 4))))
        return draw.sample(texts, min(draw.randint(least, most), len(texts)))

    def messages(self, content: str) -> list[Fields]:
        """With earlier ones, now and then."""
        draw, before = self.random, list[Fields]()
        if draw.random() < 0.3:
            before.append(
                {"role": "system", "content": "Answer in one word. " * draw.choice((1, 20))}
            )
        if draw.random() < 0.3:
            before += [
                {"role": "user", "content": self.question()},
                {"role": "assistant", "content": "A ship and a mill."},
            ]
        return [*before, {"role": "user", "content": content}]

    def plain(self) -> Fields:
        return {
            "messages": self.messages(self.question() + " word" * self.random.choice((0, 0, 600)))
        }

    def retrieving(self) -> Fields:
        return {"messages": self.messages(self.question()), "retrieve": True}

    def with_documents(self) -> Fields:
        texts: list[Any] = list(self.chunks())
        if self.random.random() < 0.5:
            texts = [{"title": f"the {number}", "text": text} for number, text in enumerate(texts)]
        return {"messages": self.messages(self.question()), "documents": texts}

    def with_passages(self) -> Fields:
        return {"messages": self.messages(self.prompt())}

    def completing(self) -> Fields:
        prompts = [self.prompt() for _ in range(self.random.choice((1, 1, 2)))]
        return {"prompt": prompts if len(prompts) > 1 else prompts[0]}

    def prompt(self) -> str:
        """Chunks and a question, or chunks of which the last one is cut off."""
        text = tiny.LEAD + "\n\n".join(self.chunks())
        if self.random.random() < 0.2:
            return text[: -len(text) // 4]
        return f"{text}\n\nQuestion: {self.question()}"

    def importing(self) -> Fields:
        draw = self.random
        days, place = quoteattr(str(draw.randint(1, 9))), draw.choice(("sea", "hill"))
        imports = [f"<harbour days={days}/>", f"<{place}/>", "<food/>"]
        text = " and ".join(draw.sample(imports, draw.randint(1, 3)))
        content = f"{text} {self.question()}"
        return {
            "messages": [{"role": "user", "content": content}],
            "schema": draw.choice(("placed", "blended")),
        }

    def with_tools(self) -> Fields:
        messages = self.messages(self.question())
        if self.random.random() < 0.5:
            messages += [
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": self.chunks(1)[0]},
            ]
        choice = self.random.choice(("auto", "none", "required"))
        return {"messages": messages, "tools": [WEATHER], "tool_choice": choice}

    # -- what is changed ----------------------------------------------------------------------------

    async def change_something(self) -> None:
        changes: tuple[Callable[[], Any], ...] = (
            self.put, self.put, self.remove, self.lose_kv, self.damage_kv, self.damage_kv, self.collect,
            self.embed,
        )  # fmt: skip
        await self.random.choice(changes)()

    async def put(self, number: int | None = None) -> None:
        """Add or replace a document."""
        number = self.random.randrange(DOCUMENTS) if number is None else number
        async with self._changing:
            self._newest += 1
            new = {"documents": [document(number, self._newest)]}
            await self.change("POST", {"url": "/v1/ingest", "json": new})
            self.counts["replaced" if number in self.versions else "added"] += 1
            self.versions[number] = self._newest

    async def remove(self) -> None:
        async with self._changing:
            if len(self.versions) > 2:
                number = self.random.choice(list(self.versions))
                source = {"source": f"doc{number}.txt"}
                await self.change("DELETE", {"url": "/v1/documents", "params": source})
                del self.versions[number]
                self.counts["removed"] += 1

    async def change(self, method: str, given: Fields) -> None:
        """Until it is done, as forwards may fail."""
        self.changes.append((method, given))
        while True:
            response = await self.client.request(method, headers=key(WRITER), **given)
            if response.status_code == 200:
                break
            assert response.status_code == 500, response.text
            self.counts["repeated"] += 1
        self.over += 1

    def some_key(self) -> str | None:
        keys = [
            key for number in list(self.versions) for key in tiny.chunk_keys(self.engine, number)
        ]
        return self.random.choice(keys) if keys else None

    async def lose_kv(self) -> None:
        if key := self.some_key():
            namespace = self.engine.adapter.identity.namespace
            self.counts["lost"] += self.engine.store.delete(namespace, key)

    async def damage_kv(self) -> None:
        if key := self.some_key():
            with suppress(ValueError, FileNotFoundError):  # it was evicted
                tiny.damage(self.engine, key)
                self.counts["damaged"] += 1

    async def collect(self) -> None:
        most = self.random.choice((0, 200_000, 600_000))
        await asyncio.to_thread(maintenance.collect, self.engine.root, most)
        self.counts["collected"] += 1

    async def embed(self) -> None:
        given = [self.question(), "word " * self.random.randint(1, 200)]
        response = await self.client.post(
            "/v1/embeddings", json={"input": given}, headers=key(READERS[0])
        )
        assert response.status_code == 200, response.text
        for text, made in zip(given, response.json()["data"], strict=True):
            assert made["embedding"] == tiny.WordEmbedder().embed_query(text).tolist()
        self.ended["embedded"] += 1

    # -- many at once -------------------------------------------------------------------------------

    async def all_at_once(self, count: int) -> None:
        """Requests over the same chunks, in the same order or another one, none of which begins before all
        wait and a document begins to change."""
        texts, blending = self.chunks(5, 5), {"ratio": 0.3, "top_k": 4}
        retrieving, bodies = self.retrieving(), list[Fields]()
        for number in range(count):
            mixed = self.random.sample(texts, len(texts))
            pasted = tiny.LEAD + "\n\n".join(mixed) + f"\n\nQuestion: {self.question()}"
            asked = (
                retrieving if number % 2 else {"messages": [{"role": "user", "content": pasted}]}
            )
            tokens = self.random.choice((8, 16, 24))
            bodies.append({**asked, "max_tokens": tokens, "blendrag": blending, "logprobs": True})
        scheduler = self.engine.scheduler
        with scheduler.held():
            asking = [
                asyncio.ensure_future(self.ask(body, CHAT, reader=READERS["retrieve" in body]))
                for body in bodies
            ]
            while len(scheduler.waiting) < count and not any(each.done() for each in asking):
                await asyncio.sleep(0.01)
            changing, begun = asyncio.ensure_future(self.put()), len(self.changes)
            while len(self.changes) == begun:
                await asyncio.sleep(0.01)
        await asyncio.gather(changing, *asking)


def texts_in(value: Any) -> Iterator[str]:
    """All texts in a body."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from texts_in(each)


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


# -- the same request alone -----------------------------------------------------------------------


class Alone:
    """Asks each request again, alone, at another server over the same documents and KV of the same chunks."""

    def __init__(self, client: httpx.AsyncClient, server: Live, outcome: ChurnReport) -> None:
        self.client = RandomClient(client, 0)
        self.engine = server.engine
        self.outcome = outcome
        self.changes: list[tuple[str, Fields]] = []
        self._asked: ComparedRequest
        self._age = 0
        """How many later versions of kept KV there are."""
        self._retrieve = self.engine.retrieve
        self.engine.retrieve = self.retrieved
        self.engine.prefixes.share = self.prepared
        self._plan = self.engine.schemas.plan
        self.engine.schemas.plan = self.with_modules

    async def compare(
        self, asked: Sequence[ComparedRequest], changes: Sequence[tuple[str, Fields]]
    ) -> None:
        """Count what differs."""
        left = list(asked)
        while True:
            state = len(self.changes)
            left = [each for each in left if not await self.is_same(each, state)]
            if state == len(changes):
                break
            await self.change(*changes[state])
        assert not left

    async def change(self, method: str, given: Fields) -> None:
        response = await self.client.client.request(method, headers=key(WRITER), **given)
        assert response.status_code == 200, response.text
        self.changes.append((method, given))

    async def is_same(self, asked: ComparedRequest, state: int) -> bool:
        """Whether nothing is left to compare of ``asked``."""
        if not asked.first <= state <= asked.last:
            return False
        ages = range(VERSIONS if asked.kept else 1)
        for self._age, passages in product(ages, (asked.learned, asked.known)):
            reply = await self.ask(asked, passages)
            why = difference(asked.reply, reply)
            if why and self.is_tie(asked, reply):
                self.outcome.ties += 1
                why = ""
            if not why:
                break
            asked.whys[why] = None
        if why and state < asked.last:
            return False
        if why:
            whys = " and ".join(asked.whys)
            self.outcome.differences.append(f"{whys}: {asked.body}, {asked.about}")
        self.outcome.compared += 1
        self.outcome.while_changing += asked.first < asked.last
        return True

    async def ask(self, asked: ComparedRequest, passages: Sequence[NewEntry]) -> Reply:
        """``passages``: those that were learned."""
        self._asked = asked
        tokens = self.engine.planner.kept._tokens
        tokens.clear()  # what this server's own prefills left
        tokens[""] = 0  # there may be some
        corpus = self.engine.require_corpus()
        if passages:
            corpus.entries.put(passages)
        body = asked.body
        if not body.get("temperature"):
            top = (
                {"logprobs": 3}
                if asked.path == COMPLETIONS
                else {"logprobs": True, "top_logprobs": 3}
            )
            body = {**body, **top}
        reply = await self.client.whole(body, asked.path, headers=key(asked.reader))
        assert reply is not None, asked
        await asyncio.to_thread(self.engine.drain)
        if passages:
            corpus.entries.remove([each.entry.id for each in passages])
            self.engine.library.repair()
        self.engine.prefixes.close()
        return reply

    def retrieved(self, question: str, top_k: int | None = None, **how: Any) -> Any:
        """What is found now, or what was found before a change that came while the request was made."""
        asked = self._asked
        now = self._retrieve(question, top_k, **how)
        asked.found.append(now)

        def named(chunks: Any) -> list[tuple[Any, ...]]:
            return [(each.chunk_id, each.source, each.start) for each in chunks]

        return next((found for found in asked.found if named(found) == asked.sources), now)

    def prepared(
        self,
        request: Request,
        controller: Controller,
        _calibrated: object,
        check: Callable[[], None],
    ) -> tuple[str, ...]:
        """In place of sharing with waiting requests: the store has KV of the chunks that the answer says had
        some, and the beginning is in memory that the answer says was."""
        chunks, held = self._asked.about["chunks"], 0
        segments = request.prompt.chunks
        if [each.chunk_id for each in segments] != [each["chunk_id"] for each in chunks]:
            return ()  # another state of the corpus
        for segment, chunk in zip(segments, chunks, strict=True):
            if chunk["reason"] == IN_MEMORY.text:
                held = segment.end
            elif chunk["reason"].startswith(KEPT):
                self.engine.store.delete(*controller._place(segment, request.prompt))
                self.keep(request, controller, segment)
            elif chunk["reason"] in (NO_KV.text, CORRUPT.text):
                self.engine.store.delete(*controller._place(segment, request.prompt))
            else:
                job = Job(segment.stored_ids, controller.prefix_ids, segment.scope)
                self.engine.background.encode_first([job], check)
        if held:
            prefixes, ids = self.engine.prefixes, torch.tensor([request.prompt.ids[:held]])
            _, cache, _ = Fusor(self.engine.adapter).prefill(
                ids, tiny.request(ids, ()), check=check
            )
            tree = prefixes._tree_for(self.engine.adapter.weights_now())
            tree.insert(family_of(request), request.prompt.ids[:held], cache.buffers(held))
        return ()

    def keep(self, request: Request, controller: Controller, segment: Segment) -> None:
        """What an earlier prompt left of this chunk."""
        engine, scope = self.engine, request.options.scope
        assert scope is not None
        within = kept_namespace(controller.namespace, scope)
        key = chunk_key(within, controller.prefix_ids, segment.stored_ids)
        versions = self._asked.kept[within, key]
        kv = versions[max(0, len(versions) - 1 - self._age)]
        engine.store.delete(within, key)
        engine.store.memory.put(within, key, kv)
        engine.planner.kept._tokens[key] = kv.tokens

    def with_modules(self, placed: FixedPrompt, *more: Any) -> Any:
        """A plan over a store that has the modules that the answer says were stored, and no others of it."""
        schemas, store = self.engine.schemas, self.engine.store
        namespace, missing = schemas._namespace(), list[str]()
        parts = [part for part in placed.parts if isinstance(part, CachedStretch)]
        for part, chunk in zip(parts, self._asked.about["chunks"], strict=True):
            if chunk["reason"] == ENCODED_NOW.text:
                missing.append(_key(namespace, part.block, part.start, part.end))
            elif schemas._missing(namespace, part.block):
                schemas._encode(namespace, part.block)
        for key in missing:
            store.delete(namespace, key)
        return self._plan(placed, *more)

    def is_tie(self, asked: ComparedRequest, reply: Reply) -> bool:
        """Whether the texts differ from a token on that was as likely as another one."""
        ours, alone = asked.reply.choices[0], reply.choices[0]
        if (
            len(reply.choices) > 1
            or alone.likely is None
            or compared(asked.reply) != compared(reply)
        ):
            return False
        told = ""
        for token in alone.likely:
            if len(token.top) > 1 and token.top[0] - token.top[1] < TIE:
                return True
            told += token.token
            if not ours.text.startswith(told):
                break
        return False


def compared(reply: Reply) -> list[Any]:
    """What was done for an answer, apart from times and from where KV came from."""
    names = ("mode", "policy", "schedule", "prompt_tokens")
    return [
        (
            *((name, about[name]) for name in names),
            [(chunk["chunk_id"], chunk["tokens"], chunk["outcome"]) for chunk in about["chunks"]],
            [
                (each["chunk_id"], each["source"], each["start"])
                for each in about.get("sources", ())
            ],
        )
        for about in reply.about
    ]


def difference(ours: Reply, alone: Reply) -> str:
    """How they differ; empty if they do not."""
    for mine, other in zip(compared(ours), compared(alone), strict=True):
        for one, another in zip(mine, other, strict=True):
            if one != another:
                return f"{one} instead of {another}"
    if len(ours.choices) != len(alone.choices):
        return f"{len(ours.choices)} instead of {len(alone.choices)} choices"
    for one, another in zip(ours.choices, alone.choices, strict=True):
        if replace(one, likely=None) != replace(another, likely=None):
            return f"{replace(one, likely=None)} instead of {replace(another, likely=None)}"
        if one.likely is not None and not is_close(one, another):
            return f"log probabilities {one.likely} instead of {another.likely}"
    return ""


def is_close(one: Choice, another: Choice) -> bool:
    """Whether log probabilities are equal to rounding."""
    assert one.likely is not None
    assert another.likely is not None
    if [each.token for each in one.likely] != [each.token for each in another.likely]:
        return False
    pairs = zip(one.likely, another.likely, strict=True)
    return all(
        abs(a - b) < CLOSE
        for mine, other in pairs
        for a, b in zip((mine.logprob, *mine.top), (other.logprob, *other.top), strict=False)
    )


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


# -- all of it ------------------------------------------------------------------------------------


async def run(
    folder: Path,
    requests: int,
    clients: int,
    seed: int,
    say: Callable[[str], None] = lambda line: None,
    parts: int = 10,
) -> ChurnReport:
    """``requests`` in ``parts``, after each of which they are compared."""
    outcome, limits = ChurnReport(), httpx.Limits(max_connections=clients)
    process = psutil.Process()
    with serving(folder / "alone", learn=False) as second, ExitStack() as first:
        server = first.enter_context(serving(folder / "served", True, DISK_BYTES))

        def connected(to: Live) -> httpx.AsyncClient:
            return httpx.AsyncClient(base_url=to.url, timeout=STUCK_S, limits=limits)

        soak = ChurnSoak(connected(server), server, seed)
        alone = Alone(connected(second), second, outcome)
        for number in range(DOCUMENTS - 2):
            await soak.put(number)
        soak.watch()
        counts = [requests * (i + 1) // parts - requests * i // parts for i in range(parts)]
        for number, count in enumerate(counts):
            hook = server.engine.adapter.decoder_layers[1].register_forward_pre_hook(soak.fail)
            burst = min(count // 2, clients)
            free = asyncio.Semaphore(clients)

            async def when_free(free: asyncio.Semaphore = free) -> None:
                async with free:
                    await soak.one()

            await soak.all_at_once(burst)
            soak.faults = FAULTS
            await asyncio.gather(*(when_free() for _ in range(count - burst)))
            soak.faults = 0.0
            server.settled()
            check_nothing_left(server.engine)
            hook.remove()
            await alone.compare(soak.asked, soak.changes)
            soak.asked.clear()
            outcome.ended, outcome.changes = soak.ended, soak.counts
            outcome.mebibytes.append(process.memory_info().rss >> 20)
            held = f"{outcome.mebibytes[-1]} MiB, {process.num_threads()} threads"
            say(f"{sum(counts[: number + 1])} requests: {outcome}; {held}")
            if number % 3 == 1:
                await soak.client.aclose()
                first.close()
                server = first.enter_context(serving(folder / "served", True, DISK_BYTES))
                soak.client, soak.server = connected(server), server
                soak.watch()
                soak.counts["restarted"] += 1
        await soak.client.aclose()
        await alone.client.client.aclose()
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    logging.disable()  # of faults and damage
    events.SEND_TIMEOUT_S = 600.0  # on a busy machine, others take long
    with tempfile.TemporaryDirectory() as folder:
        asked = given.requests, given.clients, given.seed
        outcome = asyncio.run(run(Path(folder), *asked, say=lambda line: print(line, flush=True)))
    print(*outcome.differences, sep="\n\n")
    half = outcome.mebibytes[len(outcome.mebibytes) // 2]
    assert outcome.mebibytes[-1] < (1 + LEAK) * half, f"memory grew: {outcome.mebibytes} MiB"
    raise SystemExit(bool(outcome.differences))


if __name__ == "__main__":
    main()
