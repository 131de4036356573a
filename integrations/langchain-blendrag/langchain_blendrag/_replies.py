"""An answer → LangChain's messages: text, tool calls, usage; whole, or piece by piece.

Text that may turn out to be a tool call is held back until the answer is complete.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.utils.json import parse_partial_json

from blendrag.frameworks.said import Said
from blendrag.frameworks.shared import Piece
from blendrag.frameworks.tools import Parsed, parse
from langchain_blendrag._requests import ChatRequest
from langchain_blendrag._results import generation_info, token_usage, usage_metadata

if TYPE_CHECKING:
    from blendrag.engine import Answer, BlendEngine


def chat_result(answer: Answer, request: ChatRequest, engine: BlendEngine) -> ChatResult:
    """One generation for each sequence of ``answer``."""
    name = engine.resources.model_name
    return ChatResult(
        generations=[_generation(text, answer, request, engine) for text in answer.texts],
        llm_output={"model_name": name, "token_usage": token_usage([answer])},
    )


def _generation(
    text: str, answer: Answer, request: ChatRequest, engine: BlendEngine
) -> ChatGeneration:
    parsed = _parsed(text, request, engine)
    message = AIMessage(
        content=parsed.text,
        tool_calls=[tool_call(name=c.name, args=c.arguments, id=c.id) for c in parsed.calls],
        invalid_tool_calls=[
            invalid_tool_call(name=None, args=c.text, id=None, error=c.error)
            for c in parsed.invalid
        ],
        usage_metadata=usage_metadata(answer),
    )
    return ChatGeneration(message=message, generation_info=_info(answer, parsed, engine))


def _parsed(text: str, request: ChatRequest, engine: BlendEngine) -> Parsed:
    if not request.options.tools:
        return Parsed(text)
    tokens = engine.resources.tokens
    return parse(request.options.opening + text, tokens, tools=request.options.tools)


def _info(answer: Answer, parsed: Parsed, engine: BlendEngine) -> dict[str, Any]:
    info = generation_info(answer, engine.resources.model_name)
    if parsed.calls and answer.finish_reason == "stop":
        info["finish_reason"] = "tool_calls"
    return {**info, "model_provider": "blendrag"}


class Reply:
    """A streamed answer: pieces in, chunks out; the last chunk brings calls, usage and metrics."""

    def __init__(self, request: ChatRequest, engine: BlendEngine) -> None:
        self._request = request
        self._engine = engine
        offers = bool(request.options.tools)
        tokens = engine.resources.tokens if offers else None
        self._said = Said(tokens, request.options.opening)

    def chunks(self, piece: Piece) -> list[ChatGenerationChunk]:
        """What is to be told of ``piece`` now; nothing where all of it is held back."""
        text = self._said.add(piece.text)
        if piece.answer is not None:
            return [self._last(text, piece.answer)]
        return [ChatGenerationChunk(message=AIMessageChunk(content=text))] if text else []

    def _last(self, text: str, answer: Answer) -> ChatGenerationChunk:
        parsed = _parsed(answer.text, self._request, self._engine)
        message = AIMessageChunk(
            content=text + self._said.rest(parsed.text),
            tool_call_chunks=_call_chunks(parsed),
            usage_metadata=usage_metadata(answer),
            chunk_position="last",
        )
        info = _info(answer, parsed, self._engine)
        return ChatGenerationChunk(message=message, generation_info=info)


def _call_chunks(parsed: Parsed) -> list[Any]:
    """Calls whole, one chunk each; what cannot be read as one follows and stays unreadable."""
    calls = [
        tool_call_chunk(
            name=call.name,
            args=json.dumps(call.arguments, ensure_ascii=False),
            id=call.id,
            index=index,
        )
        for index, call in enumerate(parsed.calls)
    ]
    for index, wrong in enumerate(parsed.invalid, len(calls)):
        calls.append(tool_call_chunk(name=None, args=_unreadable(wrong.text), id=None, index=index))
    return calls


def _unreadable(text: str) -> str:
    """``text``, quoted if need be: LangChain would mend broken JSON and call a tool without a name."""
    try:
        return json.dumps(text) if isinstance(parse_partial_json(text), dict) else text
    except ValueError:
        return text
