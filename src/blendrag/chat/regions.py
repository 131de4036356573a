"""Edges of regions that depend on what came before: a closing tag within a text of a call's arguments ends no
call, and a code fence or an answer's tag belongs to the markup only if its beginning did.

transformers' parser looks for patterns with partial matches, in which lookbehind does not work. Its patterns
are replaced by objects that look for them and then check what they found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import regex

from blendrag.chat.formats import CALL_FIELDS, REASONING_FIELDS, Format

Check = Callable[[str, Any], bool]
#: Where a text in quotes begins and ends; escaped characters do neither.
_QUOTES = regex.compile(r'\\.|"', regex.DOTALL)
#: The beginning of an argument in XML.
_VALUE = regex.compile(r"<([^\s<>/=]*(?:param|arg_value|arg(?:ument)?\b)[^\s<>/=]*)")


class _Checked:
    """A pattern of which only matches count that pass a check."""

    def __init__(self, pattern: Any, check: Check) -> None:
        self._pattern = pattern
        self._check = check

    def search(self, text: str, at: int = 0, partial: bool = False) -> Any:
        found = self._pattern.search(text, at, partial=partial)
        while found is not None and not found.partial and not self._check(text, found):
            found = self._pattern.search(text, max(found.end(), found.start() + 1), partial=partial)
        return found


class _CallRegion:
    """The ends of a form's calls, one after the other."""

    def __init__(self, opens: Any, closes: Any) -> None:
        self._opens = opens
        self._closes = closes
        self._begins = self._ends = 0
        """Where the text of the current or last call begins, and where its closing tag ends."""
        self._read = 0
        self._in_text = False
        """Up to where quotes were counted, and whether one is open there."""

    def search(self, text: str, at: int = 0, partial: bool = False) -> Any:
        """The closing tag of the call in which the parser is."""
        if at >= self._ends:  # a new call
            self._begins = self._read = at
            self._in_text = False
            self._ends = len(text) + 1
        found = self._closes.search(text, at, partial=partial)
        while found is not None and not found.partial:
            # "<" of a tag after the call, or of an argument's end
            if partial and text[found.end() :] == "<":
                return self._closes.search(text, found.start(), found.end() - 1, partial=True)
            if self._closes_call(text, found):
                self._ends = found.end()
                return found
            found = self._closes.search(text, found.end(), partial=partial)
        self._ends = len(text) + 1
        return found

    def _closes_call(self, text: str, found: Any) -> bool:
        """Not within an argument, unless the line ends: then a quote or a tag is missing."""
        after = text[found.end() : found.end() + 2]
        if after[:1] in ("", "\n") or (after[0] == "<" and after != "</"):
            return True
        body = text[self._begins : found.start()]
        json_at = body.find("{")
        value = _VALUE.search(body, 0, json_at if json_at >= 0 else len(body))
        if value is not None:
            return body.rfind(f"<{value[1]}") < body.rfind(f"</{value[1]}")
        if json_at < 0:
            return True
        self._read = max(self._read, self._begins + json_at)
        for quote in _QUOTES.finditer(text, self._read, found.start()):
            self._in_text ^= quote[0] == '"'
            self._read = quote.end()
        return not self._in_text

    def ends_before(self, text: str, at: int) -> bool:
        return at >= self._ends and not text[self._ends : at].strip()

    def is_fenced(self, text: str) -> bool:
        opened = self._opens.search(text, max(0, self._begins - 100), self._begins)
        while opened is not None and opened.end() < self._begins:
            opened = self._opens.search(text, opened.end(), self._begins)
        return opened is not None and opened[0].startswith("```")


class _Answer:
    """The tags around an answer, which begin it or follow reasoning."""

    def __init__(self) -> None:
        self._is_begun = False

    def owns(self, text: str, found: Any) -> bool:
        if not found[0].lstrip().startswith("</"):
            before = text[max(0, found.start() - 32) : found.start()].rstrip()
            begins = not before or before.endswith(("</think>", "response:"))
            self._is_begun |= begins
            return begins
        return self._is_begun


def _is_no_quotation(text: str, found: Any) -> bool:
    return found[0].startswith("```") or text[max(0, found.start() - 1) : found.start()] != "`"


def parser_for(form: Format, reads_calls: bool) -> Any:
    """A :class:`~transformers.utils.chat_parsing.ResponseParser` of one answer."""
    from transformers.utils.chat_parsing import ResponseParser  # wrappers import without it
    from transformers.utils.chat_parsing.response_templates import load_response_template

    spec = load_response_template(form.response_template(reads_calls))
    fields = spec.fields
    calls = []
    for name, field in fields.items():
        if not name.startswith(CALL_FIELDS):
            continue
        if field.close_re is not None:
            calls.append(_CallRegion(field.open_re, field.close_re))
            field.close_re, field.close_literals = calls[-1], None
        field.open_re, field.open_literals = _Checked(field.open_re, _is_no_quotation), None
    if "after_call" in fields:
        fields["after_call"].open_re = _Checked(
            fields["after_call"].open_re,
            lambda text, found: any(
                call.ends_before(text, found.start())
                and ("`" not in found[0] or call.is_fenced(text))
                for call in calls
            ),
        )
    for name in REASONING_FIELDS if form.own is None else ():
        if name in fields and fields[name].close_literals is None:
            # no longer text can match: what follows is the answer at once, which may have to have a form
            fields[name].close_literals = ()
    if "answer" in fields:
        fields["answer"].open_re = _Checked(fields["answer"].open_re, _Answer().owns)
    return ResponseParser(spec, prefix="")
