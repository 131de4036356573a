"""From an answer to OpenAI's objects."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from blendrag.chat.reply import Reply
from blendrag.corpus.retriever import RetrievedChunk
from blendrag.engine import Answer, TokenLogprob

Fields = dict[str, Any]


class Envelope:
    """One response, whole or in chunks: what all its objects have in common."""

    def __init__(self, kind: str, chunk_kind: str, prefix: str, model: str) -> None:
        """``kind``, ``chunk_kind``: names of the objects; ``prefix`` begins the id."""
        self._kind = kind
        self._chunk_kind = chunk_kind
        self._about = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, choices: Sequence[Fields], answers: Sequence[Answer], **more: Any) -> Fields:
        fields = {"object": self._kind, "choices": list(choices), "usage": usage(answers)}
        return {**self._about, **fields, **more}

    def chunk(self, choices: Sequence[Fields], **more: Any) -> Fields:
        return {**self._about, "object": self._chunk_kind, "choices": list(choices), **more}


def usage(answers: Sequence[Answer]) -> Fields:
    """Tokens of all answers; ``cached_tokens`` were loaded, recomputed ones included."""
    prompt = sum(answer.metrics.prompt_tokens for answer in answers)
    new = sum(answer.metrics.new_tokens for answer in answers)
    cached = sum(answer.metrics.reused_tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def blendrag_fields(
    answer: Answer, sources: Sequence[RetrievedChunk] = (), left_out: int = 0
) -> Fields:
    """The ``blendrag`` object: what was reused and recomputed, why, how long it took, the sources, each token
    of the prompt if that was asked for, and how many messages were left out if any."""
    fields = answer.metrics.as_dict()
    if trace := answer.trace:
        ranges = [vars(each) for each in trace.ranges()]
        fields["explanation"] = {"layers": trace.layers, "ranges": ranges}
    if sources:
        fields["sources"] = [each.as_dict() for each in sources]
    if left_out:
        fields["left_out"] = left_out
    return fields


def chat_message(parsed: Reply) -> Fields:
    """The assistant's message. Calls that cannot be read stay text."""
    message: Fields = {"role": "assistant", "content": parsed.text + unread(parsed)}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        message["tool_calls"] = tool_calls(parsed)
        message["content"] = message["content"] or None
    return message


def unread(parsed: Reply) -> str:
    return "".join(call.text for call in parsed.invalid)


def tool_calls(parsed: Reply) -> list[Fields]:
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {
                "name": _utf8(call.name),
                "arguments": _utf8(json.dumps(call.arguments, ensure_ascii=False)),
            },
        }
        for call in parsed.calls
    ]


def _utf8(text: str) -> str:
    """With ``?`` for halves of surrogate pairs, which a model may write in JSON."""
    return text.encode("utf-8", "replace").decode()


def finish_reason(answer: Answer, index: int, parsed: Reply) -> str:
    reason = answer.finish_reasons[index]
    return "tool_calls" if parsed.calls and reason == "stop" else reason


def chat_logprobs(answer: Answer) -> Fields | None:
    """``logprobs`` of a choice, if they were asked for."""
    if answer.logprobs is None:
        return None
    return {"content": [_token(each) for each in answer.logprobs], "refusal": None}


def _token(chosen: TokenLogprob) -> Fields:
    top = [_likely(token, logprob) for token, logprob in chosen.top]
    return {**_likely(chosen.token, chosen.logprob), "top_logprobs": top}


def _likely(token: str, logprob: float) -> Fields:
    given = list(token.encode("utf-8", "replace"))
    return {"token": token, "logprob": finite(logprob), "bytes": given}


def finite(logprob: float) -> float:
    """JSON has neither infinity nor NaN; OpenAI writes this number instead."""
    return logprob if logprob > -9999.0 else -9999.0
