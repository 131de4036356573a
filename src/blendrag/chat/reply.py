"""Takes an answer apart into text, reasoning and tool calls. A growing answer and a whole one go through the
same code."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import regex

from blendrag.chat.calls import (
    Call,
    InvalidCall,
    ToolCall,
    Tools,
    read_bare,
    read_calls,
    tool_names,
)
from blendrag.chat.formats import CALL_FIELDS, REASONING_FIELDS, Format
from blendrag.chat.regions import parser_for

_FENCE = r"```(?:json|tool_code|tool_call|python)?[ \t]*\n\s*"
#: The beginning of a line that may be a call without tags: JSON, or Python's ``[name(``, also in a fence.
_BARE = re.compile(rf"[ \t]*(?:{_FENCE})?(?:\{{|\[\s*(?:\{{|[A-Za-z_][\w.]*\())|[ \t]*```tool_code")
#: What may become it.
_MAYBE_BARE = re.compile(rf"[ \t]*(?:`{{1,2}}|```\w{{0,9}}[ \t]*|{_FENCE})?(?:\[\s*[\w.]*)?")

#: The beginning of an answer that may be nothing but a call, by a model that forgets the tags of its form.
_ONLY_A_CALL = regex.compile(
    r"\s{0,16}(?:```\w{0,9}[ \t]{0,4}\n\s{0,16})?\[?\s{0,4}\{\s{0,16}"
    r'"(?:name|function|arguments|parameters|type)"'
)


class Reasoning(str):
    """A piece of what the model thinks before it answers."""


class Part(NamedTuple):
    """What a piece of an answer adds: text, reasoning, or a complete call."""

    kind: Literal["text", "reasoning", "call"]
    text: str
    call: ToolCall | None = None


@dataclass(frozen=True)
class Reply:
    """A whole answer, taken apart. Its parts, as they came, are the same in all."""

    text: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    invalid: tuple[InvalidCall, ...] = ()
    """Calls that cannot be read; they are no part of ``text``."""


class ReplyStream:
    """One growing answer.

    Args:
        form: that of the model.
        tools: schemas of the tools that were offered; without any, calls stay text.
        begun: the beginning of the answer that the prompt already holds (``<think>``, or a call that must be
            made).
    """

    def __init__(self, form: Format, tools: Tools = (), begun: str = "") -> None:
        self._tools = tools
        self._parser = parser_for(form, bool(tools))
        self._finds_bare = bool(tools)
        self._lines_are_calls = form.bare_calls
        """Whether any line may begin a call without tags; else only the whole answer can be one."""
        self._text = ""
        self._reasoning = ""
        self._calls: list[Call] = []
        self._held = ""
        """Text that is not shown yet: white space, or a line that may be a call without tags."""
        self._is_bare = False
        """Whether all of :attr:`_held` and what follows may be calls."""
        self.raw = begun
        """All that was said, markup included."""
        self._form = form
        self._longest_begun = 2 * max(map(len, form.begun), default=0)  # white space included
        self._in_reasoning = self._has_reasoned = False
        self._failed = ""
        self._is_cut = False
        self.ended_thinking = False
        """Whether the answer ended where :attr:`is_thinking` held."""
        if begun:
            self._take(lambda: self._parser.feed(begun))

    def add(self, piece: str) -> list[Part]:
        """What ``piece`` adds."""
        self.raw += piece
        if self._failed:
            return []
        return self._take(lambda: self._parser.feed(piece))

    def finish(self) -> list[Part]:
        """What was still held back. Nothing may be added afterwards."""
        self._is_cut = not self._form.ends_in_call(self.raw)
        self.ended_thinking = self.is_thinking
        parts = [] if self._failed else self._take(lambda: self._parser.finalize()[1])
        if self._failed:
            self._calls = [InvalidCall(self.raw, self._failed)]
            return []
        if self._is_bare:
            after, calls = read_bare(self._held, self._tools)
            is_all = not self._calls and not after.strip("` \n") and self._are_offered(calls)
            if self._lines_are_calls or is_all:
                self._held = after
                parts += self._called(calls)
        if self._held.strip() or not self._calls:
            parts += self._show(self._held.rstrip() if self._calls else self._held)
        return parts

    @property
    def is_thinking(self) -> bool:
        """Whether what follows is reasoning."""
        begins = len(self.raw) <= self._longest_begun and self.raw.strip() in self._form.begun
        return self._in_reasoning or begins

    @property
    def reply(self) -> Reply:
        """All that was added."""
        calls = self._calls
        return Reply(
            self._text,
            self._reasoning.strip(),
            tuple(call for call in calls if isinstance(call, ToolCall)),
            tuple(call for call in calls if isinstance(call, InvalidCall)),
        )

    # -- regions ----------------------------------------------------------------------------------

    def _take(self, events: Callable[[], list[dict[str, Any]]]) -> list[Part]:
        try:
            found = events()
        except Exception as exc:  # a tokenizer's own template may raise anything
            self._failed = (str(exc).strip() or type(exc).__name__).splitlines()[0]
            return []
        return [part for event in found for part in self._parts_of(event)]

    def _parts_of(self, event: dict[str, Any]) -> list[Part]:
        kind, field = event["type"], event["field"]
        if field in REASONING_FIELDS:
            self._in_reasoning = kind != "region_close"
            self._has_reasoned = True
        if kind == "region_chunk" and field == "content":
            return self._grow(event["text"])
        if kind == "region_chunk" and field in REASONING_FIELDS:
            return self._think(event["text"])
        if kind == "region_close" and field.startswith(CALL_FIELDS):
            calls, after = self._calls_in(event["value"])
            return self._called(calls) + (self._grow(f"\n{after}") if after else [])
        return []

    def _calls_in(self, value: Any) -> tuple[list[Call], str]:
        """The calls of a region and text after them. ``value``: the region's text, or ``name``, ``id`` and
        ``body``, or what a tokenizer's own template made of it."""
        if isinstance(value, str):
            return read_calls(value, self._tools, is_cut=self._is_cut)
        if isinstance(value, dict) and "body" in value:
            name, call_id = value.get("name", ""), value.get("id", "")
            return read_calls(value["body"], self._tools, name, call_id)
        return read_calls(json.dumps(value), self._tools)

    def _called(self, calls: list[Call]) -> list[Part]:
        self._calls += calls
        return [Part("call", "", call) for call in calls if isinstance(call, ToolCall)]

    def _think(self, text: str) -> list[Part]:
        if not self._reasoning:
            text = text.lstrip()
        self._reasoning += text
        return [Part("reasoning", text)] if text else []

    # -- text -------------------------------------------------------------------------------------

    def _grow(self, text: str) -> list[Part]:
        """More of the answer's text; without white space around what is not text."""
        self._held += text
        if self._is_bare:
            return []
        certain = self._certain() if self._finds_bare else len(self._held)
        shown = self._held[:certain]
        if self._tools or not self._text:  # white space may come before a call, or be all there is
            shown = shown.rstrip()
        self._held = self._held[len(shown) :]
        return self._show(shown)

    def _show(self, text: str) -> list[Part]:
        if not self._text and (self._has_reasoned or self._calls):
            text = text.lstrip()
        self._text += text
        return [Part("text", text)] if text else []

    def _are_offered(self, calls: list[Call]) -> bool:
        """Whether all ``calls`` can be read, and name tools that were offered."""
        names = tool_names(self._tools)
        return all(isinstance(call, ToolCall) and call.name in names for call in calls)

    def _certain(self) -> int:
        """Up to where no line of what is held may be a call without tags."""
        if not self._lines_are_calls:
            begins = None if self._text else _ONLY_A_CALL.match(self._held, partial=True)
            self._is_bare = begins is not None and not begins.partial
            return len(self._held) if begins is None else 0
        blank = len(self._held) - len(self._held.lstrip())
        at = self._held.rfind("\n", 0, blank) + 1  # of white lines, only the last can become a call
        begins_line = at > 0 or not self._text or self._text.endswith("\n")
        if not begins_line:
            at = self._held.find("\n") + 1
        while at or begins_line:
            if _BARE.match(self._held, at):
                self._is_bare = True
                return at
            if _MAYBE_BARE.fullmatch(self._held, at):
                return at
            begins_line = False
            at = self._held.find("\n", at) + 1
        return len(self._held)


def take_apart(text: str, form: Format, tools: Tools = (), begun: str = "") -> Reply:
    """A whole answer, by the code that takes a growing one apart."""
    stream = ReplyStream(form, tools, begun)
    stream.add(text)
    stream.finish()
    return stream.reply
