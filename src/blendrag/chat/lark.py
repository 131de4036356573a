"""Grammars in llguidance's Lark (https://github.com/guidance-ai/llguidance), over the tokens of one model."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from blendrag.errors import InvalidOptionError

if TYPE_CHECKING:
    from blendrag.model.tokens import Tokens

#: White space between JSON's parts. Without a limit small models write nothing else.
_WHITE_SPACE = {"whitespace_pattern": "\\n? {0,12}"}
#: What of a schema cannot be enforced is left to the model.
LENIENT = {"lenient": True}


def wrong_form(why: str) -> InvalidOptionError:
    return InvalidOptionError("response_format", why)


def library() -> Any:
    """llguidance. Raises :class:`InvalidOptionError` without it."""
    try:
        import llguidance
    except ImportError:
        raise wrong_form("needs llguidance; pip install 'blendrag[grammar]'") from None
    return llguidance


def has_library() -> bool:
    try:
        return importlib.util.find_spec("llguidance") is not None
    except ValueError:  # a module that is None
        return False


def vocabulary(tokens: Tokens) -> Any:
    """The tokens for llguidance; about a second, once per model."""
    if tokens.grammar_tokenizer is None:
        from llguidance.hf import from_tokenizer

        tokens.grammar_tokenizer = from_tokenizer(tokens.tokenizer)
    return tokens.grammar_tokenizer


def schema_of(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a ``response_format`` of type ``json_schema``. Raises :class:`InvalidOptionError`."""
    named = given.get("json_schema", given)
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if not isinstance(schema, Mapping):
        raise wrong_form(
            "of type json_schema has no schema, expected "
            '{"type": "json_schema", "json_schema": {"schema": {…}}}'
        )
    return schema


def dumped(schema: Mapping[str, Any], guidance: Mapping[str, Any] | None = None) -> str:
    """A JSON schema for ``%json``. ``guidance``: options of llguidance's compiler.

    Objects have only the keys that the schema names, unless it says otherwise: small models do not stop
    inventing more."""
    try:
        more = {"x-guidance": {**_WHITE_SPACE, **(guidance or {})}}
        adapted = _adapted(schema, closes=not _has_conjunction(schema))
        return json.dumps({**adapted, **more}, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as exc:
        raise wrong_form(
            f"has a schema that cannot be written as JSON ({exc}); change it"
        ) from None


#: Keywords whose values are schemas by name, schemas, or lists of them.
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_INNER = (
    "items", "additionalProperties", "prefixItems", "anyOf", "oneOf", "allOf", "not", "if", "then", "else",
)  # fmt: skip
#: Formats that llguidance enforces.
_FORMATS = (
    "date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
)  # fmt: skip
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
#: llguidance's dates have a year 0 and a 29 February in every year, which no parser takes.
_DATE = (
    "^(?:(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])-(?:(?:0[13-9]|1[0-2])-|02-(?:[01]|2[0-8]))"
    f"|{_LEAP}-02-29)"
)
#: Keywords by which an object must have the form of several schemas at once.
_CONJUNCTIONS = {
    "allOf", "$ref", "anyOf", "oneOf", "if", "dependentSchemas", "unevaluatedProperties",
}  # fmt: skip


def _has_conjunction(schema: Any) -> bool:
    """Whether keys of an object may be named by another schema than the one that has ``properties``."""
    if not isinstance(schema, Mapping):
        return False
    here = "allOf" in schema or ("properties" in schema and not _CONJUNCTIONS.isdisjoint(schema))
    return here or any(map(_has_conjunction, _inner(schema)))


def _inner(schema: Mapping[str, Any]) -> Iterator[Any]:
    for name in _NAMED:
        found = schema.get(name)
        yield from found.values() if isinstance(found, Mapping) else ()
    for name in _INNER:
        found = schema.get(name)
        yield from found if isinstance(found, list | tuple) else (found,)


def _adapted(schema: Any, closes: bool) -> Any:
    """``schema`` without formats that are only remarks (pydantic's ``path``, ``password``), as the standard
    says of those that are not known. ``closes``: objects get no other keys."""
    adapted = partial(_adapted, closes=closes)
    if isinstance(schema, list | tuple):
        return [adapted(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    for name in _NAMED:
        if isinstance(found := schema.get(name), Mapping):
            made[name] = {key: adapted(value) for key, value in found.items()}
    for name in _INNER:
        if name in schema:
            made[name] = adapted(schema[name])
    if made.get("format") not in _FORMATS:
        made.pop("format", None)
    elif str(made["format"]).startswith("date"):
        made.setdefault("pattern", _DATE)
    named: Any = schema.get("properties")
    required: Any = schema.get("required") or ()
    is_known = isinstance(named, Mapping) and isinstance(required, list | tuple)
    if closes and is_known and set(required) <= set(named) and "patternProperties" not in schema:
        made.setdefault("additionalProperties", False)
    return made


def literal(text: str, tokens: Tokens) -> str:
    """``text`` in a grammar. Control tokens in it are written as such, which other text never is."""
    control = written_ids(text, tokens)
    if not control:
        return json.dumps(text, ensure_ascii=False)
    parts = re.split(f"({'|'.join(map(re.escape, sorted(control, key=len, reverse=True)))})", text)
    return " ".join(
        f"<[{control[part]}]>" if part in control else json.dumps(part, ensure_ascii=False)
        for part in parts
        if part
    )


def written_ids(text: str, tokens: Tokens) -> dict[str, int]:
    """The control tokens in ``text`` with their ids."""
    is_special = vocabulary(tokens).is_special_token
    added = {str(token): index for index, token in tokens.tokenizer.added_tokens_decoder.items()}
    return {each: i for each, i in added.items() if each and each in text and is_special(i)}


def checked(lark: str, tokens: Tokens) -> str:
    """Why ``lark`` cannot be compiled, or that no text has its form; empty if nothing is wrong."""
    matcher = library().LLMatcher(vocabulary(tokens), lark, log_level=0)
    wrong = matcher.get_error()
    if not wrong:
        matcher.compute_bitmask()  # finds that nothing can be the first token
        if matcher.is_error():
            return "no text has this form"
    return next((line.strip() for line in wrong.splitlines() if line.strip()), "")
