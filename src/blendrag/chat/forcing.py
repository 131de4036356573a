"""Begins a call that must be made, with the text that the model's chat template puts before a call."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from blendrag.chat.calls import Tools, tool_names
from blendrag.chat.formats import Format
from blendrag.chat.learned import format_of
from blendrag.chat.messages import function_call
from blendrag.chat.probes import ARGUMENTS, ID, IDS, KEY, NAME, TOOL, USER, VALUE, try_render
from blendrag.chat.reply import take_apart
from blendrag.errors import InvalidInputError, InvalidOptionError
from blendrag.text.matches import common_prefix
from blendrag.wording import quoted, shortened

if TYPE_CHECKING:
    from blendrag.model.tokens import Tokens


class TagForm(NamedTuple):
    """Arguments between tags: ``before_key`` KEY ``after_key`` VALUE ``close``, one after another."""

    before_key: str
    after_key: str
    close: str


class CallForm(NamedTuple):
    """What a model writes around a call: ``before`` NAME ``after`` arguments ``close``."""

    before: str
    after: str
    close: str = ""
    is_readable: bool = True
    """Whether a call that the template wrote was read back."""
    arguments: Literal["json"] | TagForm | None = None
    """How arguments are written; ``None`` if it is not known."""
    between: str = ""
    """From the arguments of a call to the name of the next; empty if the template writes only one."""


def call_form(tokens: Tokens, template: Mapping[str, Any] | None = None) -> CallForm | None:
    """How this model's template writes a call; ``None`` if it shows none and no known form fits.

    ``template``: further arguments of the chat template, which may turn thinking off.
    """
    plain = {k: v for k, v in (template or {}).items() if isinstance(v, str | int | float | None)}
    return _rendered_form(tokens, tokens.template_text, tuple(plain.items()))


@lru_cache(maxsize=8)  # needed several times per request
def _rendered_form(
    tokens: Tokens, text: str, given: tuple[tuple[str, Any], ...]
) -> CallForm | None:
    from blendrag.model.bounded_templates import bounded  # wrappers import without it

    with bounded():  # all renderings see the same moment
        return _found_form(tokens, given)


def _found_form(tokens: Tokens, given: tuple[tuple[str, Any], ...]) -> CallForm | None:
    form = format_of(tokens)
    known = None if form.call is None else CallForm(*form.call, arguments="json")
    prompt = try_render(tokens, [USER], tools=[TOOL], **dict(given))
    if prompt is None:
        return known
    thought = _thought(form, prompt)
    for empty, probe, twice in _renderings(tokens, dict(given)):
        at = empty.rfind(NAME)
        if at < 0 or probe[: at + len(NAME)] != empty[: at + len(NAME)]:
            continue
        begins = len(prompt) if empty.startswith(prompt) else form.call_begins(empty, at)
        if begins is None or begins > at:
            continue
        rest, other = (text[at + len(NAME) :] for text in (empty, probe))
        same = common_prefix(rest, other)
        written = ARGUMENTS if same < len(rest) else {}  # some templates write no arguments
        after = rest[:same].rstrip("{<") if written else ""
        said = take_apart(probe[begins:], form, [TOOL])
        is_readable = any(c.name == NAME and c.arguments == written for c in said.calls)
        made = CallForm(thought + empty[begins:at], after, is_readable=is_readable)
        rest, other = rest[len(after) :], other[len(after) :]
        return _with_arguments(made, rest, other, twice, tokens, dict(given))
    return None if known is None else known._replace(before=thought + known.before)


def _with_arguments(
    form: CallForm, empty: str, probe: str, twice: str, tokens: Tokens, given: dict[str, Any]
) -> CallForm:
    """``form``, with how arguments are written and what follows them.

    ``empty``, ``probe``: what the template writes from the arguments on, without and with one; ``twice``: an
    answer with two calls.
    """
    read = _read_json(probe)
    if read is not None:
        form = form._replace(arguments="json")
    elif tags := _tags(empty, probe):
        form = form._replace(arguments=tags)
        read = empty
    else:
        return form
    _, _, second = twice.rpartition(NAME)[0].rpartition(NAME)
    second = second.removeprefix(form.after) if second.startswith(form.after) else ""
    between = _read_json(second)
    if isinstance(form.arguments, TagForm):
        tags = form.arguments
        first = f"{tags.before_key}{KEY}{tags.after_key}{VALUE}{tags.close}"
        between = second.removeprefix(first) if second.startswith(first) else ""
    return form._replace(close=_until_turn_ends(read, tokens, given), between=between or "")


def _read_json(text: str) -> str | None:
    """What follows the argument of the probe in JSON."""
    try:
        found, end = json.JSONDecoder().raw_decode(text := text.lstrip())
    except ValueError:
        return None
    return text[end:] if found == ARGUMENTS else None


def _tags(empty: str, probe: str) -> TagForm | None:
    """The tags around the argument of the probe."""
    before, key, rest = probe.partition(KEY)
    between, value, after = rest.partition(VALUE)
    is_tag = ">" in between and between.rstrip()[-1:] not in "\"'"
    if not (key and value and is_tag and after.endswith(empty)):
        return None
    return TagForm(before, between, after[: len(after) - len(empty)])


def _until_turn_ends(text: str, tokens: Tokens, given: dict[str, Any]) -> str:
    """``text`` without what the template writes after an answer."""
    answered = [USER, {"role": "assistant", "content": NAME}]
    whole = try_render(tokens, answered, add_generation_prompt=False, **given) or ""
    call = text.removesuffix(whole.rpartition(NAME)[2])
    for end in tokens.turn_ends:
        call = call.partition(tokens.control_texts.get(end) or NAME)[0]
    if call == text:  # the turn ends in another way: at the last tag that ends a call
        call = text[: format_of(tokens).last_call_ends(text)]
    return call.rstrip()


def _renderings(tokens: Tokens, given: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Answers that call a tool without and with an argument, and twice if the template allows it, in the
    forms of history that templates take."""

    def rendered(*calls: dict[str, Any], as_text: bool) -> str | None:
        content = None if as_text else ""
        answer = {"role": "assistant", "content": content, "tool_calls": list(calls)}
        options = {"tools": [TOOL], "add_generation_prompt": False, **given}
        return try_render(tokens, [USER, answer], **options)

    for call_id in IDS:
        for as_text in (False, True):
            none, one = (
                function_call(call_id, NAME, json.dumps(arguments) if as_text else arguments)
                for arguments in ({}, ARGUMENTS)
            )
            empty, probe = (rendered(call, as_text=as_text) for call in (none, one))
            if empty is not None and probe is not None:
                yield empty, probe, rendered(one, one, as_text=as_text) or ""


