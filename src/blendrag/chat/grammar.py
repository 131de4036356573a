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

from blendrag.chat.call_grammar import calls_rule
from blendrag.chat.calls import Tools
from blendrag.chat.forcing import CallForm
from blendrag.chat.formats import Format
from blendrag.chat.lark import (
    LENIENT,
    checked,
    dumped,
    has_library,
    library,
    literal,
    schema_of,
    vocabulary,
    written_ids,
    wrong_form,
)
from blendrag.chat.reply import ReplyStream
from blendrag.model.tokens import Tokens
from blendrag.wording import quoted, shortened

#: Before the answer may come the beginning of reasoning, after which everything is free.
_LARK = "start: {thinking}{space}answer\nanswer: {rule}\n"
#: Before JSON and calls, which it does not change, as a choice or a text of a regular expression.
_SPACE = "/[ \\n]{0,2}/ "
#: The end of reasoning, which openings of calls bring.
_THOUGHT = re.compile(r".*(?:</[\w:]++>|\[/THINK\])", re.DOTALL)
#: Most characters of a form; compiling takes longer than reading.
MAX_FORM_CHARS = 1_000_000
_KINDS = (
    "text, json_object, json_schema, or regex, choice or grammar with its value under that name, like "
    '{"type": "regex", "regex": "[a-z]+"}'
)


@dataclass(frozen=True)
class AnswerForm:
    """A compiled form, for any number of requests to one model."""

    lark: str
    tokens: Tokens
    lark_with_reasoning: str = ""
    """Also accepts the beginning of reasoning before the answer; empty if the prompt has begun the answer."""
    own_ids: frozenset[int] = frozenset()
    """Control tokens that are part of the form."""
    notes: tuple[str, ...] = ()
    """For the metrics."""

    @property
    def is_call(self) -> bool:
        """Whether the answer is the rest of a call that the prompt has begun."""
        return not self.lark_with_reasoning


def answer_form(
    given: Mapping[str, Any] | None,
    tokens: Tokens,
    form: Format | None = None,
    calls: CallForm | None = None,
    tools: Tools = (),
) -> AnswerForm | None:
    """Compile ``response_format`` as OpenAI and vLLM write it; ``None`` if any text will do.

    ``{"type": "json_object"}``, ``{"type": "json_schema", "json_schema": {"schema": …}}``,
    ``{"type": "regex", "regex": …}``, ``{"type": "choice", "choice": […]}``,
    ``{"type": "grammar", "grammar": …}`` (Lark). A model that is offered ``tools``, whose ``calls`` have that
    form, may also call them. Raises :class:`InvalidOptionError` for a form that cannot be compiled, and
    without llguidance.
    """
    if given is None or (kind := given.get("type")) == "text":
        return None
    rule = _rule(kind, given)
    if len(rule) > MAX_FORM_CHARS:
        raise wrong_form(f"has {len(rule):,} characters, expected at most {MAX_FORM_CHARS:,}")
    library()
    notes: tuple[str, ...] = ()
    wrong = checked(f"start: {rule}\n", tokens)
    if wrong and _is_lenient(given):
        rule, why = _rule(kind, given, LENIENT), wrong
        wrong = checked(f"start: {rule}\n", tokens)
        notes = (f"the form of the answer is enforced only in part ({shortened(why, 200)})",)
    if wrong:
        raise wrong_form(f"of type {kind} cannot be compiled ({shortened(wrong, 200)}); change it")
    if calls is not None and tools and form is not None and not form.answer_begins:
        plain = calls._replace(before=_THOUGHT.sub("", calls.before).lstrip())
        # calls without a tag cannot be told from an answer in JSON
        has_tag = not plain.before.startswith("{")
        call = calls_rule(plain, "any", tools, tokens, is_begun=False) if has_tag else None
        rule = rule if call is None else f"form | call\nform: {rule}\ncall: {call}"
    begun = " | ".join(literal(text, tokens) for text in form.begun) if form is not None else ""
    thinking = f"({begun})? " if begun else ""
    space = (
        _SPACE if kind in ("json_object", "json_schema") or rule.startswith("form | call") else ""
    )
    lark, with_reasoning = (
        _LARK.format(thinking=each, space=space, rule=rule) for each in ("", thinking)
    )
    return AnswerForm(lark, tokens, with_reasoning, notes=notes)


