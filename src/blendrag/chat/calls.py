"""Reads tool calls as models write them: JSON, XML in two dialects, and Python.

The text between the tags of a call says by itself how it is written, so one reader serves all formats, and a
model that mixes them up is still understood.
"""

from __future__ import annotations

import ast
import json
import math
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from blendrag.wording import shortened

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ToolCall:
    """A call as the model wrote it; ``id`` is the model's, or nine letters, as Mistral's template
    requires."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class InvalidCall:
    """A call that cannot be read, and why."""

    text: str
    error: str


Call = ToolCall | InvalidCall

# Patterns are possessive, so that a match takes linear time whatever a model writes.
#: What is between calls of one region and around them: tags that were left open, ends of a cut list.
_BETWEEN = re.compile(r"(?:[\s;,\]}]++|</?tool_call>|\[TOOL_CALLS\]|```(?:json)?)*+")
_XML = re.compile(r"<function=([^>\s]++)>++\s*+(.*?)(?:</function>|(?=<function=)|\Z)", re.DOTALL)
_XML_ARGUMENT = re.compile(r"<parameter=([^>]++)>\n?(.*?)\n?</parameter>", re.DOTALL)
_GLM = re.compile(r"([^\s<>{}\[\]()\"]++)\s*+((?:<arg_key>.*)?)\Z", re.DOTALL)
_GLM_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)
#: Mistral's newer forms: ``name[CALL_ID]id[ARGS]{…}`` and ``name{…}``.
_NAMED = re.compile(r"([\w.:/-]++)\s*+(?:\[CALL_ID\]([^\[]*+))?(?:\[ARGS\])?\s*+(?=\{)")
_PYTHON = re.compile(r"\[?\s*+[A-Za-z_][\w.]*+\s*+\(.*\)\s*+\]?\s*+(?:```\s*+)?\Z", re.DOTALL)
_FENCE = re.compile(r"\s*+```\w*+\s*+")
_BROKEN_JSON = re.compile(r'\{\s*"name"\s*:\s*"[^"]*"\s*,\s*"(?:parameters|arguments)"\s*:')
_DECODER = json.JSONDecoder(strict=False)


def read_calls(
    body: str, tools: Tools = (), name: str = "", call_id: str = "", is_cut: bool = False
) -> list[Call]:
    """The calls in ``body``, the text between a format's tags, with arguments cast by their schemas.

    ``name``, ``call_id``: from the tag, if the format writes them there; then ``body`` holds the arguments.
    ``is_cut``: the answer ended before the closing tag. Never raises: what cannot be read is an
    :class:`InvalidCall`.
    """
    text = body.strip()
    try:
        found = (
            [_named(name, text, call_id)]
            if name
            else list(_read(text, () if is_cut else tool_names(tools)))
        )
    except RecursionError:
        found = [InvalidCall(text, "the call is not JSON: it is nested too deeply")]
    if not found:
        found = [InvalidCall(text, "the call is empty; expected a name and arguments")]
    return [_cast(call, tools) if isinstance(call, ToolCall) else call for call in found]


def _read(text: str, known: Sequence[str]) -> Iterator[Call]:
    """``known``: names of tools that may be called by their name alone."""
    glm = None if text.startswith(("{", "[")) else _GLM.match(text)
    if text.startswith("<function="):
        yield from _xml(text)
    elif glm is not None and (glm[2] or glm[1] in known):
        yield _glm(text, glm[1], glm[2])
    elif _PYTHON.match(text):
        yield from _python(text)
    else:
        yield from _json(text)


def read_bare(text: str, tools: Tools = ()) -> tuple[str, list[Call]]:
    """The calls in ``text``, whose first line may begin one without tags, and the text after them.

    Without a call at its beginning, all of it is text.
    """
    fence = _FENCE.match(text)
    inside = text[fence.end() :] if fence else text.lstrip()
    if is_call(inside):
        calls = list(read_calls(inside, tools))
    elif _PYTHON.match(inside) and _python_name(inside) in tool_names(tools):
        return "", read_calls(inside.removesuffix("```"), tools)
    else:
        return text, []
    if len(calls) > 1 and isinstance(last := calls[-1], InvalidCall) and "{" not in last.text[:2]:
        return last.text, calls[:-1]
    return "", calls


def tool_names(tools: Tools) -> list[str]:
    """Names of function schemas, nested like OpenAI's or not."""
    return [str(tool.get("function", tool).get("name")) for tool in tools]


