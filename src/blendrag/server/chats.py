"""``POST /v1/chat/completions``, whole or in events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from functools import partial
from typing import Any

from blendrag.engine import Answer
from blendrag.server.asking import ServedRequest, chat_request
from blendrag.server.bodies import ChatBody
from blendrag.server.replies import (
    Envelope,
    Fields,
    blendrag_fields,
    chat_logprobs,
    chat_message,
    finish_reason,
    tool_calls,
    unread,
    usage,
)
from blendrag.server.service import Service
from blendrag.serving.thread_queue import ThreadQueue


def _envelope(service: Service) -> Envelope:
    return Envelope("chat.completion", "chat.completion.chunk", "chatcmpl", service.model_id)


def _threads(service: Service, body: ChatBody) -> ThreadQueue:
    """Where the request is prepared: a search waits for the embedder."""
    return service.questions if body.retrieve else service.engine.threads_for(body.characters)


async def chat_completion(service: Service, body: ChatBody) -> Fields:
    make = partial(chat_request, service.engine, body, service.limits.max_tokens)
    served, answer = await service.answered(make, _threads(service, body), body.timeout_s)
    choices = []
    for index in range(len(answer.texts)):
        reply = served.reply(answer, index)
        choices.append(
            {
                "index": index,
                "message": chat_message(reply),
                "logprobs": chat_logprobs(answer),
                "finish_reason": finish_reason(answer, index, reply),
            }
        )
    blending = blendrag_fields(answer, served.sources, served.left_out)
    return _envelope(service).whole(choices, [answer], blendrag=blending)


async def chat_chunks(service: Service, body: ChatBody) -> AsyncGenerator[Fields | None, None]:
    """The chunks of a streamed answer; ``None`` once the request is in the queue."""
    envelope = _envelope(service)
    begun = False
    make = partial(chat_request, service.engine, body, service.limits.max_tokens)
    async with aclosing(service.pieces(make, _threads(service, body), body.timeout_s)) as parts:
        async for served, piece in parts:
            if piece.is_queued:
                yield None
                continue
            if not begun:
                begun = True
                for index in range(body.n or 1):
                    yield envelope.chunk([_delta(index, {"role": "assistant", "content": ""})])
            thought = piece.reasoning if served.shows_reasoning else ""
            for chunk in _grown(envelope, 0, thought, piece.text):
                yield chunk
            if piece.answer is not None:
                for chunk in _ending(envelope, served, piece.answer):
                    yield chunk
                if body.includes_usage:
                    yield envelope.chunk([], usage=usage([piece.answer]))


def _grown(envelope: Envelope, index: int, reasoning: str, text: str) -> Iterator[Fields]:
    if reasoning:
        yield envelope.chunk([_delta(index, {"reasoning_content": reasoning})])
    if text:
        yield envelope.chunk([_delta(index, {"content": text})])


def _ending(envelope: Envelope, served: ServedRequest, answer: Answer) -> Iterator[Fields]:
    """What was not streamed: further answers, calls, log probabilities, and how it ended."""
    for index in range(len(answer.texts)):
        parsed = served.reply(answer, index)
        if index:
            yield from _grown(envelope, index, parsed.reasoning, parsed.text)
        yield from _grown(envelope, index, "", unread(parsed))
        if parsed.calls:
            calls = [{"index": i, **call} for i, call in enumerate(tool_calls(parsed))]
            yield envelope.chunk([_delta(index, {"tool_calls": calls})])
        if (likely := chat_logprobs(answer)) is not None:
            yield envelope.chunk([_delta(index, {}, logprobs=likely)])
        last = _delta(index, {}, finish_reason=finish_reason(answer, index, parsed))
        about = blendrag_fields(answer, served.sources, served.left_out)
        extra = {} if index else {"blendrag": about}
        yield envelope.chunk([last], **extra)


def _delta(index: int, fields: Fields, **more: Any) -> Fields:
    return {"index": index, "delta": fields, "logprobs": None, "finish_reason": None, **more}
