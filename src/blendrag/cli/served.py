"""A question to the running server of a store, which has the model open already.

It is used only if the question needs nothing but the server's own engine. Where it does not answer, a note
says why, and the command answers itself.
"""

from __future__ import annotations

import hmac
import http.client
import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from itertools import chain
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import typer

from blendrag.cli import options
from blendrag.cli.output import say
from blendrag.config import Settings, absolute_model, settings
from blendrag.errors import BlendragError
from blendrag.metrics import ChunkReport, RequestMetrics
from blendrag.store import server_record
from blendrag.store.server_record import ServerRecord

if TYPE_CHECKING:
    from blendrag.chat.reply import Reasoning

#: Seconds in which a server must prove who it is.
PROOF_TIMEOUT_S = 5.0
#: Seconds without a byte after which a server counts as gone; it sends a comment every few seconds.
SILENCE_S = 60.0
#: Longest line of an answer.
MAX_LINE_BYTES = 1 << 26

#: Options of a question that a request has, by the name of its field; ``blendrag`` has the others.
_FIELDS = {
    "max_new_tokens": "max_tokens", "temperature": "temperature", "stop": "stop",
    "chat_template_kwargs": "chat_template_kwargs", "enable_thinking": "enable_thinking",
}  # fmt: skip
_BLENDING = ("mode", "policy", "schedule", "ratio", "min_ratio", "plain_messages", "top_k")
#: Parameters of the command that do not matter to the server.
_OWN = frozenset({"question", "sources", "json", "verbose", "store", "model"})
#: Settings that may differ between the server and the command.
_OF_SERVER = frozenset({"model", "store", "ram_bytes", "disk_bytes", "remote", "decode_weights"})


class _NotServed(Exception):
    """Why the server does not answer."""


class ServedSource(SimpleNamespace):
    """What a server told of a source."""

    def as_dict(self) -> dict[str, Any]:
        return vars(self)


@dataclass(frozen=True)
class ServedAnswer:
    """The parts of an answer that are shown."""

    text: str
    reasoning: str
    finish_reason: str
    metrics: RequestMetrics
    sources: list[ServedSource]


@dataclass
class ServedPieces:
    """An answer as it comes from a server, like :class:`~blendrag.engine.answers.AnswerIterator`."""

    connection: http.client.HTTPConnection
    events: Iterator[dict[str, Any]]
    with_reasoning: bool = True
    _said: list[str] = field(default_factory=list)
    _thought: list[str] = field(default_factory=list)
    _ended: dict[str, Any] = field(default_factory=dict)
    _reason: str = ""

    def __iter__(self) -> Iterator[str | Reasoning]:
        from blendrag.chat.reply import Reasoning

        for event in self.events:
            self._ended |= event.get("blendrag", {})
            for choice in event.get("choices", ()):
                self._reason = choice.get("finish_reason") or self._reason
                if thought := choice["delta"].get("reasoning_content"):
                    self._thought.append(thought)
                    if self.with_reasoning:
                        yield Reasoning(thought)
                if text := choice["delta"].get("content"):
                    self._said.append(text)
                    yield text

    def close(self) -> None:
        """End the answer, which the server then computes no further."""
        self.connection.close()

    @property
    def answer(self) -> ServedAnswer:
        known = {each.name for each in fields(RequestMetrics)}
        measured = {name: value for name, value in self._ended.items() if name in known}
        for name, kind in (("chunks", lambda each: ChunkReport(**each)), ("notes", str)):
            measured[name] = tuple(kind(each) for each in measured.get(name, ()))
        sources = [ServedSource(**each) for each in self._ended.get("sources", ())]
        text, thought = "".join(self._said), "".join(self._thought)
        return ServedAnswer(text, thought, self._reason, RequestMetrics(**measured), sources)


def pieces(context: typer.Context, question: str) -> ServedPieces | None:
    """The answer of the store's running server; ``None`` if there is none, or if the options of the command
    need an engine of their own. A note says why a server that is there does not answer."""
    record = server_record.read(context.params["store"] or settings().store)
    body = None if record is None else body_for(context.params, question, record)
    if record is None or body is None:
        return None
    try:
        if record.needs_key:
            raise _NotServed("asks for an API key")
        found = _asked(record, body)
    except _NotServed as why:
        say("note", f"answered without the server of this store at {record.url}, which {why}")
        return None
    say("note", f"answered by the server of this store at {record.url}")
    return found


def body_for(
    params: Mapping[str, Any], question: str, record: ServerRecord
) -> dict[str, Any] | None:
    """The request for a question with these options; ``None`` if the server cannot have them."""
    now, usual = settings(), Settings()
    wanted = params.get("model") or now.model
    if wanted is not None and absolute_model(wanted) != absolute_model(record.model):
        return None
    sent = (*_FIELDS, *_BLENDING)
    own = {*options.ENGINE, *options.REQUEST}.difference(_OF_SERVER, sent)
    if any(getattr(now, name, None) != getattr(usual, name, None) for name in own):
        return None
    given = options.given(params, [*params])
    for name in sent:  # the server has its own variables
        value = getattr(now, name, None)
        if value is not None and value != getattr(usual, name, None):
            given.setdefault(name, value)
    given.setdefault("max_new_tokens", options.ANSWER_TOKENS)
    given = {name: value for name, value in given.items() if name not in _OWN}
    if any(value and name not in sent for name, value in given.items()):
        return None
    body: dict[str, Any] = {_FIELDS[name]: given[name] for name in _FIELDS if name in given}
    body["blendrag"] = {name: given[name] for name in _BLENDING if name in given}
    body["messages"] = [{"role": "user", "content": question}]
    return body | {"retrieve": True, "stream": True}


def _asked(record: ServerRecord, body: dict[str, Any]) -> ServedPieces:
    """The answer, whose first part is there. Raises :class:`_NotServed`."""
    _check_proof(record)
    connection = http.client.HTTPConnection(record.host, record.port, timeout=SILENCE_S)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body, default=str), headers)
        response = connection.getresponse()
        if response.status != 200:
            refusal = json.loads(response.read(MAX_LINE_BYTES))
            raise _NotServed(f"refused the question: {refusal['error']['message']}")
        events = events_of(response)
        try:
            first = next(events, {})
        except BlendragError as error:
            raise _NotServed(f"failed: {error}") from error
        return ServedPieces(connection, chain([first], events))
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError | http.client.HTTPException | ValueError | LookupError):
            raise _NotServed(f"stopped answering ({type(error).__name__})") from error
        raise


def _check_proof(record: ServerRecord) -> None:
    """Raise :class:`_NotServed` unless the server that wrote ``record`` listens there."""
    challenge = secrets.token_hex(16)
    connection = http.client.HTTPConnection(record.host, record.port, timeout=PROOF_TIMEOUT_S)
    try:
        connection.request("GET", f"/health?challenge={challenge}")
        told = json.loads(connection.getresponse().read(MAX_LINE_BYTES))
        proof = str(told.get("proof", ""))
    except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
        raise _NotServed("does not answer") from error
    finally:
        connection.close()
    if not hmac.compare_digest(proof.encode(), record.proof(challenge).encode()):
        raise _NotServed("is gone: something else listens there")


def events_of(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The objects of a streamed answer. Raises :class:`BlendragError` for an error among them, or if the
    stream breaks off."""
    with suppress(OSError, http.client.HTTPException, ValueError):
        while line := response.readline(MAX_LINE_BYTES):
            name, _, data = line.partition(b": ")
            if name != b"data":
                continue
            if data.strip() == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise BlendragError(event["error"]["message"])
            yield event
    raise BlendragError("the server stopped before the answer was complete; ask again")
