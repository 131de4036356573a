"""Between LangChain and the engine: messages for chat templates, token usage, log probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata

from blendrag.errors import InvalidInputError
from blendrag.frameworks.fields import RequestFields

if TYPE_CHECKING:
    from blendrag.engine import Answer, TokenLogprob

#: One message as Hugging Face chat templates read it.
Message = dict[str, Any]

_ROLES: tuple[tuple[type[BaseMessage], str], ...] = (
    (HumanMessage, "user"),
    (AIMessage, "assistant"),
    (SystemMessage, "system"),
    (ToolMessage, "tool"),
    (FunctionMessage, "tool"),
)

#: Parts of an answer that repeat its ``tool_calls``, or that no template reads.
_OF_ANSWERS = frozenset(
    {
        "tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call", "function_call",
        "thinking", "redacted_thinking", "reasoning", "reasoning_content",
    }
)  # fmt: skip


# -- messages ----------------------------------------------------------------------------------------


def to_dicts(messages: Sequence[BaseMessage]) -> list[Message]:
    """Role, content, tool calls and their results of each message. Does not modify ``messages``.

    Raises :class:`InvalidInputError` for content that is not text, and if all messages are empty.
    """
    from blendrag.engine.rendering import refuse_silence

    converted = [_to_dict(message) for message in messages]
    refuse_silence(converted)
    return converted


def text_of(message: BaseMessage) -> str:
    """The text of ``message``. Raises :class:`InvalidInputError` for a part that is not text."""
    if isinstance(message.content, str):
        return message.content
    return "".join(_text_of_part(message, part) for part in message.content)


def _text_of_part(message: BaseMessage, part: str | dict[str, Any]) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type")
    if kind == "text":
        return str(part.get("text", ""))
    if isinstance(message, AIMessage) and kind in _OF_ANSWERS:
        return ""
    raise InvalidInputError(
        f"a {type(message).__name__} has a content part of type {kind!r}, expected text only; "
        "describe it in words or leave it out"
    )


def _to_dict(message: BaseMessage) -> Message:
    converted: Message = {"role": _role_of(message), "content": text_of(message)}
    if isinstance(message, AIMessage):
        # calls that could not be parsed, as the model wrote them
        converted["content"] += "".join(c["args"] or "" for c in message.invalid_tool_calls)
        if message.tool_calls:
            converted["tool_calls"] = [_call_dict(call) for call in message.tool_calls]
    if isinstance(message, ToolMessage):
        converted["tool_call_id"] = message.tool_call_id
    if message.name:
        converted["name"] = message.name
    return converted


def _call_dict(call: Mapping[str, Any]) -> Message:
    function = {"name": call["name"], "arguments": call["args"]}
    return {"type": "function", "id": call["id"], "function": function}


def _role_of(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    for kind, role in _ROLES:
        if isinstance(message, kind):
            return role
    return message.type


# -- answers -----------------------------------------------------------------------------------------


def token_usage(answers: Sequence[Answer]) -> dict[str, int]:
    """Sums over ``answers``; ``reused_tokens`` are the prompt tokens whose KV was loaded."""
    prompt = sum(answer.metrics.prompt_tokens for answer in answers)
    completion = sum(answer.metrics.new_tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "reused_tokens": sum(answer.metrics.reused_tokens for answer in answers),
    }


def usage_metadata(answer: Answer) -> UsageMetadata:
    """``cache_read``: prompt tokens whose KV was loaded; ``cache_creation``: the others."""
    metrics = answer.metrics
    return UsageMetadata(
        input_tokens=metrics.prompt_tokens,
        output_tokens=metrics.new_tokens,
        total_tokens=metrics.prompt_tokens + metrics.new_tokens,
        input_token_details=InputTokenDetails(
            cache_read=metrics.reused_tokens, cache_creation=metrics.fresh_tokens
        ),
    )


def generation_info(answer: Answer, model_name: str) -> dict[str, Any]:
    """Usage, and under ``blendrag`` the metrics: TTFT, reused tokens, the outcome of each chunk."""
    info = {
        "finish_reason": answer.finish_reason,
        "model_name": model_name,
        "token_usage": token_usage([answer]),
        "ttft_s": answer.metrics.ttft_s,
        "blendrag": answer.metrics.as_dict(),
    }
    if answer.logprobs is not None:
        info["logprobs"] = openai_logprobs(answer.logprobs)
    return info


def openai_logprobs(logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """``logprobs`` in the form of OpenAI's chat completions, which LangChain passes on."""
    return {
        "content": [
            {
                **_logprob(each.token, each.logprob),
                "top_logprobs": [_logprob(token, value) for token, value in each.top],
            }
            for each in logprobs
        ]
    }


def _logprob(token: str, value: float) -> dict[str, Any]:
    return {"token": token, "logprob": value, "bytes": list(token.encode())}


def identifying_params(fields: RequestFields) -> dict[str, Any]:
    """Everything that decides an answer: the key of LangChain's LLM caches."""
    engine = fields.engine
    options, defaults = fields.request_options(), engine.settings
    return {
        "model_name": engine.resources.model_name,
        "store": str(engine.resources.root),
        "mode": options.mode or defaults.mode,
        "policy": options.policy or defaults.policy,
        "schedule": options.schedule or defaults.schedule,
        "ratio": defaults.ratio if options.ratio is None else options.ratio,
        "min_ratio": defaults.min_ratio if options.min_ratio is None else options.min_ratio,
        "max_new_tokens": options.max_new_tokens or defaults.max_new_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "seed": options.seed,
        "stop": list(options.stop),
        "logprobs": options.logprobs,
        "apply_chat_template": options.apply_chat_template,
        "plain_messages": defaults.plain_messages
        if options.plain_messages is None
        else options.plain_messages,
        "template_kwargs": options.template_arguments,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "logit_bias": dict(options.logit_bias or {}),
        "generate_kwargs": dict(options.generate),
    }
