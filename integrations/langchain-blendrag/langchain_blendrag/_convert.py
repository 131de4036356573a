"""Between LangChain and the engine: messages for chat templates, token usage, log probabilities."""

from __future__ import annotations

from collections.abc import Sequence
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

from blendrag.chat.messages import cleaned
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
    (FunctionMessage, "function"),
)

# -- messages ----------------------------------------------------------------------------------------


def to_dicts(messages: Sequence[BaseMessage], may_be_empty: bool = False) -> list[Message]:
    """Role, text, reasoning, tool calls and their results of each message. Does not modify ``messages``.

    Raises :class:`InvalidInputError` for content that is not text, and if all messages are empty.
    """
    from blendrag.engine.rendering import require_text

    converted = cleaned([_to_dict(message) for message in messages])
    if not may_be_empty:
        require_text(converted)
    return converted


def _to_dict(message: BaseMessage) -> Message:
    converted: Message = {"role": _role_of(message), "content": message.content}
    if isinstance(message, AIMessage):
        converted |= _answer_fields(message)
    if isinstance(message, ToolMessage):
        converted["tool_call_id"] = message.tool_call_id
    if message.name:
        converted["name"] = message.name
    return converted


def _answer_fields(message: AIMessage) -> Message:
    extras = message.additional_kwargs
    fields = {k: extras[k] for k in ("reasoning_content", "function_call") if extras.get(k)}
    # calls that could not be parsed, as the model wrote them
    invalid = [call for call in message.invalid_tool_calls if call["name"]]
    if calls := [*message.tool_calls, *invalid]:
        fields["tool_calls"] = calls
    if nameless := [call["args"] or "" for call in message.invalid_tool_calls if not call["name"]]:
        content = message.content
        parts = [content] if isinstance(content, str) else content
        fields["content"] = [*parts, *nameless]
    return fields


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
    options, defaults = vars(fields.request_options()), vars(engine.settings)
    chosen = {
        name: defaults.get(name) if value is None else value for name, value in options.items()
    }
    chosen["chat_template_kwargs"] = {
        **defaults["chat_template_kwargs"],
        **options["chat_template_kwargs"],
    }
    del chosen["timeout_s"]  # which decides when an answer comes
    return {"model_name": engine.model_name, "store": str(engine.root), **chosen}
