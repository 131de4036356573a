"""One request to the engine: asked whole or piece by piece, with or without an event loop.

Owns the way from an engine's answer to LlamaIndex's response, and the reuse event. Does not know how
messages become a prompt.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from llama_index.core.base.llms.types import ChatResponse, CompletionResponse

from blendrag.frameworks.said import Said
from blendrag.frameworks.shared import agenerate, astream_pieces, stream_pieces
from llama_index.llms.blendrag import _results, events
from llama_index.llms.blendrag._tools import Offer

if TYPE_CHECKING:
    from blendrag.engine import Answer, BlendEngine, Options

R = TypeVar("R", ChatResponse, CompletionResponse)
Asked = str | list[dict[str, Any]]


@dataclass(frozen=True)
class Call(Generic[R]):
    """What is asked, and how the answer is to look."""

    engine: BlendEngine
    prompt: Asked
    options: Options
    respond: Callable[..., R]
    """:func:`_results.chat` or :func:`_results.completion`."""
    offer: Offer | None = None
    """The tools that the answer may call."""
    span_id: str | None = None

    def whole(self) -> R:
        return self._response(self.engine.generate(self.prompt, self.options))

    async def awhole(self) -> R:
        return self._response(await agenerate(self.engine, self.prompt, self.options))

    def pieces(self) -> Generator[R, None, None]:
        said = self._nothing_said()
        for piece in stream_pieces(self.engine, self.prompt, self.options):
            if (delta := said.add(piece.text)) and piece.answer is None:
                yield self.respond(said.text, delta)
            if piece.answer is not None:
                yield self._response(piece.answer, said, delta)

    async def apieces(self) -> AsyncGenerator[R, None]:
        said = self._nothing_said()
        async with aclosing(astream_pieces(self.engine, self.prompt, self.options)) as pieces:
            async for piece in pieces:
                if (delta := said.add(piece.text)) and piece.answer is None:
                    yield self.respond(said.text, delta)
                if piece.answer is not None:
                    yield self._response(piece.answer, said, delta)

    def _nothing_said(self) -> Said:
        if self.offer is None:
            return Said()
        return Said(self.engine.resources.tokens, self.options.opening)

    def _response(self, answer: Answer, said: Said | None = None, delta: str | None = None) -> R:
        """The whole answer; at the end of a stream, ``delta`` is what was not ``said`` before."""
        name = self.engine.resources.model_name
        events.tell(answer, name, self.span_id)
        about: dict[str, Any] = {
            "raw": _results.raw(answer, name),
            "logprobs": _results.logprobs(answer),
        }
        text = answer.text
        if self.offer is not None:
            parsed = self.offer.parse(self.options.opening + text, self.engine.resources.tokens)
            text = parsed.text
            about |= _results.calls(parsed)
            if parsed.calls and answer.finish_reason == "stop":
                about["raw"]["finish_reason"] = "tool_calls"
        if said is not None:
            delta = (delta or "") + said.rest(text)
        return self.respond(text, delta, **about)
