"""Questions to the running server of a store, which has the model open already.

It is used only if they need nothing but the server's own engine. Where it does not answer, a note says why,
and the command answers itself. A busy server may take its time: it is waited for as long as it holds the
connection.
"""

from __future__ import annotations

import hmac
import http.client
import json
import os
import secrets
import select
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from itertools import chain
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import typer

from blendrag import __version__
from blendrag.cli import options
from blendrag.cli.output import say
from blendrag.config import Settings, absolute_model, settings, variable_of
from blendrag.errors import (
    BlendragError,
    InvalidInputError,
    InvalidOptionError,
    UnsupportedModelError,
)
from blendrag.metrics import ChunkReport, RequestMetrics
from blendrag.store import server_record
from blendrag.store.server_record import ServerRecord
from blendrag.text.names import page_label

if TYPE_CHECKING:
    from blendrag.chat.reply import Reasoning

#: Seconds in which a server must prove who it is: as many as opening the model here might take.
PROOF_TIMEOUT_S = 20.0
#: Seconds without a byte after which a note says so; an idle server sends a comment every few seconds.
SILENCE_S = 60.0
#: Longest line of an answer.
MAX_LINE_BYTES = 1 << 26

#: Options of a question that a request has, by the name of its field; ``blendrag`` has the others.
_FIELDS = {
    "max_new_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p", "seed": "seed",
    "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty", "stop": "stop",
    "chat_template_kwargs": "chat_template_kwargs", "enable_thinking": "enable_thinking",
}  # fmt: skip
#: Arguments of ``generate`` that are fields of a request, and those that are if tokens are sampled: with
#: them the server samples, even without a temperature.
_GENERATE = frozenset({"repetition_penalty", "no_repeat_ngram_size"})
_SAMPLING = frozenset({"top_k", "min_p", "typical_p"})
_BLENDING = (
    "mode", "policy", "schedule", "ratio", "min_ratio", "plain_messages", "top_k", "only", "where",
    "search", "system", "prompt_template",
)  # fmt: skip
#: Parameters of the command that do not matter to the server.
_OWN = frozenset({"question", "sources", "json", "verbose", "store", "model"})
#: Settings that may differ between the server and the command.
_OF_SERVER = frozenset({"model", "store", "ram_bytes", "disk_bytes", "remote", "decode_weights"})


#: The code of a refusal for a prompt that is too long, with the server or without.
TOO_LONG = "context_length_exceeded"
#: The code of a refusal that a limit of the server causes, and not the request.
SERVER_LIMIT = "server_limit"
#: Names of options by those that a request has for them.
_OPTIONS = {
    **{sent: name for name, sent in _FIELDS.items()},
    **{f"blendrag.{name}": name for name in _BLENDING},
    **dict.fromkeys((*_GENERATE, *_SAMPLING), "generate_kwargs"),
    "filters": "filter",
}


class NotServed(Exception):
    """Why the server does not answer."""

    def __init__(self, why: str, error: Mapping[str, Any] | None = None) -> None:
        """``error``: the server's own about the request, if it sent one."""
        super().__init__(why)
        self.error = error or {}

    def error_here(self, given: Mapping[str, Any]) -> BlendragError | None:
        """What the command with these options would refuse the question with, too, after it has opened the
        model."""
        param, code = self.error.get("param"), self.error.get("code")
        message = str(self.error.get("message", ""))
        if code == TOO_LONG:
            for sent in ("blendrag.top_k", "max_tokens"):
                message = message.replace(sent, options.flag(_OPTIONS[sent]))
            return InvalidInputError(message)
        is_of_request = self.error.get("type") == "invalid_request_error" and code is None
        if param is None and is_of_request:  # an empty question, a store without documents, …
            return InvalidInputError(message)
        if code == SERVER_LIMIT or param not in _OPTIONS:
            return None
        name = _OPTIONS[param]
        if name == "mode":  # its values are checked before: the model has no such mode
            return UnsupportedModelError(message)
        wrong = message if name == "generate_kwargs" else message.removeprefix(f"{param} ")
        if given.get(name) is None and os.environ.get(variable_of(name)):
            name = variable_of(name)
        return InvalidOptionError(name, wrong)


class ServedSource(SimpleNamespace):
    """What a server told of a source."""

    @property
    def page_label(self) -> str:
        return page_label(self.page, getattr(self, "last_page", None))

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

    @property
    def left_out(self) -> int:
        """How many of the oldest questions and answers the prompt was without; known at its end."""
        return int(self._ended.get("left_out", 0)) // 2

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


@dataclass(frozen=True)
class StoreServer:
    """The running server of a store, and how a command's questions are asked."""

    record: ServerRecord
    body: Mapping[str, Any]
    """A request without its messages."""

    def check(self) -> None:
        """Raise :class:`NotServed` unless it answers this command's questions."""
        if self.record.version != __version__:
            raise NotServed(f"runs blendrag {self.record.version}, not {__version__}")
        if self.record.needs_key:
            raise NotServed("asks for an API key")
        _check_proof(self.record)

    def ask(self, question: str, history: Sequence[tuple[str, str]] = ()) -> ServedPieces:
        """The answer, whose first part is there. Raises :class:`NotServed`.

        ``history``: earlier questions and answers, of which the oldest are left out if the context is full.
        """
        self.check()
        turns = ((("user", asked), ("assistant", answer)) for asked, answer in history)
        messages = [{"role": role, "content": text} for turn in turns for role, text in turn]
        messages.append({"role": "user", "content": question})
        blending = {**self.body["blendrag"], "trim_history": True}
        return _asked(self.record, {**self.body, "blendrag": blending, "messages": messages})

    def not_used(self, why: NotServed) -> None:
        """Say why it does not answer."""
        say("note", f"answered without the server of this store at {self.record.url}, which {why}")


