"""From a body to a request of the engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blendrag.corpus.retriever import RetrievedChunk
from blendrag.engine import BlendEngine, Message, Options, Prompt
from blendrag.errors import InvalidInputError
from blendrag.frameworks.tools import Parsed, chosen_tool, opening_for, parse
from blendrag.server.bodies import ChatBody, ChatTurn, ContentPart, Generating, MadeCall
from blendrag.server.refusals import Refusal

#: Roles that chat templates do not know.
_ROLES = {"developer": "system", "function": "tool"}
#: Most answers to one request.
MAX_N = 16
_PENALTIES = ("frequency_penalty", "presence_penalty")


@dataclass(frozen=True)
class Asked:
    """One request to the engine, and what its answer is read with."""

    engine: BlendEngine
    prompt: Prompt
    options: Options
    sources: tuple[RetrievedChunk, ...] = ()
    parallel_calls: bool = True

    def parsed(self, text: str) -> Parsed:
        """Text and tool calls of an answer."""
        if not self.options.tools:
            return Parsed(text)
        whole = self.options.opening + text
        found = parse(whole, self.engine.resources.tokens, tools=self.options.tools)
        if self.parallel_calls:
            return found
        return Parsed(found.text, found.calls[:1], found.invalid)


def asked_chat(engine: BlendEngine, body: ChatBody, max_new_tokens: int | None) -> Asked:
    """The request of a chat. Opens the tokenizer; reads and searches the corpus."""
    if not engine.resources.tokens.has_template:
        raise InvalidInputError(
            "this model has no chat template; send the prompt to /v1/completions instead"
        )
    messages = [_message(turn, number) for number, turn in enumerate(body.messages)]
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    choice = chosen_tool(body.tool_choice, tools)
    offered = tools if choice != "none" else []
    if offered and (body.n or 1) > 1:
        raise Refusal(
            400, f"n is {body.n} with tools, expected 1; send {body.n} requests", param="n"
        )
    if body.response_format is not None and body.response_format.type != "text":
        raise Refusal(
            400,
            f"response_format of type {body.response_format.type!r}, expected text: the form of an answer "
            "cannot be guaranteed; offer one tool and choose it with tool_choice",
            param="response_format",
        )
    options = _options(
        body,
        max_new_tokens,
        body.max_completion_tokens or body.max_tokens,
        logprobs=_logprobs(body),
        tools=tuple(offered),
        opening=opening_for(engine.resources.tokens, choice, offered) if offered else "",
    )
    return Asked(engine, messages, options, parallel_calls=body.parallel_tool_calls is not False)


def _options(
    body: Generating, limit: int | None, max_new_tokens: int | None, **more: Any
) -> Options:
    """Options of the engine. Raises :class:`Refusal` for what it cannot do."""
    for name in _PENALTIES:
        if value := getattr(body, name):
            raise Refusal(400, f"{name} is {value}, expected 0: there are no penalties", param=name)
    if body.logit_bias:
        raise Refusal(400, "logit_bias is not supported; leave it out", param="logit_bias")
    if limit is not None and max_new_tokens is not None and max_new_tokens > limit:
        raise Refusal(
            400,
            f"max_tokens is {max_new_tokens}, and this server allows at most {limit} (--max-tokens)",
            param="max_tokens",
        )
    blend = body.blendrag.model_dump(exclude_none=True) if body.blendrag else {}
    blend.pop("top_k", None)
    return Options(
        max_new_tokens=max_new_tokens,
        temperature=body.temperature,
        # 1 keeps all tokens; clients send it without a temperature
        top_p=None if body.top_p == 1 else body.top_p,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        seed=body.seed,
        generate=_sequences(body),
        **blend,
        **more,
    )


def _sequences(body: Generating) -> Mapping[str, Any]:
    """Arguments of ``generate`` for ``n`` answers to one prompt."""
    n = 1 if body.n is None else body.n
    if not 1 <= n <= MAX_N:
        raise Refusal(400, f"n is {n}, expected 1 to {MAX_N}", param="n")
    if n == 1:
        return {}
    if not body.temperature:
        raise Refusal(
            400,
            f"n is {n} without a temperature, so all answers would be equal; give a temperature above 0",
            param="n",
        )
    return {"num_return_sequences": n}


def _logprobs(body: ChatBody) -> int | None:
    """Alternatives per token; ``None`` if log probabilities are not asked for."""
    if not body.logprobs:
        if body.top_logprobs:
            raise Refusal(
                400, "top_logprobs without logprobs; add logprobs: true", param="top_logprobs"
            )
        return None
    return body.top_logprobs or 0


# -- messages -------------------------------------------------------------------------------------


def _message(turn: ChatTurn, number: int) -> Message:
    """As chat templates read it."""
    made: dict[str, Any] = {
        "role": _ROLES.get(turn.role, turn.role),
        "content": _text(turn.content, number),
    }
    for name in ("name", "tool_call_id"):
        if (value := getattr(turn, name)) is not None:
            made[name] = value
    if turn.tool_calls:
        made["tool_calls"] = [_call(call, number) for call in turn.tool_calls]
    return made


def _text(content: str | Sequence[ContentPart] | None, number: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type != "text" or part.text is None:
            raise Refusal(
                400,
                f"messages[{number}] has a part of type {part.type!r}, expected text; this model reads only "
                "text",
                param=f"messages[{number}].content",
            )
    return "".join(part.text or "" for part in content)


def _call(call: MadeCall, number: int) -> dict[str, Any]:
    """A call that the model made earlier; templates read its arguments as an object."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise Refusal(
            400,
            f"the arguments of a tool call in messages[{number}] are not a JSON object",
            param=f"messages[{number}].tool_calls",
        )
    function = {"name": call.function.name, "arguments": arguments}
    return {"type": "function", "id": call.id, "function": function}