def _python_name(text: str) -> str:
    return text.lstrip("[ \n").partition("(")[0].strip()


def is_call(text: str) -> bool:
    """Whether bare ``text`` begins with a call as JSON, complete or cut off; other JSON is an answer."""
    try:
        found, _ = _DECODER.raw_decode(text.lstrip())
    except (ValueError, RecursionError):
        return bool(_BROKEN_JSON.match(text.lstrip()))
    if isinstance(found, list):
        found = found[0] if found else None
    if not isinstance(found, dict):
        return False
    has_arguments = "arguments" in found or "parameters" in found
    return ("name" in found and has_arguments) or isinstance(found.get("function"), dict)


# -- JSON -------------------------------------------------------------------------------------------


def _json(text: str) -> Iterator[Call]:
    """Objects or lists of calls, or names with arguments, with separators or tags between."""
    at = 0
    while (at := _skipped(text, at)) < len(text):
        named = _NAMED.match(text, at)
        try:
            found, end = _DECODER.raw_decode(text, named.end() if named else at)
        except (ValueError, RecursionError) as exc:
            if text[at] == "[":  # a list that was cut off: its complete calls count
                at += 1
                continue
            what = "arguments are" if named else "the call is"
            yield InvalidCall(text[at:], f"{what} not JSON: {_reason(exc)}")
            return
        if named:
            found = {"name": named[1], "arguments": found, "id": named[2]}
        written = text[at:end]
        for call in found if isinstance(found, list) else [found]:
            yield (read := _object(call, written))
            if isinstance(read, InvalidCall):
                written = ""  # of a list, once
        at = end


def _skipped(text: str, at: int) -> int:
    found = _BETWEEN.match(text, at)
    return found.end() if found else at


def _object(call: Any, text: str) -> Call:
    """A dictionary of one call, in OpenAI's nesting or without it."""
    call_id = call.get("id") if isinstance(call, dict) else None
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]
    name = call.get("name", call.get("tool_name")) if isinstance(call, dict) else None
    if not isinstance(name, str) or not name:
        return InvalidCall(text, "the call has no name; expected name and arguments")
    arguments = call.get("arguments", call.get("parameters"))
    return _made(name, arguments, text, call_id if isinstance(call_id, str) else "")


def _named(name: str, text: str, call_id: str) -> Call:
    """A call with its name in the tag; ``text`` holds the arguments."""
    if text.startswith("<parameter="):
        return _xml_call(name, text, is_closed=True)
    try:
        arguments, _ = _DECODER.raw_decode(text) if text else ({}, 0)
    except ValueError as exc:
        return InvalidCall(text, f"the arguments of {shortened(name)} are not JSON: {_reason(exc)}")
    return _made(name, arguments, text, call_id)


def _made(name: str, arguments: Any, text: str, call_id: str = "") -> Call:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, strict=False)
        except (ValueError, RecursionError) as exc:
            return InvalidCall(
                text, f"the arguments of {shortened(name)} are not JSON: {_reason(exc)}"
            )
    if not isinstance(arguments, dict | None):
        kind = type(arguments).__name__
        return InvalidCall(
            text, f"the arguments of {shortened(name)} are a {kind}, expected an object"
        )
    return ToolCall(call_id or uuid.uuid4().hex[:9], name, arguments or {})


def _reason(exc: BaseException) -> str:
    return "it is nested too deeply" if isinstance(exc, RecursionError) else str(exc)


# -- XML --------------------------------------------------------------------------------------------


def _xml(text: str) -> Iterator[Call]:
    """``<function=NAME><parameter=KEY>VALUE</parameter>…</function>``, or with JSON inside (Functionary)."""
    for found in _XML.finditer(text):
        yield _xml_call(found[1], found[2], found[0].endswith("</function>"))


