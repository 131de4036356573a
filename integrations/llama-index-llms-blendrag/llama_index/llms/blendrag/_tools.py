"""Tools offered to a model, and the calls of its answer as LlamaIndex wants them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import ChatResponse, ToolCallBlock
from llama_index.core.llms.llm import ToolSelection

from blendrag.errors import InvalidInputError
from blendrag.frameworks.tool_choice import chosen_tool, opening_for
from blendrag.frameworks.tools import Parsed, parse

if TYPE_CHECKING:
    from blendrag.model.tokens import Tokens

Spec = Mapping[str, Any]


@dataclass(frozen=True)
class Offer:
    """The tools of one request, and which of them must be called."""

    tools: tuple[Spec, ...]
    choice: str | None = None
    """``auto``, ``any`` or a tool's name."""
    parallel: bool = True
    """Whether an answer may call more than one."""

    @classmethod
    def taken_from(cls, call_options: dict[str, Any]) -> Offer | None:
        """The offer among a call's options, which are taken out of them; ``None`` where there is none."""
        tools = tuple(call_options.pop("tools", None) or ())
        choice = chosen_tool(call_options.pop("tool_choice", None), tools)
        parallel = call_options.pop("parallel_tool_calls", True)
        return cls(tools, choice, parallel is not False) if tools and choice != "none" else None

    def opening(self, tokens: Tokens) -> str:
        """What the answer begins with if it must be a call, else nothing.

        Raises :class:`InvalidInputError` where the template shows no way to begin one.
        """
        return opening_for(tokens, self.choice, self.tools)

    def parse(self, text: str, tokens: Tokens) -> Parsed:
        """``text`` taken apart; of several calls where one was allowed, the first."""
        parsed = parse(text, tokens, tools=self.tools)
        if self.parallel:
            return parsed
        return Parsed(parsed.text, parsed.calls[:1], parsed.invalid)


def selections(response: ChatResponse, error_on_no_tool_call: bool) -> list[ToolSelection]:
    """The calls of a response. Raises :class:`InvalidInputError` for none, where one is a must."""
    blocks = [b for b in response.message.blocks if isinstance(b, ToolCallBlock)]
    if not blocks and error_on_no_tool_call:
        invalid = response.additional_kwargs.get("invalid_tool_calls") or ()
        why = f" ({invalid[0]['error']})" if invalid else ""
        raise InvalidInputError(
            f"the model called no tool{why} but answered {(response.message.content or '')[:80]!r}, "
            "expected a call; ask with tool_required=True, or pass error_on_no_tool_call=False"
        )
    return [
        ToolSelection(
            tool_id=block.tool_call_id or block.tool_name,
            tool_name=block.tool_name,
            tool_kwargs=arguments(block),
        )
        for block in blocks
    ]


def arguments(block: ToolCallBlock) -> dict[str, Any]:
    """Arguments as chat templates want them: not as JSON. What cannot be read is no arguments."""
    given = block.tool_kwargs
    if not isinstance(given, str):
        return given
    try:
        read = json.loads(given)
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}
