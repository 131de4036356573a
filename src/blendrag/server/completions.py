"""``POST /v1/completions``, whole or in events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from blendrag.engine import Answer
from blendrag.server.asking import completion_request, prompts_of
from blendrag.server.bodies import CompletionBody
from blendrag.server.refusals import Refusal, wrong_field
from blendrag.server.replies import Envelope, Fields, blendrag_fields, finite, usage
from blendrag.server.service import Service


def _envelope(service: Service) -> Envelope:
    return Envelope("text_completion", "text_completion", "cmpl", service.model_id)


async def completion(service: Service, body: CompletionBody) -> Fields:
    """Whole answers: ``n`` to each prompt, prompt by prompt."""
    limit, most = service.limits.max_tokens, service.limits.max_requests
    prompts = prompts_of(body)
    if len(prompts) > most:
        raise wrong_field(
            "prompt",
            f"holds {len(prompts)} texts, expected at most {most}, the limit of this server "
            "(--max-requests); send them in several requests",
        )
    answering = [
        asyncio.ensure_future(
            service.answered(
                partial(completion_request, service.engine, body, prompt, limit),
                service.engine.threads_for(len(prompt)),
                body.timeout_s,
            )
        )
        for prompt in prompts
    ]
    try:
        answers = [answer for _, answer in await asyncio.gather(*answering)]
    finally:  # the first error ends the others
        for each in answering:
            each.cancel()
    ends = [
        (text, {"finish_reason": reason, "logprobs": _logprobs(answer)})
        for answer in answers
        for text, reason in zip(answer.texts, answer.finish_reasons, strict=True)
    ]
    choices = [_choice(index, text, **ending) for index, (text, ending) in enumerate(ends)]
    blending: Any = [blendrag_fields(answer) for answer in answers]
    return _envelope(service).whole(
        choices, answers, blendrag=blending if len(blending) > 1 else blending[0]
    )


async def completion_chunks(
    service: Service, body: CompletionBody
) -> AsyncGenerator[Fields | None, None]:
    """The chunks of a streamed answer; ``None`` once the request is in the queue."""
    prompt, *more = prompts_of(body)
    if more:
        raise Refusal(
            400,
            f"stream with {1 + len(more)} prompts, expected one; send a request for each",
            param="prompt",
        )
    envelope = _envelope(service)
    make = partial(completion_request, service.engine, body, prompt, service.limits.max_tokens)
    threads = service.engine.threads_for(len(prompt))
    async with aclosing(service.pieces(make, threads, body.timeout_s)) as parts:
        async for _, piece in parts:
            answer = piece.answer
            if answer is None:
                yield None if piece.is_queued else envelope.chunk([_choice(0, piece.text)])
                continue
            for index, text in enumerate(answer.texts):
                rest = text if index else piece.text
                ending = {
                    "finish_reason": answer.finish_reasons[index],
                    "logprobs": _logprobs(answer),
                }
                extra = {} if index else {"blendrag": blendrag_fields(answer)}
                yield envelope.chunk([_choice(index, rest, **ending)], **extra)
            if body.includes_usage:
                yield envelope.chunk([], usage=usage([answer]))


def _choice(index: int, text: str, **more: Any) -> Fields:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None, **more}


def _logprobs(answer: Answer) -> Fields | None:
    """In the form of completions; ``None`` if log probabilities were not asked for."""
    if answer.logprobs is None:
        return None
    offsets, length = [], 0
    for each in answer.logprobs:
        offsets.append(length)
        length += len(each.token)
    return {
        "tokens": [each.token for each in answer.logprobs],
        "token_logprobs": [finite(each.logprob) for each in answer.logprobs],
        "top_logprobs": [
            {token: finite(logprob) for token, logprob in each.top} for each in answer.logprobs
        ],
        "text_offset": offsets,
    }
