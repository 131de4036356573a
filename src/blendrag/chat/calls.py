"""Reads tool calls as models write them: JSON, XML in several dialects, and Python.

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
    is_text: bool = False
    """Whether it follows calls and does not begin like one."""


Call = ToolCall | InvalidCall

# Patterns are possessive, so that a match takes linear time whatever a model writes.
#: What is between calls of one region and around them: tags that were left open, ends of a cut list.
_BETWEEN = re.compile(r"(?:[\s;,\]}]++|</?tool_call>|<\|\w++\|>|\[TOOL_CALLS\]|```(?:json)?)*+")
#: The tag of a call inside that of a list of calls.
_INNER = re.compile(r"<([^\s<>/]{0,16}?tool_call(?::\w+)?)>")
#: ``<function=NAME>``, ``<invoke name="NAME">``, and the same for parameters.
_OPEN = re.compile(r"<([^\s<>/=\"]++)(?:=|\s++(?:name|key|tool)=)\"?([^>\"\n]++)\"?([^>]*+)>")
_CDATA = re.compile(r"\s*+<!\[CDATA\[(.*)\]\]>\s*+", re.DOTALL)
#: Kimi K3 writes angle brackets as tokens.
_BRACKETS = (("<|open|>", "<"), ("<|close|>", "</"), ("<|sep|>", ">"))
_MCP = re.compile(r"<tool_name>\s*+([^<]*?)\s*</tool_name>\s*+<arguments>")
_GLM = re.compile(
    r"([^\s<>{}\[\]()\"]++)\s*+(?:<tool_sep[^<>]*+>\s*+)?((?:<\w*?arg_key[:\w]*+>.*)?)\Z", re.DOTALL
)
_GLM_KEY = re.compile(
    r"\s*+<\w*?arg_key[:\w]*+>([^<]*+)</\w*?arg_key[:\w]*+>\s*+<(\w*?arg_value[:\w]*+)>"
)
#: Mistral's newer forms: ``name[CALL_ID]id[ARGS]{…}`` and ``name{…}``; Hunyuan puts a fence between.
_NAMED = re.compile(
    r"([\w.:/-]++)\s*+(?:\[CALL_ID\]([^\[]*+))?(?:\[ARGS\])?(?:```(?:json)?)?\s*+(?=\{)"
)
_PYTHON = re.compile(r"\[?\s*+[A-Za-z_][\w.]*+\s*+\(.*\)\s*+\]?\s*+(?:```\s*+)?\Z", re.DOTALL)
_PYTHON_CALL = re.compile(r"[\s,\[]*+([A-Za-z_][\w.]*+)\s*+\(")
#: An argument whose text is quoted and not escaped.
_QUOTED = re.compile(r"\s*+(\w++)\s*+=\s*+([\"'])(.*?)\2(?=\s*+(?:,\s*+\w++\s*+=|\)))", re.DOTALL)
_UNQUOTED = re.compile(r"\s*+(\w++)\s*+=\s*+([^\s\"'(){}\[\],]++)(?=\s*+(?:,|\)))")
_FENCE = re.compile(r"\s*+```\w*+\s*+")
_SPACE = re.compile(r"\s*+")
#: Arguments in JSON inside the tag of a call, and what may close them.
_JSON_INSIDE = re.compile(r"\s*+(?:<json[^>]*+>\s*+)?(?=\{)")
_JSON_END = re.compile(r"(?:\s*+</json>)?")
#: Gemma's quotes, between which nothing is escaped.
_GEMMA_TEXT = re.compile(r"<\|\"\|>(.*?)<\|\"\|>|<escape>(.*?)<escape>", re.DOTALL)
_GEMMA_KEY = re.compile(r"([{,]\s*+)([\w.-]++)(\s*+:)")
_LISTS = re.compile(r"(?:\[\s*+)++")
_BROKEN_JSON = re.compile(r'\{\s*"name"\s*:\s*"[^"]*"\s*,\s*"(?:parameters|arguments)"\s*:')
_DECODER = json.JSONDecoder(strict=False)


def read_calls(
    body: str, tools: Tools = (), name: str = "", call_id: str = "", is_cut: bool = False
) -> tuple[list[Call], str]:
    """The calls in ``body``, the text between a format's tags, with arguments cast by their schemas, and the
    text after them.

    ``name``, ``call_id``: from the tag, if the format writes them there; then ``body`` holds the arguments.
    ``is_cut``: the answer ended before the closing tag. Never raises: what cannot be read is an
    :class:`InvalidCall`.
    """
    text = body.strip()
    found: list[Call] = []
    try:
        if name:
            found = [_named(name.strip(), text, call_id)]
        else:
            known = () if is_cut else tool_names(tools)
            parts = [text]
            if inner := _INNER.match(text):
                parts = re.split(f"</?{re.escape(inner[1])}>", text)
            found = [call for part in parts if part.strip() for call in _read(part.strip(), known)]
    except RecursionError:
        found = [InvalidCall(text, "the call is not JSON: it is nested too deeply")]
    if not found:
        found = [InvalidCall(text, "the call is empty; expected a name and arguments")]
    after = ""
    if len(found) > 1 and isinstance(last := found[-1], InvalidCall) and last.is_text:
        after, found = last.text, found[:-1]
    return [_cast(call, tools) if isinstance(call, ToolCall) else call for call in found], after


def _read(text: str, known: Sequence[str]) -> Iterator[Call]:
    """``known``: names of tools that may be called by their name alone."""
    if fence := _FENCE.match(text):
        text = text[fence.end() :]
    glm = None if text.startswith(("{", "[")) else _GLM.match(text)
    if text.startswith("<") and _MCP.search(text):
        yield from _mcp(text)
    elif _OPEN.match(text):
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
        calls, after = read_calls(inside, tools)
    elif _PYTHON.match(inside) and _python_name(inside) in tool_names(tools):
        calls, after = read_calls(inside.removesuffix("```"), tools)
    else:
        return text, []
    return after, calls


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
    while (at := _end_of(_BETWEEN, text, at)) < len(text):
        named = _NAMED.match(text, at)
        try:
            found, end = _DECODER.raw_decode(text, named.end() if named else at)
        except (ValueError, RecursionError) as exc:
            if brackets := _LISTS.match(text, at):  # that were cut off: their complete calls count
                at = brackets.end()
                continue
            what = "the arguments are" if named else "the call is"
            is_text = not named and text[at] not in '{["'
            yield InvalidCall(text[at:], f"{what} not JSON: {_reason(exc)}", is_text)
            return
        if named:
            found = {"name": named[1], "arguments": found, "id": named[2]}
        written = text[at:end]
        for call in found if isinstance(found, list) else [found]:
            yield (read := _object(call, written))
            if isinstance(read, InvalidCall):
                written = ""  # of a list, once
        at = end


def _object(call: Any, text: str) -> Call:
    """A dictionary of one call, in OpenAI's nesting or without it."""
    call_id = call.get("id") if isinstance(call, dict) else None
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]
    name = call.get("name", call.get("tool_name")) if isinstance(call, dict) else None
    if isinstance(call, dict) and len(call) == 1:
        ((only, given),) = call.items()
        if isinstance(given, dict) and only not in ("arguments", "parameters", "function"):
            name, call = only, {"arguments": given}  # Apertus: {"NAME": {…}}
    if not isinstance(name, str) or not name:
        return InvalidCall(text, "the call has no name; expected name and arguments")
    arguments = call.get("arguments", call.get("parameters"))
    return _made(name, arguments, text, call_id if isinstance(call_id, str) else "")