def begun_call_form(
    tokens: Tokens, calls: CallForm | None, choice: str, tools: Tools
) -> AnswerForm | None:
    """The form of the rest of a call that :func:`~blendrag.chat.forcing.opening_for` began.

    ``None`` without llguidance, and for calls whose arguments are in a form of their own. Raises
    :class:`InvalidOptionError` for a schema of a function with ``strict`` that cannot be compiled.
    """
    if calls is None or not tools or not has_library():
        return None
    rule = calls_rule(calls, choice, tools, tokens, is_begun=True)
    if rule is None or checked(lark := f"start: {rule}", tokens):
        return None
    own = written_ids(calls.after + calls.between + calls.close, tokens)
    return AnswerForm(lark, tokens, own_ids=frozenset(own.values()))


def _is_lenient(given: Mapping[str, Any]) -> bool:
    """Whether a schema may be enforced in part, as OpenAI's ``strict: false`` says."""
    named = given.get("json_schema")
    return isinstance(named, Mapping) and named.get("strict") is False


def _rule(kind: Any, given: Mapping[str, Any], guidance: Mapping[str, Any] | None = None) -> str:
    if kind == "json_object":
        return f"%json {dumped({'type': 'object'})}"
    if kind == "json_schema":
        return f"%json {dumped(schema_of(given), guidance)}"
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
    raise wrong_form(f"{quoted(dict(given))} is not one of {_KINDS}")


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
        matcher, words = library().LLMatcher, vocabulary(tokens)
        self._matcher = matcher(words, answer.lark, log_level=0)
        is_free = form is not None and not answer.is_call
        self._reasoning = matcher(words, answer.lark_with_reasoning) if is_free else None
        """Takes the place of the matcher if the model begins to think."""
        self._ends = sorted(set(ends) - answer.own_ids)
        self._own_ends = sorted(answer.own_ids.intersection(ends))
        self._reply = None if answer.is_call else reply
        self._awaited = form.answer_begins if form is not None else ""
        """What precedes the answer in forms that announce it."""
        self._applies = False

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        """``input_ids`` [1, S], ``scores`` [1, V]."""
        if self._applies:
            consumed = self._matcher.consume_token(int(input_ids[0, -1]))
            assert consumed or self._matcher.is_error(), "a masked token was chosen"
        self._applies = not self._is_free()
        if not self._applies:
            self._reasoning = None
            return scores
        allowed = self._allowed(self._matcher, scores.shape[-1])
        if self._reasoning is not None:  # the first token: its likeliest choice tells
            more = self._allowed(self._reasoning, scores.shape[-1])
            likeliest = int(scores[0].argmax())
            if more[likeliest] and not allowed[likeliest]:
                self._matcher, allowed = self._reasoning, more
            self._reasoning = None
        return scores.masked_fill(allowed.logical_not_().to(scores.device), -torch.inf)

    def _allowed(self, matcher: Any, vocabulary_size: int) -> torch.Tensor:
        """Which tokens may come next.  bool [V]"""
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():  # a dead end of the form, or its limits
            raise wrong_form("has a form that cannot be continued after this answer; simplify it")
        unpacked = np.unpackbits(
            bits, count=vocabulary_size, bitorder="little"
        )  # padded with zeros
        allowed = torch.from_numpy(unpacked).view(torch.bool)
        is_accepting = matcher.is_accepting()
        allowed[self._ends] = is_accepting
        allowed[self._own_ends] |= is_accepting
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
