"""``POST /v1/chat/completions``, whole or in events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from functools import partial
from typing import Any

from blendrag.engine.thread_queue import ThreadQueue
from blendrag.frameworks.streaming import StreamedText
from blendrag.server.asking import ServedRequest, asked_chat
from blendrag.server.bodies import ChatBody
from blendrag.server.replies import (
    Envelope,
    Fields,
    blendrag_fields,
    chat_logprobs,
    chat_message,
    finish_reason,
    text_of,
    tool_calls,
    usage,
)
from blendrag.server.service import Service, Told


def _envelope(service: Service) -> Envelope:
    return Envelope("chat.completion", "chat.completion.chunk", "chatcmpl", service.model_id)


def _threads(service: Service, body: ChatBody) -> ThreadQueue:
    """Where the request is prepared: a search waits for the embedder."""
    return service.questions if body.retrieve else service.engine.threads_for(body.characters)


async def chat_completion(service: Service, body: ChatBody) -> Fields:
    """A whole answer."""
    make = partial(asked_chat, service.engine, body, service.limits.max_tokens)
    asked, answer = await service.answered(make, _threads(service, body), body.timeout_s)
    choices = []
    for index, text in enumerate(answer.texts):
        parsed = asked.parsed(text)
        choices.append(
            {
                "index": index,
                "message": chat_message(parsed),
                "logprobs": chat_logprobs(answer),
                "finish_reason": finish_reason(answer, index, parsed),
            }
        )
    about = blendrag_fields(answer, asked.sources)
    return _envelope(service).whole(choices, [answer], blendrag=about)


async def chat_chunks(service: Service, body: ChatBody) -> AsyncGenerator[Fields, None]:
    """The chunks of a streamed answer."""
    envelope = _envelope(service)
    shown: StreamedText | None = None
    make = partial(asked_chat, service.engine, body, service.limits.max_tokens)
    async with aclosing(service.pieces(make, _threads(service, body), body.timeout_s)) as telling:
        async for told in telling:
            if shown is None:
                shown = _no_text(service, told.asked)
                for index in range(body.n or 1):
                    yield envelope.chunk([_delta(index, {"role": "assistant", "content": ""})])
            if told.piece.answer is not None:
                for chunk in _ending(envelope, told, shown):
                    yield chunk
                if body.includes_usage:
                    yield envelope.chunk([], usage=usage([told.piece.answer]))
            elif text := shown.add(told.piece.text):
                yield envelope.chunk([_delta(0, {"content": text})])


def _no_text(service: Service, asked: ServedRequest) -> StreamedText:
    tokens = service.engine.resources.tokens if asked.options.tools else None
    return StreamedText(tokens, asked.options.opening)


def _ending(envelope: Envelope, told: Told, shown: StreamedText) -> Iterator[Fields]:
    """What was not ``shown`` yet: the rest of the text, calls, log probabilities, and how it ended."""
    asked, answer = told.asked, told.piece.answer
    assert answer is not None
    for index, whole in enumerate(answer.texts):
        parsed = asked.parsed(whole)
        text = text_of(parsed)
        if rest := text if index else shown.rest(text):
            yield envelope.chunk([_delta(index, {"content": rest})])
        if parsed.calls:
            calls = [{"index": i, **call} for i, call in enumerate(tool_calls(parsed))]
            yield envelope.chunk([_delta(index, {"tool_calls": calls})])
        if (likely := chat_logprobs(answer)) is not None:
            yield envelope.chunk([_delta(index, {}, logprobs=likely)])
        last = _delta(index, {}, finish_reason=finish_reason(answer, index, parsed))
        about = {} if index else {"blendrag": blendrag_fields(answer, asked.sources)}
        yield envelope.chunk([last], **about)


def _delta(index: int, fields: Fields, **more: Any) -> Fields:
    return {"index": index, "delta": fields, "logprobs": None, "finish_reason": None, **more}
