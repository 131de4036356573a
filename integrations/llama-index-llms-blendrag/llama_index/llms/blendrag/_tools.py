"""Tools offered to a model: as its template takes them, and what of its answer is said and not called."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import ChatResponse, ToolCallBlock
from llama_index.core.llms.llm import ToolSelection

from blendrag.errors import InvalidInputError
from blendrag.plugs.tool_choice import call_form, chosen_tool, forced_opening
from blendrag.plugs.tools import Parsed, parse

if TYPE_CHECKING:
    from blendrag.model.tokens import Tokens

Spec = Mapping[str, Any]
#: What a call begins with in a model's template, before its name: a tag, or JSON.
_OPENER = re.compile(r"\s*(<[^<>]+>|\[[A-Z_]+\]|\{)")


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
        if self.choice in (None, "auto"):
            return ""
        if self.choice == "any":  # of one tool, that one
            return forced_opening(tokens, names(self.tools)[0] if len(self.tools) == 1 else None)
        return forced_opening(tokens, self.choice)

    def parse(self, text: str, tokens: Tokens) -> Parsed:
        """``text`` taken apart; of several calls where one was allowed, the first."""
        parsed = parse(text, tokens, tools=self.tools)
        if self.parallel:
            return parsed
        return Parsed(parsed.text, parsed.calls[:1], parsed.invalid)


class Said:
    """The text of a streamed answer that is certainly no part of a call, as it grows."""

    def __init__(self, offer: Offer | None, tokens: Tokens) -> None:
        self.text = ""
        self._raw = ""
        self._bare = False
        self._marks: tuple[str, ...] | None = None if offer is None else self._marks_of(tokens)

    def _marks_of(self, tokens: Tokens) -> tuple[str, ...]:
        """What calls begin with, and control tokens, which are never said."""
        form = call_form(tokens)
        found = _OPENER.match(form.before) if form is not None else None
        self._bare = found is not None and found[1] == "{"
        own = (found[1],) if found is not None and not self._bare else ()
        return (*own, *(text for text in tokens.special_texts if text))

    def add(self, piece: str) -> str:
        """What ``piece`` adds to it."""
        self._raw += piece
        before = self.text
        self.text = self._raw if self._marks is None else self._certain(self._marks)
        return self.text[len(before) :]

    def _certain(self, marks: Sequence[str]) -> str:
        """Up to the first mark, or what may become one; white space may stand before a call."""
        if self._bare and self._raw.lstrip()[:1] in ("", "{"):
            return ""  # a call without marks is the whole answer
        found = [at for at in map(self._raw.find, marks) if at >= 0]
        if found:
            return self._raw[: min(found)].rstrip()
        longest = max(map(len, marks), default=0)
        for length in range(min(longest - 1, len(self._raw)), 0, -1):
            if any(mark.startswith(self._raw[-length:]) for mark in marks):
                return self._raw[:-length].rstrip()
        return self._raw.rstrip()


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


def names(specs: Sequence[Spec]) -> list[str]:
    return [str(spec.get("function", spec).get("name")) for spec in specs]
