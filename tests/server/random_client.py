"""Clients of the soaks over HTTP: they read answers whole or streamed, or leave; and forwards that fail."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx

CHAT = "/v1/chat/completions"
FAULT = "a fault of the soak"
#: Bodies of chats that are refused, as changes of a right one.
WRONG: tuple[dict[str, Any], ...] = (
    {"temperature": -1},
    {"max_tokens": 0},
    {"n": 99},
    {"stream": "yes"},
    {"blendrag": {"mode": "fast"}},
    {"messages": [{"role": "user", "content": "word " * 9000}]},
)

Fields = dict[str, Any]


class Likely(NamedTuple):
    """A token of an answer, its log probability, and those of the most likely tokens, the best first."""

    token: str
    logprob: float
    top: tuple[float, ...]


@dataclass(frozen=True)
class Choice:
    text: str
    finish_reason: str | None
    calls: tuple[tuple[str, str], ...] = ()
    """Names and arguments of tool calls."""
    likely: tuple[Likely, ...] | None = None


@dataclass(frozen=True)
class Reply:
    """An answer, whether it came whole or in events."""

    choices: tuple[Choice, ...]
    about: tuple[Fields, ...]
    """The object ``blendrag`` of each prompt."""

    @property
    def text(self) -> str:
        return self.choices[0].text

    @classmethod
    def of(cls, parts: Iterable[Fields], about: Any) -> Reply:
        """From choices of a whole answer or of all events."""
        said: dict[int, Fields] = {}
        for part in parts:
            one = said.setdefault(
                part["index"], {"text": "", "calls": [], "end": None, "likely": None}
            )
            told = part.get("message") or part.get("delta") or {"content": part.get("text")}
            one["text"] += told.get("content") or ""
            one["calls"] += [call["function"] for call in told.get("tool_calls") or ()]
            one["end"] = part["finish_reason"] or one["end"]
            if part.get("logprobs"):
                one["likely"] = _likely(part["logprobs"])
        choices = (
            Choice(
                one["text"],
                one["end"],
                tuple((call["name"], call["arguments"]) for call in one["calls"]),
                one["likely"],
            )
            for _, one in sorted(said.items())
        )
        return cls(tuple(choices), (about,) if isinstance(about, dict) else tuple(about))


def _likely(given: Mapping[str, Any]) -> tuple[Likely, ...]:
    """From the logprobs of a chat or of a completion."""
    if "content" in given:
        return tuple(
            Likely(
                one["token"], one["logprob"], tuple(top["logprob"] for top in one["top_logprobs"])
            )
            for one in given["content"]
        )
    # a completion has the likely ones by text, of which several may be the same
    pairs = zip(given["tokens"], given["token_logprobs"], strict=True)
    return tuple(Likely(token, logprob, ()) for token, logprob in pairs)


class RandomClient:
    """Draws with one seed, asks one server and counts how its requests ended."""

    def __init__(self, client: httpx.AsyncClient, seed: int) -> None:
        self.client = client
        self.random = random.Random(seed)
        self._chance = random.Random(seed)  # drawn on another thread
        self.ended: Counter[str] = Counter()
        self.faults = 0.0
        """How many of 1,000 forwards fail."""

    def fail(self, *_: object) -> None:
        """Called in every forward."""
        if self._chance.random() < self.faults / 1000:
            self.ended["faults"] += 1
            raise RuntimeError(FAULT)

    async def whole(self, body: Fields, path: str = CHAT, **more: Any) -> Reply | None:
        """The reply; ``None`` if it failed by a fault or came too late."""
        response = await self.client.post(path, json=body, **more)
        if response.status_code != 200:
            return self.failed(response.json())
        answer = response.json()
        return Reply.of(answer["choices"], answer["blendrag"])

    async def streamed(self, body: Fields, path: str = CHAT, **more: Any) -> Reply | None:
        sent = {**body, "stream": True}
        async with self.client.stream("POST", path, json=sent, **more) as response:
            return self.read([line async for line in response.aiter_lines()])

    def read(self, lines: Sequence[str]) -> Reply | None:
        """The reply in a stream; ``None`` if it failed by a fault."""
        if lines[0].startswith("{"):
            return self.failed(json.loads("".join(lines)))
        told = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert told.pop() == "[DONE]"
        chunks = [json.loads(line) for line in told]
        if "error" in chunks[-1]:
            return self.failed(chunks[-1])
        (about,) = (chunk["blendrag"] for chunk in chunks if "blendrag" in chunk)
        return Reply.of((part for chunk in chunks for part in chunk["choices"]), about)

    def failed(self, answer: Fields) -> None:
        """An error that was meant to be."""
        error = answer["error"]
        late = "no answer within the timeout" in error["message"]
        assert error["type"] == "server_error", error
        assert FAULT not in error["message"]
        self.ended["too late" if late else "failed"] += 1

    async def refused(self, body: Fields, status: int = 400, path: str = CHAT, **more: Any) -> None:
        response = await self.client.post(path, json=body, **more)
        assert response.status_code == status, response.text
        assert set(response.json()) == {"error"}

    async def leave(self, body: Fields, path: str = CHAT, **more: Any) -> None:
        """Close a connection of its own after a while, or after some events."""
        given = {"base_url": self.client.base_url, "timeout": self.client.timeout, "verify": False}
        events, sent = self.random.randint(0, 3), {**body, "stream": True}
        async with httpx.AsyncClient(**given) as client:
            if self.random.random() < 0.5:
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.3 * self.random.random()):
                        await client.post(path, json=body, **more)
                return
            async with client.stream("POST", path, json=sent, **more) as response:
                async for _ in response.aiter_lines():
                    events -= 1
                    if events < 0:
                        return