def _named(name: str, text: str, call_id: str) -> Call:
    """A call with its name in the tag; ``text`` holds the arguments."""
    if (text.startswith("<") and "<|open|>" in text) or _OPEN.match(text):
        return next(_xml(f'<call name="{name}">{text}</call>'))
    text = text[fence.end() :] if (fence := _FENCE.match(text)) else text
    try:
        arguments, _ = _DECODER.raw_decode(_gemma_json(text)) if text else ({}, 0)
    except ValueError as exc:
        return InvalidCall(text, f"the arguments of {shortened(name)} are not JSON: {_reason(exc)}")
    return _made(name, arguments, text, call_id)


def _gemma_json(text: str) -> str:
    """``{key:<|"|>text<|"|>,number:1}`` as JSON; other texts as they are."""
    bare_key = re.match(r"\{\s*[\w.-]", text)
    if not bare_key and not _GEMMA_TEXT.search(text):
        return text
    made, at = "", 0
    for found in _GEMMA_TEXT.finditer(text):
        made += _GEMMA_KEY.sub(r'\1"\2"\3', text[at : found.start()]).replace("None", "null")
        made += json.dumps(found[1] if found[1] is not None else found[2])
        at = found.end()
    return made + _GEMMA_KEY.sub(r'\1"\2"\3', text[at:]).replace("None", "null")


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
    """``<function=NAME><parameter=KEY>VALUE</parameter>…</function>``, ``<invoke name="NAME"><parameter
    name="KEY">…``, or with JSON inside."""
    for token, bracket in _BRACKETS:
        text = text.replace(token, bracket)
    at = 0
    while (opened := _OPEN.match(text, _after_space(text, at))) is not None:
        tag, name = opened[1], opened[2].strip()
        call, at = _xml_call(text, tag, name, opened.end())
        if isinstance(call, InvalidCall):
            at = text.find(f"<{tag}", at)
            yield replace(call, text=text[opened.start() : at if at >= 0 else None])
            if at < 0:
                return
        else:
            yield call


