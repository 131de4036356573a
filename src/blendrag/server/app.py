"""The routes. A request is let in, asked of the engine, and answered whole or in events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from blendrag.engine import Answer, BlendEngine
from blendrag.frameworks.streaming import Piece, StreamedText, astream_pieces, to_thread
from blendrag.server.access import ApiKeys, Door
from blendrag.server.admission import Admission
from blendrag.server.asking import Asked, asked_chat
from blendrag.server.bodies import ChatBody
from blendrag.server.events import DONE, EventStream, event, while_connected
from blendrag.server.refusals import Refusal, install_refusals, refusal_of
from blendrag.server.replies import (
    Fields,
    Reply,
    blendrag_fields,
    chat_logprobs,
    chat_message,
    finish_reason,
    text_of,
    tool_calls,
    usage,
)


@dataclass(frozen=True)
class Limits:
    """What one server takes."""

    max_requests: int = 256
    """Waiting and running at once; more are refused with 429."""
    max_body_bytes: int = 8 * 1024**2
    max_tokens: int | None = None
    """Longest answer that a request may ask for; ``None``: what fits the model's context."""


@dataclass(frozen=True)
class Service:
    """One engine behind HTTP."""

    engine: BlendEngine
    limits: Limits = Limits()
    keys: ApiKeys = field(default_factory=ApiKeys)
    began: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def admission(self) -> Admission:
        return Admission(self.limits.max_requests)

    @cached_property
    def model_id(self) -> str:
        """The model's name; of a directory the last part, which clients can write."""
        name = self.engine.resources.model_name
        return Path(name).name if Path(name).is_absolute() else name

    def check_model(self, name: str | None) -> None:
        """Raise :class:`Refusal` 404 for another model than the served one."""
        if name is not None and name not in (self.model_id, self.engine.resources.model_name):
            raise Refusal(
                404,
                f"the model {name!r:.100} is not served here; this server has {self.model_id!r}",
                param="model",
                code="model_not_found",
            )

    async def pieces(self, body: ChatBody, asked: list[Asked]) -> AsyncGenerator[Piece, None]:
        """The answer to a chat in pieces, from the queue to its end; ``asked`` gets the request."""
        with self.admission.ticket() as ticket:
            limit = self.limits.max_tokens
            asked.append(await to_thread(asked_chat, self.engine, body, limit))
            streaming = astream_pieces(self.engine, asked[0].prompt, asked[0].options)
            async with aclosing(streaming):
                async for piece in streaming:
                    ticket.begun()
                    if piece.answer is not None:
                        self.admission.note(piece.answer.metrics)
                    yield piece


def create_app(service: Service) -> FastAPI:
    """The ASGI application; the caller closes the engine."""
    app = FastAPI(title="blendrag", docs_url=None, redoc_url=None)
    app.add_middleware(Door, keys=service.keys, max_body_bytes=service.limits.max_body_bytes)
    install_refusals(app)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatBody, request: Request) -> Response:
        service.check_model(body.model)
        if body.stream:
            events = chat_events(service, body)
            first = await while_connected(request, anext(events))
            return EventStream(with_first(first, events))
        return JSONResponse(await while_connected(request, chat_completion(service, body)))

    @app.get("/v1/models")
    async def models() -> Fields:
        return {"object": "list", "data": [model_fields(service)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Fields:
        service.check_model(name)
        return model_fields(service)

    return app


def model_fields(service: Service) -> Fields:
    return {
        "id": service.model_id,
        "object": "model",
        "created": service.began,
        "owned_by": "blendrag",
        "max_model_len": service.engine.resources.context_tokens,
    }


async def with_first(first: str, events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """``first`` and the rest."""
    async with aclosing(events):
        yield first
        async for each in events:
            yield each


# -- chats ----------------------------------------------------------------------------------------


async def chat_completion(service: Service, body: ChatBody) -> Fields:
    """A whole answer."""
    asked: list[Asked] = []
    answer: Answer | None = None
    async with aclosing(service.pieces(body, asked)) as pieces:
        async for piece in pieces:
            answer = piece.answer
    assert answer is not None
    choices = []
    for index, text in enumerate(answer.texts):
        parsed = asked[0].parsed(text)
        choices.append(
            {
                "index": index,
                "message": chat_message(parsed),
                "logprobs": chat_logprobs(answer),
                "finish_reason": finish_reason(answer, parsed),
            }
        )
    reply = Reply("chat.completion", "chatcmpl", service.model_id)
    return reply.whole(choices, [answer], blendrag=blendrag_fields(answer, asked[0].sources))


async def chat_events(service: Service, body: ChatBody) -> AsyncGenerator[str, None]:
    """The events of a streamed answer.

    Errors before the first token are raised. Later ones are an event, because the status was sent.
    """
    reply = Reply("chat.completion", "chatcmpl", service.model_id)
    asked: list[Asked] = []
    shown: StreamedText | None = None

    def delta(index: int, fields: Fields, **more: Any) -> Fields:
        return {"index": index, "delta": fields, "logprobs": None, "finish_reason": None, **more}

    try:
        async with aclosing(service.pieces(body, asked)) as pieces:
            async for piece in pieces:
                if shown is None:
                    request = asked[0]
                    tokens = service.engine.resources.tokens if request.options.tools else None
                    shown = StreamedText(tokens, request.options.opening)
                    for index in range(body.n or 1):
                        yield event(
                            reply.chunk([delta(index, {"role": "assistant", "content": ""})])
                        )
                if piece.answer is None:
                    if text := shown.add(piece.text):
                        yield event(reply.chunk([delta(0, {"content": text})]))
                    continue
                answer = piece.answer
                for index, whole in enumerate(answer.texts):
                    parsed = request.parsed(whole)
                    rest = text_of(parsed) if index else shown.rest(text_of(parsed))
                    if rest:
                        yield event(reply.chunk([delta(index, {"content": rest})]))
                    if parsed.calls:
                        calls = [{"index": i, **each} for i, each in enumerate(tool_calls(parsed))]
                        yield event(reply.chunk([delta(index, {"tool_calls": calls})]))
                    if (likely := chat_logprobs(answer)) is not None:
                        yield event(reply.chunk([delta(index, {}, logprobs=likely)]))
                    last = delta(index, {}, finish_reason=finish_reason(answer, parsed))
                    about = blendrag_fields(answer, request.sources)
                    yield event(reply.chunk([last], **({} if index else {"blendrag": about})))
                if body.includes_usage:
                    yield event(reply.chunk([], usage=usage([answer])))
    except Exception as exc:
        if shown is None:
            raise
        yield event(refusal_of(exc).fields)
    yield DONE
