"""Arguments of a chat template besides messages and tools, and how it is told whether to think.

Templates have no common name for that switch. Which one a template obeys is found by rendering it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from blendrag.chat.probes import USER, try_render
from blendrag.config import of_variable
from blendrag.errors import InvalidOptionError
from blendrag.option import ALIKE, did_you_mean, near_names
from blendrag.wording import quoted

if TYPE_CHECKING:
    from blendrag.model.tokens import Tokens

#: Names under which templates take the switch, with ``True`` or ``False``.
SWITCHES = ("enable_thinking", "thinking", "reasoning")
#: Most tokens of reasoning (Seed-OSS); 0 is none.
BUDGET = "thinking_budget"
EFFORT = "reasoning_effort"
#: Clients send these to any model, so that it is no error if its template reads none of them.
COMMON = frozenset((*SWITCHES, BUDGET, EFFORT))
#: What the prompt is made of, and arguments of ``apply_chat_template`` that are not the template's.
RESERVED = frozenset(
    {
        "conversation", "messages", "tools", "chat_template", "tokenize", "padding", "truncation",
        "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
        "tokenizer_kwargs", "sanitize_control_tokens",
    }
)  # fmt: skip
#: Two values of each, of which a template that obeys it makes two prompts.
_PROBES: Mapping[str, tuple[Any, Any]] = {
    **dict.fromkeys(SWITCHES, (True, False)), BUDGET: (0, 512), EFFORT: ("low", "high"),
}  # fmt: skip


def template_arguments(
    tokens: Tokens, given: Mapping[str, Any], thinks: bool | None, effort: str | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """All arguments of the chat template, and notes on those without effect.

    Args:
        given: arguments by their names; they go before the other two.
        thinks: whether to think before the answer; ``None`` leaves it to the template.
        effort: OpenAI's ``reasoning_effort``; ``none`` is not to think.

    Raises :class:`InvalidOptionError` for a name that the template does not read.
    """
    _refuse_unknown(tokens, given)
    made: dict[str, Any] = {}
    notes: list[str] = []
    if effort == "none" and thinks is None:
        thinks = False
    elif effort is not None:
        made[EFFORT] = effort
    if thinks is not None:
        switch, note = _switched(tokens, thinks)
        if note and not COMMON.intersection([*made, *given]):
            notes.append(note)
        made = switch | made
    notes += [
        f"{name} has no effect: the chat template does not read it"
        for name in sorted(COMMON.intersection([*made, *given]))
        if not _obeys(tokens, name)
    ]
    return made | dict(given), tuple(notes)


def _switched(tokens: Tokens, thinks: bool) -> tuple[dict[str, Any], str]:
    """The arguments that switch thinking, and a note if the template cannot do it."""
    if names := [name for name in SWITCHES if _obeys(tokens, name)]:
        return dict.fromkeys(names, thinks), ""
    if _obeys(tokens, BUDGET):
        return ({} if thinks else {BUDGET: 0}), ""
    if not _obeys(tokens, EFFORT):
        way = "on" if thinks else "off"
        return {}, f"thinking was not switched {way}: the chat template has no switch for it"
    if thinks:
        return {}, ""
    if re.search("""["']none["']""", tokens.template_text):
        return {EFFORT: "none"}, ""
    return (
        {EFFORT: "low"},
        f"thinking was not switched off: the chat template is asked for the least, {EFFORT}=low",
    )


def _obeys(tokens: Tokens, name: str) -> bool:
    return _makes_a_difference(tokens, tokens.template_text, name)


@lru_cache(maxsize=64)
def _makes_a_difference(tokens: Tokens, template: str, name: str) -> bool:
    one, other = (try_render(tokens, [USER], **{name: value}) for value in _PROBES[name])
    return one != other


def _has(name: str) -> str:
    return f"has {quoted(name)}{of_variable('chat_template_kwargs', name)}"


def _refuse_unknown(tokens: Tokens, given: Mapping[str, Any]) -> None:
    if not given:
        return
    if reserved := sorted(RESERVED.intersection(given)):
        raise InvalidOptionError(
            "chat_template_kwargs",
            f"{_has(reserved[0])}, no argument of a template; leave it out",
        )
    of_rendering = inspect.signature(tokens.tokenizer.apply_chat_template).parameters
    for name in sorted(set(given) - COMMON - of_rendering.keys()):
        read = tokens.template_names
        if read is not None and name not in read:
            meant = did_you_mean(near_names([name], [*COMMON, *read], ALIKE), "leave it out")
            raise InvalidOptionError(
                "chat_template_kwargs",
                f"{_has(name)}, which this model's chat template does not read; {meant}",
            )