def _xml_call(text: str, tag: str, name: str, at: int) -> tuple[Call, int]:
    """The call whose content begins at ``at``, and where it ends."""
    arguments: dict[str, Any] = {}
    inner = _JSON_INSIDE.match(text, at)
    if inner is not None:
        try:
            found, at = _DECODER.raw_decode(text, inner.end())
        except ValueError as exc:
            error = f"the arguments of {shortened(name)} are not JSON: {_reason(exc)}"
            return InvalidCall("", error), at
        made = _made(name, found, "")
        if isinstance(made, InvalidCall):
            return made, at
        arguments = made.arguments
        at = _end_of(_JSON_END, text, at)
    while (child := _OPEN.match(text, _after_space(text, at))) is not None and child[1] != tag:
        end = _closing(text, child[1], child.end())
        if end < 0:
            break
        arguments[child[2].strip()] = _xml_value(text[child.end() : end], child[3])
        at = end + len(child[1]) + 3
    closing = _after_space(text, at)
    if not text.startswith(f"</{tag}>", closing):
        return InvalidCall("", f"the call of {shortened(name)} is cut off or not in its form"), at
    return ToolCall(uuid.uuid4().hex[:9], name, arguments), closing + len(tag) + 3


def _end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Where a match of ``pattern`` at ``at`` ends; ``at`` without one."""
    found = pattern.match(text, at)
    return found.end() if found else at


def _after_space(text: str, at: int) -> int:
    return _end_of(_SPACE, text, at)


def _closing(text: str, tag: str, at: int) -> int:
    """Where the closing tag begins that ends a value: one that another tag or the end follows."""
    close = f"</{tag}>"
    at = text.find(close, at)
    while at >= 0:
        after = _after_space(text, at + len(close))
        if after == len(text) or text[after] == "<":
            return at
        at = text.find(close, at + 1)
    return -1


def _xml_value(text: str, attributes: str) -> Any:
    """Without the line breaks around it; decoded if the tag says that it is no text."""
    if cdata := _CDATA.fullmatch(text):
        return cdata[1]
    if len(text) > 1 and text[0] == text[-1] == "\n":
        text = text[1:-1]
    declared = re.search(r'\b(string|type)="(\w+)"', attributes)
    if declared and declared[2] not in ("true", "string"):
        try:
            return json.loads(text, strict=False)
        except (ValueError, RecursionError):
            return text
    return text


def _mcp(text: str) -> Iterator[Call]:
    """``<tool_name>NAME</tool_name><arguments>{…}</arguments>``"""
    for found in _MCP.finditer(text):
        yield _named(found[1], text[found.end() :].strip().partition("</arguments>")[0], "")


def _glm(text: str, name: str, pairs: str) -> Call:
    """``NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…``"""
    arguments, at = {}, 0
    while (key := _GLM_KEY.match(pairs, at)) is not None:
        if (end := _closing(pairs, key[2], key.end())) < 0:
            break
        arguments[key[1].strip()] = _xml_value(pairs[key.end() : end], "")
        at = end + len(key[2]) + 3
    if pairs[at:].strip():
        return InvalidCall(text, f"the call of {shortened(name)} is cut off or not in its form")
    return ToolCall(uuid.uuid4().hex[:9], name, arguments)


# -- Python -----------------------------------------------------------------------------------------


class _JsonWords(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_WORDS[node.id]) if node.id in _WORDS else node


def _python(text: str) -> Iterator[Call]:
    """``name(key=value, …)``, one a line or in a list; values are literals of Python or JSON."""
    text = text.removesuffix("```").strip()
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, MemoryError) as exc:
        found = list(_quoted_python(text))
        yield from found or [InvalidCall(text, f"the call is neither JSON nor Python: {exc}")]
        return
    for statement in body:
        value = statement.value if isinstance(statement, ast.Expr) else None
        for each in value.elts if isinstance(value, ast.List | ast.Tuple) else [value]:
            yield _python_call(each, text)


def _python_call(node: ast.expr | None, text: str) -> Call:
    if not isinstance(node, ast.Call) or node.args or any(k.arg is None for k in node.keywords):
        return InvalidCall(text, "the call is not JSON, and no Python call with named arguments")
    try:
        arguments = {
            str(k.arg): ast.literal_eval(_JsonWords().visit(k.value)) for k in node.keywords
        }
    except ValueError:
        return InvalidCall(text, "the call has an argument that is no literal")
    return ToolCall(uuid.uuid4().hex[:9], ast.unparse(node.func), arguments)


def _quoted_python(text: str) -> Iterator[Call]:
    """Calls whose texts are quoted and not escaped, as LFM2's template writes them; else nothing."""
    at = 0
    while (begun := _PYTHON_CALL.match(text, at)) is not None:
        given, at = "", begun.end()
        while (found := _QUOTED.match(text, at) or _UNQUOTED.match(text, at)) is not None:
            given += f"{found[1]}={found[2] if found.lastindex == 2 else repr(found[3])},"
            at = _after_space(text, found.end())
            at += text[at] == ","
        end = text.find(")", at)
        if end < 0:
            return
        try:
            call = ast.parse(f"f({given}{text[at:end]})", mode="eval").body
        except (SyntaxError, ValueError, MemoryError):
            return
        read = _python_call(call, text)
        yield replace(read, name=begun[1]) if isinstance(read, ToolCall) else read
        at = end + 1


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


#: Words of JSON and Python.
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
    allowed = {*types, "integer"} if "number" in types else {*types}
    is_finite = not isinstance(found, float) or math.isfinite(found)
    return found if is_finite and _JSON_TYPES.get(type(found)) in allowed else text


_JSON_TYPES: dict[type, str] = {
    bool: "boolean", int: "integer", float: "number", list: "array", dict: "object",
    type(None): "null",
}  # fmt: skip
