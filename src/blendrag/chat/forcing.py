"""Begins a call that must be made, with the text that the model's chat template puts before a call."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from blendrag.chat.calls import Tools, tool_names
from blendrag.chat.formats import Format, format_of
from blendrag.chat.reply import take_apart
from blendrag.errors import InvalidInputError
from blendrag.model.bounded_templates import bounded
from blendrag.text.matches import common_prefix
from blendrag.wording import quoted, shortened

if TYPE_CHECKING:
    from blendrag.model.tokens import Tokens

#: A name that no template contains, an id that the strictest one (Mistral's, nine characters) takes, and one
#: that holds the name, as Kimi's must.
_NAME, _ID = "name_of_the_tool", "a1b2c3d4e"
_IDS = (_ID, f"functions.{_NAME}:0")
_PROBE = {"key_of_the_probe": "value"}
_USER = {"role": "user", "content": "x"}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "x",
        "parameters": {"type": "object", "properties": {"key_of_the_probe": {"type": "string"}}},
    },
}


class CallForm(NamedTuple):
    """What a model writes around a call: ``before`` NAME ``after`` arguments."""

    before: str
    after: str
    is_readable: bool = True
    """Whether a call that the template wrote was read back."""


def call_form(tokens: Tokens, template: Mapping[str, Any] | None = None) -> CallForm | None:
    """How this model's template writes a call; ``None`` if it shows none and no known form fits.

    ``template``: further arguments of the chat template, which may turn thinking off.
    """
    plain = {k: v for k, v in (template or {}).items() if isinstance(v, str | int | float | None)}
    return _rendered_form(tokens, tokens.template_text, tuple(plain.items()))


@lru_cache(maxsize=8)  # needed several times per request
@bounded()  # all renderings see the same moment
def _rendered_form(
    tokens: Tokens, text: str, given: tuple[tuple[str, Any], ...]
) -> CallForm | None:
    form = format_of(tokens)
    known = None if form.call is None else CallForm(*form.call)
    try:
        asked = tokens.render([_USER], tools=[_TOOL], **dict(given))
    except Exception:  # jinja errors of many kinds: a template that takes no tools
        return known
    thought = _thought(form, asked)
    for empty, probe in _renderings(tokens, dict(given)):
        at = empty.rfind(_NAME)
        if at < 0 or probe[: at + len(_NAME)] != empty[: at + len(_NAME)]:
            continue
        begins = len(asked) if empty.startswith(asked) else form.call_begins(empty, at)
        if begins is None or begins > at:
            continue
        rest, other = (text[at + len(_NAME) :] for text in (empty, probe))
        same = common_prefix(rest, other)
        written = _PROBE if same < len(rest) else {}  # some templates write no arguments
        after = rest[:same].rstrip("{<") if written else ""
        said = take_apart(probe[begins:], form, [_TOOL])
        is_readable = any(c.name == _NAME and c.arguments == written for c in said.calls)
        return CallForm(thought + empty[begins:at], after, is_readable)
    return None if known is None else known._replace(before=thought + known.before)


def _renderings(tokens: Tokens, given: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Answers that call a tool without and with an argument, in the forms of history that templates take."""
    for call_id in _IDS:
        for as_text in (False, True):
            try:
                yield tuple(  # type: ignore[misc]
                    tokens.render(
                        [_USER, _called(arguments, call_id, as_text)],
                        tools=[_TOOL],
                        add_generation_prompt=False,
                        **given,
                    )
                    for arguments in ({}, _PROBE)
                )
            except Exception:
                continue


def _called(arguments: Mapping[str, Any], call_id: str, as_text: bool) -> dict[str, Any]:
    given = json.dumps(arguments) if as_text else arguments
    call = {"type": "function", "id": call_id, "function": {"name": _NAME, "arguments": given}}
    return {"role": "assistant", "content": None if as_text else "", "tool_calls": [call]}


def _thought(form: Format, prompt: str) -> str:
    """The end of reasoning that the prompt has begun, or empty."""
    begun = form.begun_by(prompt)
    for bracket in "<[":
        if begun.startswith(bracket):
            return f"\n{bracket}/{begun[1:]}\n\n"
    return ""


def opening_for(
    tokens: Tokens,
    choice: str | None,
    tools: Tools,
    template: Mapping[str, Any] | None = None,
) -> str:
    """The beginning of an answer that must be a call, by :func:`chosen_tool`; empty if it need not be.

    Raises :class:`InvalidInputError` if neither the template nor a known form shows how a call begins.
    """
    if choice in (None, "auto", "none"):
        return ""
    form = call_form(tokens, template)
    if form is None:
        raise InvalidInputError(
            "this model's chat template does not show how a tool call begins, so none can be forced; "
            "leave tool_choice out and let the model choose"
        )
    if choice == "any" and len(tools) == 1:
        (choice,) = tool_names(tools)
    opening = form.before if choice == "any" else f"{form.before}{choice}{form.after}"
    # tokenizers join white space with what follows
    return opening.replace(_ID, uuid.uuid4().hex[:9]).rstrip()


def refuse_unreadable(tokens: Tokens, tools: Tools) -> None:
    """Raise :class:`InvalidInputError` if the template writes calls in a form that cannot be read."""
    form = call_form(tokens)
    if tools and form is not None and not form.is_readable:
        begin = (form.before + _NAME + form.after).strip()
        raise InvalidInputError(
            f"this model writes tool calls as {quoted(begin)}, which blendrag cannot read; give its "
            "tokenizer a response_template (transformers), or leave the tools out"
        )


def chosen_tool(choice: Any, tools: Tools) -> str | None:
    """A ``tool_choice`` in OpenAI's spellings as ``auto``, ``none``, ``any`` or a tool's name.

    ``None`` if none was given. Raises :class:`InvalidInputError` for a tool that is not in ``tools``.
    """
    if choice is None or choice is False:
        return None
    if choice is True or choice == "required":
        return "any"
    if isinstance(choice, Mapping):
        function = choice.get("function")
        choice = function.get("name") if isinstance(function, Mapping) else choice.get("name")
    names = tool_names(tools)
    if isinstance(choice, str) and choice in ("auto", "none", "any", *names):
        return choice
    raise InvalidInputError(
        f"tool_choice {quoted(choice)} is not auto, none, any or one of the tools "
        f"({shortened(', '.join(names), 200) or 'none given'})"
    )
