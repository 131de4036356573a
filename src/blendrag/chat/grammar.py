"""Answers that must have a form: JSON, a JSON schema, a regular expression or a grammar.

Tokens that would leave the form are masked before the next one is chosen. llguidance
(https://github.com/guidance-ai/llguidance) computes the mask from the tokens of one request, so requests with
and without a form decode together. Reasoning before the answer is free.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor

from blendrag.chat.formats import Format
from blendrag.chat.reply import ReplyStream
from blendrag.errors import InvalidOptionError
from blendrag.model.tokens import Tokens
from blendrag.wording import quoted, shortened

#: Before the answer may come line breaks, and the beginning of reasoning, after which everything is free.
_LARK = "start: {thinking}/[ \\n]{{0,2}}/ answer\nanswer: {rule}\n"
#: White space between JSON's parts. Without a limit small models write nothing else.
_WHITE_SPACE = {"whitespace_pattern": "\\n? {0,12}"}
#: Most characters of a form; compiling takes longer than reading.
MAX_FORM_CHARS = 1_000_000
_KINDS = "text, json_object, json_schema, regex, choice or grammar"


@dataclass(frozen=True)
class AnswerForm:
    """A compiled form, for any number of requests to one model."""

    lark: str
    lark_with_reasoning: str
    """Also accepts the beginning of reasoning before the answer."""
    tokens: Tokens


def answer_form(
    given: Mapping[str, Any] | None, tokens: Tokens, form: Format | None = None
) -> AnswerForm | None:
    """Compile ``response_format`` as OpenAI and vLLM write it; ``None`` if any text will do.

    ``{"type": "json_object"}``, ``{"type": "json_schema", "json_schema": {"schema": …}}``,
    ``{"type": "regex", "regex": …}``, ``{"type": "choice", "choice": […]}``,
    ``{"type": "grammar", "grammar": …}`` (Lark). Raises :class:`InvalidOptionError` for a form that cannot
    be compiled, and without llguidance.
    """
    if given is None or (kind := given.get("type")) == "text":
        return None
    begun = " | ".join(json.dumps(text) for text in form.begun) if form is not None else ""
    thinking = f"({begun})? " if begun else ""
    rule = _rule(kind, given)
    lark, with_reasoning = (_LARK.format(thinking=each, rule=rule) for each in ("", thinking))
    if len(lark) > MAX_FORM_CHARS:
        raise InvalidOptionError(
            "response_format", f"has {len(lark):,} characters, expected at most {MAX_FORM_CHARS:,}"
        )
    library = _llguidance()
    if wrong := library.LLMatcher.validate_grammar(lark, _tokenizer(tokens)):
        first = next((line.strip() for line in wrong.splitlines() if line.strip()), "")
        raise InvalidOptionError(
            "response_format",
            f"of type {kind} cannot be compiled ({shortened(first, 200)}); change it",
        )
    return AnswerForm(lark, with_reasoning, tokens)


def _rule(kind: Any, given: Mapping[str, Any]) -> str:
    if kind == "json_object":
        return f"%json {_dumped({'type': 'object'})}"
    if kind == "json_schema":
        named = given.get("json_schema", given)
        schema = named.get("schema") if isinstance(named, Mapping) else None
        if not isinstance(schema, Mapping):
            raise InvalidOptionError(
                "response_format",
                "of type json_schema has no schema, expected "
                '{"type": "json_schema", "json_schema": {"schema": {…}}}',
            )
        return f"%json {_dumped(schema)}"
    if kind == "regex" and isinstance(given.get("regex"), str):
        escaped = re.sub(
            r"\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], given["regex"]
        )
        return f"/{escaped}/"
    choices = given.get("choice")
    if kind == "choice" and isinstance(choices, list | tuple) and choices:
        return " | ".join(json.dumps(str(each), ensure_ascii=False) for each in choices)
    if kind == "grammar" and isinstance(given.get("grammar"), str):
        return "begin\n" + re.sub(r"(?m)^start\s*:", "begin:", given["grammar"])
    raise InvalidOptionError(
        "response_format", f"{quoted(dict(given))} is not one of {_KINDS} with its value"
    )


def _dumped(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps({**schema, "x-guidance": _WHITE_SPACE}, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidOptionError(
            "response_format", f"has a schema that cannot be written as JSON ({exc}); change it"
        ) from None


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise InvalidOptionError(
            "response_format", "needs llguidance; pip install 'blendrag[grammar]'"
        ) from None
    return llguidance


def _tokenizer(tokens: Tokens) -> Any:
    """The vocabulary for llguidance; about a second, once per model."""
    if tokens.grammar_tokenizer is None:
        from llguidance.hf import from_tokenizer

        tokens.grammar_tokenizer = from_tokenizer(tokens.tokenizer)
    return tokens.grammar_tokenizer


class Constraint(LogitsProcessor):
    """Masks the tokens by which one answer would leave its form.

    Args:
        ends: tokens that end an answer.
        reply: takes the answer apart, so that reasoning stays free; ``None`` if all of it is the answer.
    """

    def __init__(
        self,
        answer: AnswerForm,
        ends: Collection[int],
        form: Format | None = None,
        reply: ReplyStream | None = None,
    ) -> None:
        tokens = answer.tokens
        matcher, vocabulary = _llguidance().LLMatcher, _tokenizer(tokens)
        self._matcher = matcher(vocabulary, answer.lark)
        self._reasoning = None if form is None else matcher(vocabulary, answer.lark_with_reasoning)
        """Takes the place of the matcher if the model begins to think."""
        self._ends = sorted(ends)
        self._reply = reply
        self._awaited = form.answer_begins if form is not None else ""
        """What precedes the answer in forms that announce it."""
        self._applies = False

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        """``input_ids`` [1, S], ``scores`` [1, V]."""
        if self._applies:
            consumed = self._matcher.consume_token(int(input_ids[0, -1]))
            assert consumed, "a masked token was chosen"
        self._applies = not self._is_free()
        if not self._applies:
            self._reasoning = None
            return scores
        allowed = self._allowed(self._matcher, scores.shape[-1])
        if self._reasoning is not None:  # the first token: its likeliest choice tells
            more, likeliest = (
                self._allowed(self._reasoning, scores.shape[-1]),
                int(scores[0].argmax()),
            )
            if more[likeliest] and not allowed[likeliest]:
                self._matcher, allowed = self._reasoning, more
            self._reasoning = None
        return scores.masked_fill(~allowed.to(scores.device), -torch.inf)

    def _allowed(self, matcher: Any, vocabulary_size: int) -> torch.Tensor:
        """Which tokens may come next.  bool [V]"""
        allowed = torch.zeros(vocabulary_size, dtype=torch.bool)
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        found = torch.from_numpy(np.unpackbits(bits, bitorder="little")).bool()[:vocabulary_size]
        allowed[: len(found)] = found
        allowed[self._ends] = matcher.is_accepting()
        return allowed

    def _is_free(self) -> bool:
        """Whether the next token is not part of the answer yet."""
        if self._reply is None:
            return False
        if self._reply.is_thinking:
            return True
        if self._awaited and re.search(self._awaited, self._reply.raw):
            self._awaited = ""
        return bool(self._awaited)
