"""Tools for local models: which calls an answer holds, and how to begin a call that must be made.

A call is forced by beginning the answer with the text that the chat template puts before a call, which is
found by rendering one. Calls are parsed by the tokenizer if it can (``response_template``, transformers 5);
otherwise the chat template tells the format: Hermes' and Qwen's ``<tool_call>`` tags, Mistral's
``[TOOL_CALLS]``, or bare JSON as Llama 3 writes it.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from blendrag.errors import InvalidInputError
from blendrag.wording import quoted, shortened

if TYPE_CHECKING:
    from blendrag.model.tokens import Tokens


# -- parsing calls --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ToolCall:
    """A call as the model wrote it; ``id`` is ours, nine letters, as Mistral's template requires."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class InvalidCall:
    """A call that cannot be parsed, and why."""

    text: str
    error: str


@dataclass(frozen=True)
class Parsed:
    """An answer split into its text, its calls and the calls that cannot be parsed."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    invalid: tuple[InvalidCall, ...] = ()


def parse(
    text: str, tokens: Tokens, prompt: str = "", tools: Sequence[Mapping[str, Any]] = ()
) -> Parsed:
    """The calls in ``text``, an answer to a request with ``tools``. Never raises.

    ``prompt``: as rendered, for tokenizers that parse answers themselves and whose template begins the
    answer.
    """
    calls: list[Call]
    if getattr(tokens.tokenizer, "response_template", None) is None:
        rest, calls = _format_of(tokens)(text)
    else:
        try:
            found = tokens.tokenizer.parse_response(text, prefix=prompt, tools=list(tools) or None)
            content = found.get("content")
            rest = content.strip() if isinstance(content, str) else ""
            calls = [_read_call(call, json.dumps(call)) for call in found.get("tool_calls") or ()]
        except Exception as exc:  # the template's own parsers raise many kinds
            reason = (str(exc).strip() or type(exc).__name__).splitlines()[0]
            rest, calls = "", [InvalidCall(text, reason)]
    if calls:
        rest = rest.strip()
    for special in tokens.special_texts:
        rest = rest.replace(special, "")
    return Parsed(
        rest,
        tuple(call for call in calls if isinstance(call, ToolCall)),
        tuple(call for call in calls if isinstance(call, InvalidCall)),
    )


# -- known formats of calls ----------------------------------------------------------------------

Call = ToolCall | InvalidCall
#: An answer split into its text and its calls.
Split = tuple[str, list[Call]]

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_MISTRAL = "[TOOL_CALLS]"
#: Possessive, so that a match takes linear time.
_MISTRAL_CALL = re.compile(r"\s*+([\w.-]++)\s*+(?:\[CALL_ID\][^\[]*+)?(?:\[ARGS\])?\s*+(?=\{)")
_BETWEEN = re.compile(r"[ \n\t;,]*")
_BROKEN_CALL = re.compile(r'\{\s*"name"\s*:\s*"[^"]*"\s*,\s*"(?:parameters|arguments)"\s*:')
_PYTHON_TAG = "<|python_tag|>"


def _hermes(text: str) -> Split:
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, any number of them between text."""
    calls = [_read_json(found[1].strip()) for found in _TAGGED.finditer(text)]
    return _TAGGED.sub("", text), calls


def _mistral(text: str) -> Split:
    """``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, or ``[TOOL_CALLS]name[ARGS]{…}``, repeated."""
    rest, *pieces = text.split(_MISTRAL)
    calls: list[Call] = []
    for piece in pieces:
        named = _MISTRAL_CALL.match(piece)
        if named is None:
            calls += _read_many(piece)
            continue
        try:
            arguments, _ = json.JSONDecoder().raw_decode(piece, named.end())
            calls.append(_read_call({"name": named[1], "arguments": arguments}, piece))
        except (ValueError, RecursionError) as exc:
            calls.append(InvalidCall(piece.strip(), f"arguments are not JSON: {exc}"))
    return rest, calls


def _bare_json(text: str) -> Split:
    """``{"name": …, "parameters": {…}}``, several with ``;`` between, as the whole answer."""
    rest, tag, after = text.partition(_PYTHON_TAG)
    if tag:
        return rest, list(_read_many(after))
    return ("", list(_read_many(text))) if _is_call(text.lstrip()) else (text, [])


