"""Tools: may a model be offered any, and which calls did it write?

Owns the formats that calls are written in. A tokenizer that says itself how its model's answers are
read (``response_template``, transformers 5) is believed; otherwise the chat template tells which of
the known formats it is: Hermes' and Qwen's ``<tool_call>`` tags, Mistral's ``[TOOL_CALLS]``, or, as
Llama 3 does, bare JSON. Knows no framework and runs no tool.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blendrag.model.tokens import Tokens


@dataclass(frozen=True)
class ToolCall:
    """A call as the model wrote it; ``id`` is ours, of nine letters, as Mistral's template wants."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class InvalidCall:
    """What was meant to be a call and cannot be read, and why."""

    text: str
    error: str


@dataclass(frozen=True)
class Parsed:
    """An answer taken apart: what is said, what is called, what was meant to be."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    invalid: tuple[InvalidCall, ...] = ()


def has_tools(tokens: Tokens) -> bool:
    """Whether the model's chat template shows it the tools it is offered."""
    return tokens.has_tools


def parse(
    text: str,
    tokens: Tokens,
    prompt: str = "",
    tools: Sequence[Mapping[str, Any]] = (),
) -> Parsed:
    """The calls in ``text``, an answer to a request with ``tools``.

    ``prompt``: as rendered, for tokenizers that read answers themselves, where the template has begun
    the answer. Never raises: what cannot be read is in ``invalid``.
    """
    if getattr(tokens.tokenizer, "response_template", None) is not None:
        parsed = _by_tokenizer(text, tokens, prompt, tools)
    else:
        parsed = _split(text, _format_of(tokens))
    return Parsed(_without_control_tokens(parsed.text, tokens), parsed.calls, parsed.invalid)


# -- what the tokenizer reads itself ------------------------------------------------------------


def _by_tokenizer(
    text: str, tokens: Tokens, prompt: str, tools: Sequence[Mapping[str, Any]]
) -> Parsed:
    try:
        message = tokens.tokenizer.parse_response(text, prefix=prompt, tools=list(tools) or None)
    except Exception as exc:  # of many kinds, out of the template's own parsers
        return Parsed("", (), (InvalidCall(text, _first_line(exc)),))
    said = message.get("content")
    return _gathered(
        said if isinstance(said, str) else "",
        [_read(call, json.dumps(call)) for call in message.get("tool_calls") or ()],
    )


# -- the known formats --------------------------------------------------------------------------

Read = ToolCall | InvalidCall
Format = Callable[[str], tuple[str, list[Read]]]

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_CALL = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\])?\s*(?=\{)")
_BROKEN_CALL = re.compile(r'\{\s*"name"\s*:\s*"[^"]*"\s*,\s*"(?:parameters|arguments)"\s*:')
_PYTHON_TAG = "<|python_tag|>"


def _hermes(text: str) -> tuple[str, list[Read]]:
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, any number of them between text."""
    calls = [_read_json(found[1].strip()) for found in _TAGGED.finditer(text)]
    return _TAGGED.sub("", text), calls


def _mistral(text: str) -> tuple[str, list[Read]]:
    """``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, or ``[TOOL_CALLS]name[ARGS]{…}``, repeated."""
    said, *pieces = text.split(_MISTRAL)
    calls: list[Read] = []
    for piece in pieces:
        named = _MISTRAL_CALL.match(piece)
        if named is None:
            calls += _read_many(piece)
            continue
        try:
            arguments, _ = json.JSONDecoder().raw_decode(piece, named.end())
            calls.append(_read({"name": named[1], "arguments": arguments}, piece))
        except ValueError as exc:
            calls.append(InvalidCall(piece.strip(), f"arguments are no JSON: {exc}"))
    return said, calls


def _bare_json(text: str) -> tuple[str, list[Read]]:
    """``{"name": …, "parameters": {…}}``, several with ``;`` between, as the whole answer."""
    said, tag, after = text.partition(_PYTHON_TAG)
    if tag:
        return said, list(_read_many(after))
    return ("", list(_read_many(text))) if _is_call(text.lstrip()) else (text, [])


def _is_call(text: str) -> bool:
    """Whether ``text`` begins with the JSON of a call, whole or broken off; other JSON is an answer."""
    try:
        found, _ = json.JSONDecoder(strict=False).raw_decode(text)
    except ValueError:
        return bool(_BROKEN_CALL.match(text))
    if not isinstance(found, dict):
        return False
    has_arguments = "arguments" in found or "parameters" in found
    return ("name" in found and has_arguments) or isinstance(found.get("function"), dict)


def _format_of(tokens: Tokens) -> Format:
    template = tokens.template_text
    if "<tool_call>" in template:
        return _hermes
    return _mistral if _MISTRAL in template else _bare_json


def _split(text: str, form: Format) -> Parsed:
    said, calls = form(text)
    return _gathered(said, calls) if calls else Parsed(text)


def _gathered(said: str, calls: Sequence[Read]) -> Parsed:
    return Parsed(
        said.strip(),
        tuple(call for call in calls if isinstance(call, ToolCall)),
        tuple(call for call in calls if isinstance(call, InvalidCall)),
    )


# -- one call -----------------------------------------------------------------------------------


def _read_json(text: str) -> Read:
    try:
        return _read(json.loads(text, strict=False), text)
    except ValueError as exc:
        return InvalidCall(text, f"the call is no JSON: {exc}")


def _read_many(text: str) -> Iterator[Read]:
    """A list of calls, or calls one after another with ``;`` or nothing between them."""
    decoder, at = json.JSONDecoder(strict=False), 0
    while rest := text[at:].lstrip(" \n\t;,"):
        at = len(text) - len(rest)
        try:
            found, at = decoder.raw_decode(text, at)
        except ValueError as exc:
            yield InvalidCall(rest.strip(), f"the call is no JSON: {exc}")
            return
        for call in found if isinstance(found, list) else [found]:
            yield _read(call, rest.strip())


def _read(call: Any, text: str) -> Read:
    """``call`` as a dictionary of one call, in OpenAI's nesting or without it."""
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return InvalidCall(text, "the call has no name; expected name and arguments")
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, strict=False)
        except ValueError as exc:
            return InvalidCall(text, f"the arguments of {call['name']} are no JSON: {exc}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return InvalidCall(
            text,
            f"the arguments of {call['name']} are a {type(arguments).__name__}, expected an object",
        )
    return ToolCall(uuid.uuid4().hex[:9], call["name"], arguments)


def _without_control_tokens(text: str, tokens: Tokens) -> str:
    for special in tokens.special_texts:
        text = text.replace(special, "")
    return text


def _first_line(exc: Exception) -> str:
    return (str(exc).strip() or type(exc).__name__).splitlines()[0]
