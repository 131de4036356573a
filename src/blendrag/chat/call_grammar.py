"""The grammar of calls: the names of tools, their arguments by their schemas, and what closes a call."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from blendrag.chat.calls import Tools, resolved, tool_names
from blendrag.chat.forcing import CallForm, TagForm
from blendrag.chat.lark import LENIENT, checked, dumped, literal
from blendrag.chat.probes import ID
from blendrag.errors import InvalidOptionError
from blendrag.wording import quoted, shortened

if TYPE_CHECKING:
    from blendrag.model.tokens import Tokens

#: Ids that models write themselves; Mistral's have nine characters.
_ID_PATTERN = "/[a-zA-Z0-9]{9}/"
#: Most calls of one answer that must call. Small models repeat them without end.
MAX_CALLS = 16


def calls_rule(
    form: CallForm, choice: str, tools: Tools, tokens: Tokens, *, is_begun: bool
) -> str | None:
    """The rule of calls of ``tools``, and the rules that it needs; ``None`` if arguments of this form are not
    JSON or between tags.

    ``choice``: a tool's name, for one call of it, or ``any``. ``is_begun``: the prompt ends with
    :func:`~blendrag.chat.forcing.opening_for`. Raises :class:`InvalidOptionError` for a schema that cannot be
    compiled in a function with ``strict``.
    """
    if not form.is_readable or form.arguments is None:
        return None
    named = dict(zip(tool_names(tools), tools, strict=True))
    if choice != "any":
        named = {choice: named[choice]}
    text = partial(_text, tokens=tokens)
    rules = []
    for number, (name, tool) in enumerate(named.items()):
        rules += _arguments(f"called_{number}", name, tool, form.arguments, tokens)
        rules.append(f"more_{number}: {text(name)} {_next(text, form.after)} called_{number}")
    before = form.before
    if choice != "any" or len(tools) == 1:  # as opening_for begins it
        (name,) = named
        before += name + form.after
        first = "called_0"
    else:
        names = [f"{text(name + form.after)} called_{n}" for n, name in enumerate(named)]
        first = f"({' | '.join(names)})"
    more = " | ".join(f"more_{number}" for number in range(len(named)))
    again = (
        f" ({text(form.between)} ({more})){{0,{MAX_CALLS - 1}}}"
        if choice == "any" and form.between
        else ""
    )
    begun = text(_left(before) if is_begun else before)
    return "\n".join([f"{begun} {first}{again} {text(form.close)}", *rules, ""])


def _left(opening: str) -> str:
    """White space of an opening that the prompt does not end with."""
    return opening[len(opening.rstrip()) :]


def _next(text: Callable[[str], str], after: str) -> str:
    """``after`` of further calls; Kimi counts them."""
    if after.startswith(":0"):
        return f'":" /[1-9][0-9]?/ {text(after[2:])}'
    return text(after)


def _text(text: str, tokens: Tokens) -> str:
    if text == " ":
        return '" "?'
    return f" {_ID_PATTERN} ".join(literal(part, tokens) for part in text.split(ID))


def _arguments(
    rule: str, name: str, tool: Mapping[str, Any], form: TagForm | str, tokens: Tokens
) -> list[str]:
    function = tool.get("function", tool)
    schema = function.get("parameters")
    schema = schema if isinstance(schema, Mapping) else {}
    is_strict = function.get("strict") is True
    fits = partial(_json, name=name, is_strict=is_strict, tokens=tokens)
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        properties = {}
    if not isinstance(form, TagForm):
        return [f"{rule}: {fits({'type': 'object', **schema})}"]
    required = schema.get("required") or ()
    parts, rules = [], []
    for number, (key, value) in enumerate(properties.items()):
        part = f"{rule}_{number}"
        parts.append(part if key in required else f"{part}?")
        shared = {each: schema[each] for each in ("$defs", "definitions") if each in schema}
        value = resolved(value, schema)
        tag = literal(f"{form.before_key}{key}{form.after_key}", tokens)
        if (choices := _texts(value)) is not None:
            chosen = " | ".join(literal(choice, tokens) for choice in choices)
            rules.append(f"{part}: {tag} ({chosen}) {literal(form.close, tokens)}")
        elif _is_text(value):
            end = form.close.rstrip()
            rest = form.close[len(end) :]
            most = value.get("maxLength")
            times = f"{{0,{most}}}" if isinstance(most, int) and 0 <= most <= 10_000 else "*"
            rules += [
                f"{part}: {tag} {part}_text {literal(rest, tokens)}",
                f"{part}_text[lazy]: /(?s:.{times}?){_escaped(end)}/",
            ]
        else:
            value_json = fits({**shared, **value} if isinstance(value, Mapping) else {})
            rules.append(f"{part}: {tag} {value_json} {literal(form.close, tokens)}")
    return [f"{rule}: {' '.join(parts) or literal('', tokens)}", *rules]


def _json(schema: Mapping[str, Any], name: str, is_strict: bool, tokens: Tokens) -> str:
    wrong = ""
    for guidance in ({},) if is_strict else ({}, LENIENT):
        rule = f"%json {dumped(schema, guidance)}"
        if not (wrong := checked(f"start: {rule}", tokens)):
            return rule
    if is_strict:
        raise InvalidOptionError(
            "tools",
            f"{quoted(name)} has strict and a schema that cannot be compiled ({shortened(wrong, 200)}); "
            "change it, or leave strict out",
        )
    return '%json {"type": "object"}' if schema.get("type") == "object" else "%json {}"


def _texts(schema: Mapping[str, Any]) -> Sequence[str] | None:
    """The texts that ``schema`` allows, if they are few."""
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    texts = isinstance(choices, list) and choices and all(isinstance(c, str) for c in choices)
    return choices if texts else None


def _is_text(schema: Mapping[str, Any]) -> bool:
    """Whether a value is written without quotes."""
    declared = schema.get("type")
    if isinstance(declared, str):
        return declared == "string"
    if isinstance(declared, list):
        return "string" in declared
    unions = [choice for union in ("anyOf", "oneOf") for choice in schema.get(union) or ()]
    if "enum" in schema or "const" in schema or "$ref" in schema:
        return False
    return not unions or any(isinstance(each, Mapping) and _is_text(each) for each in unions)


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", "\\/").replace("\\\n", "\\n")