def _xml_call(name: str, inside: str, is_closed: bool) -> Call:
    if inside.lstrip().startswith("{"):
        return _named(name, inside.strip(), "")
    closed, tag, after = inside.rpartition("</parameter>")  # what follows holds no argument
    closed += tag
    arguments = {key.strip(): value for key, value in _XML_ARGUMENT.findall(closed)}
    rest = (_XML_ARGUMENT.sub("", closed) + after).strip()
    if rest or not is_closed:
        return InvalidCall(inside, f"the call of {shortened(name)} is cut off or not in its form")
    return ToolCall(uuid.uuid4().hex[:9], name, arguments)


def _glm(text: str, name: str, pairs: str) -> Call:
    """``NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…``"""
    closed, tag, after = pairs.rpartition("</arg_value>")
    closed += tag
    arguments = {key.strip(): value.strip() for key, value in _GLM_ARGUMENT.findall(closed)}
    if (_GLM_ARGUMENT.sub("", closed) + after).strip():
        return InvalidCall(text, f"the call of {shortened(name)} is cut off or not in its form")
    return ToolCall(uuid.uuid4().hex[:9], name, arguments)


# -- Python -----------------------------------------------------------------------------------------


def _python(text: str) -> Iterator[Call]:
    """``name(key=value, …)``, one a line or in a list; values are literals."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, MemoryError) as exc:
        yield InvalidCall(text, f"the call is neither JSON nor Python: {exc}")
        return
    for statement in body:
        value = statement.value if isinstance(statement, ast.Expr) else None
        for each in value.elts if isinstance(value, ast.List | ast.Tuple) else [value]:
            yield _python_call(each, text)


def _python_call(node: ast.expr | None, text: str) -> Call:
    if not isinstance(node, ast.Call) or node.args or any(k.arg is None for k in node.keywords):
        return InvalidCall(text, "the call is not JSON, and no Python call with named arguments")
    try:
        arguments = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
    except ValueError:
        return InvalidCall(text, "the call has an argument that is no literal")
    return ToolCall(uuid.uuid4().hex[:9], ast.unparse(node.func), arguments)


# -- casting ----------------------------------------------------------------------------------------


def _cast(call: ToolCall, tools: Tools) -> ToolCall:
    """With arguments that are text cast to the types of the tool's schema; what does not fit stays text."""
    properties = _properties(call.name, tools)
    arguments = {
        key: _value(value, types)
        if isinstance(value, str) and (types := _types(properties.get(key)))
        else value
        for key, value in call.arguments.items()
    }
    return replace(call, arguments=arguments)


def _properties(name: str, tools: Tools) -> Mapping[str, Any]:
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            parameters = parameters if isinstance(parameters, Mapping) else {}
            found = parameters.get("properties")
            found = found if isinstance(found, Mapping) else {}
            return {key: resolved(schema, parameters) for key, schema in found.items()}
    return {}


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """``schema``, with a reference at its top followed."""
    for _ in range(8):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        found: Any = root
        for key in reference[2:].split("/"):
            found = found.get(key) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping):
            break
        schema = {**{k: v for k, v in schema.items() if k != "$ref"}, **found}
    return schema if isinstance(schema, Mapping) else {}


def _types(schema: Any) -> list[str]:
    """The JSON types that ``schema`` allows; empty if it allows text or says nothing."""
    if not isinstance(schema, Mapping):
        return []
    declared = schema.get("type")
    types = [declared] if isinstance(declared, str) else list(declared or ())
    for union in ("anyOf", "oneOf"):
        for choice in schema.get(union) or ():
            types += _types(choice) or ["string"]
    return [] if "string" in types else [str(each) for each in types]


_WORDS = {"true": True, "false": False, "null": None, "none": None}


def _value(text: str, types: Sequence[str]) -> Any:
    word = text.strip()
    try:
        found = _WORDS[word.lower()] if word.lower() in _WORDS else json.loads(word)
    except (ValueError, RecursionError):
        try:
            found = ast.literal_eval(word)  # a dictionary as Python prints it
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return text
    if isinstance(found, float) and found.is_integer() and "number" not in types:
        found = int(found)
    return found if _JSON_TYPES.get(type(found), "") in _allowed(types) and _finite(found) else text


_JSON_TYPES: dict[type, str] = {
    bool: "boolean", int: "integer", float: "number", list: "array", dict: "object",
    type(None): "null",
}  # fmt: skip


def _allowed(types: Sequence[str]) -> set[str]:
    return {*types, "integer"} if "number" in types else set(types)


def _finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)