def _thought(form: Format, prompt: str) -> str:
    """The end of reasoning that the prompt has begun, or empty."""
    begun = form.begun_by(prompt)
    for bracket in "<[":
        if begun.startswith(bracket):
            return f"\n{bracket}/{begun[1:]}\n\n"
    return ""


def opening_for(
    tokens: Tokens, choice: str | None, tools: Tools, template: Mapping[str, Any] | None = None
) -> str:
    """The beginning of an answer that must be a call, by :func:`chosen_tool`; empty if it need not be.

    Raises :class:`InvalidInputError` if neither the template nor a known form shows how a call begins.
    """
    if choice in (None, "auto", "none"):
        return ""
    form = call_form(tokens, template)
    if form is None:
        raise InvalidOptionError(
            "tool_choice",
            "forces a call, but this model's chat template does not show how a tool call begins; leave it "
            "out and let the model choose",
        )
    if choice == "any" and len(tools) == 1:
        (choice,) = tool_names(tools)
    opening = form.before if choice == "any" else f"{form.before}{choice}{form.after}"
    # tokenizers join white space with what follows
    return opening.replace(ID, uuid.uuid4().hex[:9]).rstrip()


def can_force(tokens: Tokens, template: Mapping[str, Any] | None = None) -> bool:
    """Whether a call can be begun for the model, and read."""
    form = call_form(tokens, template)
    return form is not None and form.is_readable


def refuse_unreadable(tokens: Tokens, tools: Tools) -> None:
    """Raise :class:`InvalidInputError` if the template writes calls in a form that cannot be read."""
    form = call_form(tokens)
    if tools and form is not None and not form.is_readable:
        begin = (form.before + NAME + form.after).strip()
        raise InvalidInputError(
            f"this model writes tool calls as {quoted(begin)}, which blendrag cannot read; give its "
            "tokenizer a response_template (transformers), or leave the tools out"
        )


def chosen_tool(choice: Any, tools: Tools) -> str | None:
    """A ``tool_choice`` in OpenAI's spellings as ``auto``, ``none``, ``any`` or a tool's name.

    ``None`` if none was given. Raises :class:`InvalidOptionError` for a tool that is not in ``tools``.
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
    listed = shortened(", ".join(names), 200) or "none given"
    raise InvalidOptionError(
        "tool_choice", f"{quoted(choice)} is not one of auto, none, any and the tools ({listed})"
    )