def is_announced(context: typer.Context) -> bool:
    """Whether a server of the store has written its record, whether or not it can answer this command."""
    return server_record.read(context.params["store"] or settings().store) is not None


def server_of(context: typer.Context) -> StoreServer | None:
    """The store's server; ``None`` if there is none, or if the options of the command need an engine of their
    own."""
    record = server_record.read(context.params["store"] or settings().store)
    body = None if record is None else body_for(context.params, record)
    return None if record is None or body is None else StoreServer(record, body)


def pieces(context: typer.Context, question: str) -> ServedPieces | None:
    """The answer of the store's running server; ``None`` without :func:`server_of`. A note says why a server
    that is there does not answer. Raises the error of a question that would be refused here, too."""
    server = server_of(context)
    if server is None:
        return None
    try:
        found = server.ask(question)
    except NotServed as why:
        if (error := why.error_here(context.params)) is not None:
            raise error from why
        server.not_used(why)
        return None
    say("note", f"answered by the server of this store at {server.record.url}")
    return found


def body_for(params: Mapping[str, Any], record: ServerRecord) -> dict[str, Any] | None:
    """A request with these options, without messages; ``None`` if the server cannot have them."""
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
    generate = given.pop("generate_kwargs", {})
    samples = bool(given.get("temperature"))
    if not {*generate} <= (_GENERATE | _SAMPLING if samples else _GENERATE):
        return None
    if "top_p" in given and not samples:  # refused
        return None
    if any(value and name not in sent for name, value in given.items()):
        return None
    body: dict[str, Any] = {_FIELDS[name]: given[name] for name in _FIELDS if name in given}
    body["blendrag"] = {name: given[name] for name in _BLENDING if name in given}
    body |= generate
    if record.name:
        body["model"] = record.name
    return body | {"retrieve": True, "stream": True}


def _asked(record: ServerRecord, body: dict[str, Any]) -> ServedPieces:
    connection = http.client.HTTPConnection(record.host, record.port, timeout=PROOF_TIMEOUT_S)
    try:
        connection.connect()
        connection.sock = _PatientSocket(fileno=connection.sock.detach())
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body, default=str), headers)
        response = connection.getresponse()
        if response.status != 200:
            error = json.loads(response.read(MAX_LINE_BYTES))["error"]
            about = error if response.status == 400 else None
            raise NotServed(f"refused the question: {error['message']}", about)
        events = events_of(response)
        try:
            first = next(events, {})
        except ServedError as failed:
            raise NotServed(f"failed: {failed}", failed.error) from failed
        return ServedPieces(connection, chain([first], events))
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError | http.client.HTTPException | ValueError | LookupError):
            raise NotServed(f"stopped answering ({type(error).__name__})") from error
        raise


def _check_proof(record: ServerRecord) -> None:
    """Raise :class:`NotServed` unless the server that wrote ``record`` listens there."""
    challenge = secrets.token_hex(16)
    connection = http.client.HTTPConnection(record.host, record.port, timeout=PROOF_TIMEOUT_S)
    try:
        connection.request("GET", f"/health?challenge={challenge}")
        response = connection.getresponse()
        told = json.loads(response.read(MAX_LINE_BYTES))
        proof = str(told.get("proof", ""))
        refusal = "" if response.status == 200 else str(told["error"]["message"])
    except (OSError, http.client.HTTPException, ValueError, AttributeError, LookupError) as error:
        raise NotServed("does not answer") from error
    finally:
        connection.close()
    if refusal:
        raise NotServed(f"does not work: {refusal}")
    if not hmac.compare_digest(proof.encode(), record.proof(challenge).encode()):
        raise NotServed("is gone: something else listens there")


class _PatientSocket(socket.socket):
    """Waits as long as the server holds the connection, and says so once."""

    _has_said = False

    def recv_into(self, *where: Any) -> int:
        if not self._has_said and not select.select([self], [], [], SILENCE_S)[0]:
            self._has_said = True
            silent = f"the server has sent nothing for {SILENCE_S:g} s, but holds the connection"
            say("note", f"{silent}; Ctrl-C ends the wait")
        return super().recv_into(*where)


class ServedError(BlendragError):
    """An error that ended a streamed answer; ``error`` is what the server sent."""

    def __init__(self, message: str, error: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.error = error or {}


def events_of(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The objects of a streamed answer. Raises :class:`ServedError` for an error among them, or if the stream
    breaks off."""
    with suppress(OSError, http.client.HTTPException, ValueError):
        while line := response.readline(MAX_LINE_BYTES):
            name, _, data = line.partition(b": ")
            if name != b"data":
                continue
            if data.strip() == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise ServedError(event["error"]["message"], event["error"])
            yield event
    raise ServedError("the server stopped before the answer was complete; ask again")
