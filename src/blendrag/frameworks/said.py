"""A streamed answer that may call tools: what of it is certainly said, as it grows.

What may turn out to be a call is held back until the whole answer can be read
(:func:`blendrag.frameworks.tools.parse`). Knows no framework.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from blendrag.frameworks.tool_choice import call_form

if TYPE_CHECKING:
    from blendrag.model.tokens import Tokens

#: What a call begins with in a model's template, before its name: a tag, or JSON.
_OPENER = re.compile(r"<[^<>]+>|\[[A-Z_]+\]|\{")


class Said:
    """The text of an answer that is certainly no part of a call."""

    def __init__(self, tokens: Tokens | None = None, opening: str = "") -> None:
        """``tokens``: of the model, if it was offered tools; all it writes is said otherwise.
        ``opening``: the beginning of a call that was written for it."""
        self.text = ""
        self._raw = ""
        self._begun = bool(opening)
        self._bare = False
        self._marks: tuple[str, ...] | None = None if tokens is None else self._marks_of(tokens)
        self._firsts = {mark[0] for mark in self._marks or ()}
        self._longest = max(map(len, self._marks or ()), default=0)

    def _marks_of(self, tokens: Tokens) -> tuple[str, ...]:
        """What calls begin with, and control tokens, which are never said."""
        form = call_form(tokens)
        before = form.before.lstrip() if form is not None else ""
        found = _OPENER.match(before)
        own = [found[0]] if found is not None else before.split()[:1]
        self._bare = own == ["{"]
        return tuple(text for text in (*own, *tokens.special_texts) if text and text != "{")

    def add(self, piece: str) -> str:
        """What ``piece`` adds to it."""
        self._raw += piece
        before = self.text
        self.text = self._raw if self._marks is None else self._certain(self._marks)
        return self.text[len(before) :]

    def rest(self, whole: str) -> str:
        """What ``whole``, the answer's text without its calls, adds to it in the end."""
        if whole.startswith(self.text):
            return whole[len(self.text) :]
        return whole.lstrip()[len(self.text.lstrip()) :]  # text beside calls has none at its ends

    def _certain(self, marks: Sequence[str]) -> str:
        """Up to the first mark, or what may become one; white space may stand before a call."""
        if self._begun:
            return ""
        if self._bare and self._raw.lstrip()[:1] in ("", "{"):
            return ""  # a call without marks is the whole answer
        certain = len(self.text)  # models have hundreds of marks: what was looked through stays so
        found = [at for at in (self._raw.find(mark, certain) for mark in marks) if at >= 0]
        if found:
            return self._raw[: min(found)].rstrip()
        for at in range(max(certain, len(self._raw) - self._longest + 1), len(self._raw)):
            if self._raw[at] in self._firsts and self._begins(self._raw[at:], marks):
                return self._raw[:at].rstrip()
        return self._raw.rstrip()

    @staticmethod
    def _begins(text: str, marks: Sequence[str]) -> bool:
        return any(mark.startswith(text) for mark in marks)