def _is_call(text: str) -> bool:
    """Whether ``text`` begins with the JSON of a call, complete or cut off; other JSON is an answer."""
    try:
        found, _ = json.JSONDecoder(strict=False).raw_decode(text)
    except (ValueError, RecursionError):
        return bool(_BROKEN_CALL.match(text))
    if not isinstance(found, dict):
        return False
    has_arguments = "arguments" in found or "parameters" in found
    return ("name" in found and has_arguments) or isinstance(found.get("function"), dict)


def _format_of(tokens: Tokens) -> Callable[[str], Split]:
    template = tokens.template_text
    if "<tool_call>" in template:
        return _hermes
    return _mistral if _MISTRAL in template else _bare_json


def _read_json(text: str) -> Call:
    try:
        return _read_call(json.loads(text, strict=False), text)
    except (ValueError, RecursionError) as exc:
        return InvalidCall(text, f"the call is not JSON: {exc}")


def _read_many(text: str) -> Iterator[Call]:
    """A list of calls, or calls separated by ``;`` or nothing."""
    decoder, end = json.JSONDecoder(strict=False), 0
    while (at := _BETWEEN.match(text, end).end()) < len(text):  # type: ignore[union-attr]
        try:
            found, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as exc:
            yield InvalidCall(text[at:].strip(), f"the call is not JSON: {exc}")
            return
        written = text[at:end]
        for call in found if isinstance(found, list) else [found]:
            yield (read := _read_call(call, written))
            if isinstance(read, InvalidCall):
                written = ""  # of a list, once


def _read_call(call: Any, text: str) -> Call:
    """``call`` as a dictionary of one call, in OpenAI's nesting or without it."""
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return InvalidCall(text, "the call has no name; expected name and arguments")
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, strict=False)
        except (ValueError, RecursionError) as exc:
            return InvalidCall(text, f"the arguments of {call['name']} are not JSON: {exc}")
    if not isinstance(arguments, dict | None):
        kind = type(arguments).__name__
        return InvalidCall(
            text, f"the arguments of {call['name']} are a {kind}, expected an object"
        )
    return ToolCall(uuid.uuid4().hex[:9], call["name"], arguments or {})


# -- beginning a call -----------------------------------------------------------------------------

#: A name that no template contains, and an id that the strictest one (Mistral's, nine characters) takes.
_NAME, _ID = "name_of_the_tool", "a1b2c3d4e"
_USER = {"role": "user", "content": "x"}
_CALL = {"type": "function", "id": _ID, "function": {"name": _NAME, "arguments": {}}}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "x",
        "parameters": {"type": "object", "properties": {}},
    },
}


class CallForm(NamedTuple):
    """What a model writes around a call: ``before`` NAME ``after`` arguments."""

    before: str
    after: str


def call_form(tokens: Tokens) -> CallForm | None:
    """How this model's template writes a call; ``None`` if it writes none after its prompt."""
    return _rendered_form(tokens, tokens.template_text)


@lru_cache(maxsize=4)  # needed several times per request
def _rendered_form(tokens: Tokens, template: str) -> CallForm | None:
    try:
        asked = tokens.render([_USER], tools=[_TOOL])
        called = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
        answered = tokens.render([_USER, called], tools=[_TOOL], add_generation_prompt=False)
    except Exception:  # jinja errors of many kinds: a template that takes no such message
        return None
    before, found, rest = answered.removeprefix(asked).partition(_NAME)
    if not answered.startswith(asked) or not found:
        return None
    after, found, _ = rest.partition("{}")
    return CallForm(before, after if found else "")


def opening_for(tokens: Tokens, choice: str | None, tools: Sequence[Mapping[str, Any]]) -> str:
    """The beginning of an answer that must be a call, by :func:`chosen_tool`; empty if it need not be.

    Raises :class:`InvalidInputError` if the template does not show how a call begins.
    """
    if choice in (None, "auto", "none"):
        return ""
    form = call_form(tokens)
    if form is None:
        raise InvalidInputError(
            "this model's chat template does not show how a tool call begins, so none can be forced; "
            "leave tool_choice out and let the model choose"
        )
    if choice == "any" and len(tools) == 1:
        (choice,) = tool_names(tools)
    opening = form.before if choice == "any" else f"{form.before}{choice}{form.after}"
    return opening.rstrip()  # tokenizers join white space with what follows


def tool_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of function schemas, nested like OpenAI's or not."""
    return [str(tool.get("function", tool).get("name")) for tool in tools]


def chosen_tool(choice: Any, tools: Sequence[Mapping[str, Any]]) -> str | None:
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
