"""Messages as clients send them, in one form: a role, content that is text, calls and their results.

Clients send back what other models and servers said, in OpenAI's form, old or new, in Anthropic's or that of
a framework: contents in parts, calls whose arguments are JSON that was cut off, results that are numbers. All
of that is read here. Only what is no text is refused, by the name of its field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from blendrag.errors import InvalidInputError, InvalidOptionError, check_unicode
from blendrag.wording import a_type, quoted

Message = dict[str, Any]

#: Where the reasoning of an answer is, once it is read.
REASONING = "reasoning_content"
#: Other names of roles.
_ROLES = {
    "developer": "system", "human": "user", "ai": "assistant", "bot": "assistant",
    "chatbot": "assistant", "model": "assistant", "function": "tool", "tool_results": "tool",
}  # fmt: skip
#: Other fields with the reasoning of an answer.
_THOUGHTS = ("reasoning", "thinking")
#: Kinds of parts of an answer that are reasoning, or are calls.
_THINKING = ("thinking", "redacted_thinking", "reasoning", "reasoning_content")
_CALLING = (
    "tool_use", "tool_call", "function_call", "tool_call_chunk", "invalid_tool_call",
    "input_json_delta",
)  # fmt: skip
#: Kinds of parts that are results of calls.
_RESULTS = ("tool_result", "function_call_output")
#: What the kind of a part that is no text begins with.
_MEDIA = (
    "image", "input_image", "audio", "input_audio", "video", "input_video", "file", "input_file",
    "document", "media",
)  # fmt: skip


def cleaned(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """``messages`` in one form. Fields that are not known stay as they are.

    Arguments of calls are objects, or text if they are none. Every call has an id, and so has its result,
    whose ``name`` is that of the call. Raises :class:`InvalidInputError` for content that is not text.
    """
    calls = _Calls()
    made: list[Message] = []
    for number, message in enumerate(messages):
        made += _cleaned(message, f"messages[{number}]", calls)
    return made


def result_of(content: Any) -> Any:
    """The content of a tool's result: text, parts, or any other JSON as text."""
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        parts = all(isinstance(part, str) or _is_part(part) for part in content)
        return content if parts else _as_json(content)
    return [content] if _is_part(content) else _as_json(content)


def arguments_of(given: Any) -> dict[str, Any] | str:
    """Arguments of a call as an object; as text if they are none.

    JSON that was cut off is completed, and a text that holds JSON is read again.
    """
    if not isinstance(given, str):
        return _finite(given) if isinstance(given, Mapping) else _not_object(given)
    text = given.strip()
    if not text:
        return {}
    for read in (_json, _objects, _completed):
        with suppress(ValueError):
            found = read(text)
            if isinstance(found, str):  # JSON in JSON
                inner = arguments_of(found)
                return inner if isinstance(inner, dict) else given
            return _finite(found) if isinstance(found, Mapping) else _not_object(found, given)
    return given


# -- messages ---------------------------------------------------------------------------------------


class _Calls:
    """Calls of a conversation that wait for results, oldest first."""

    def __init__(self) -> None:
        self._numbers = count()
        self._names: dict[str, str] = {}
        self._waiting: list[str] = []

    def add(self, call_id: Any, name: str) -> str:
        """The id of a call."""
        known = str(call_id) if call_id else self._new_id()
        self._names[known] = name
        self._waiting.append(known)
        return known

    def answer(self, call_id: Any, name: Any) -> tuple[str, str]:
        """The id and name of the call that a result belongs to. A result without an id is that of the first
        call of its name, or of any."""
        known = str(call_id) if call_id else ""
        if not known:
            named = [each for each in self._waiting if self._names[each] == name]
            known = next(iter([*named, *self._waiting]), "") or self._new_id()
        if known in self._waiting:
            self._waiting.remove(known)
        return known, str(name) if name else self._names.get(known, "")

    def _new_id(self) -> str:
        return f"call{next(self._numbers):05d}"  # nine characters, as Mistral's templates demand


def _cleaned(message: Mapping[str, Any], field: str, calls: _Calls) -> Iterator[Message]:
    given = message.get("role")
    if not isinstance(given, str) or not given:
        raise InvalidOptionError(
            f"{field}.role", f"is {quoted(given)}, expected system, user, assistant or tool"
        )
    role = _ROLES.get(given, given)
    read = _Content(message.get("content"), f"{field}.content", role)
    for call_id, text in read.results:
        known, name = calls.answer(call_id, None)
        yield _result(known, name, text)
    if read.results and not read.text and role != "assistant":
        return
    made = {**message, "role": role, "content": read.text}
    if role == "tool":
        known, name = calls.answer(message.get("tool_call_id"), message.get("name"))
        yield {**made, **_result(known, name, read.text)}
        return
    if role != "assistant":
        yield made
        return
    thoughts = [message.get(name) for name in (REASONING, *_THOUGHTS)]
    thought = next((t for t in thoughts if isinstance(t, str) and t.strip()), read.reasoning)
    for name in ("tool_calls", "function_call", REASONING, *_THOUGHTS):
        made.pop(name, None)
    if thought.strip():
        check_unicode(thought, f"{field}.{REASONING}")
        made[REASONING] = thought
    made_calls = [*_calls_of(message, read.calls, field, calls)]
    yield {**made, "tool_calls": made_calls} if made_calls else made


def _result(call_id: str, name: str, text: str) -> Message:
    named = {"name": name} if name else {}
    return {"role": "tool", "content": text, "tool_call_id": call_id, **named}


def _calls_of(
    message: Mapping[str, Any], in_content: Sequence[Any], field: str, calls: _Calls
) -> Iterator[Message]:
    """The calls of an answer: those of its fields, else those that are parts of its content."""
    given = message.get("tool_calls")
    if given is not None and not isinstance(given, list | tuple):
        raise InvalidOptionError(f"{field}.tool_calls", f"is {quoted(given)}, expected a list")
    listed = list(given or ())
    if not listed and message.get("function_call"):
        listed, given = [{"function": message["function_call"]}], None
    for number, call in enumerate(listed or in_content):
        at = f"{field}.tool_calls[{number}]"
        function = call.get("function", call) if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise InvalidOptionError(at, f"is {quoted(call)}, expected a function with a name")
        arguments = next((function[k] for k in _ARGUMENTS if function.get(k) is not None), None)
        try:
            read = arguments_of(arguments)
        except RecursionError:
            raise InvalidInputError(f"the arguments of {at} are nested too deeply") from None
        call_id = call.get("id") or call.get("call_id")
        yield function_call(calls.add(call_id, name), name, read)


def function_call(call_id: str, name: str, arguments: dict[str, Any] | str) -> Message:
    """A call in OpenAI's form."""
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "id": call_id, "function": function}


_ARGUMENTS = ("arguments", "args", "input", "parameters")


# -- contents ---------------------------------------------------------------------------------------


class _Content:
    """What a content holds: text, and in parts also reasoning, calls and results."""

    def __init__(self, content: Any, field: str, role: str) -> None:
        self._field, self._role = field, role
        self.reasoning = ""
        self.calls: list[Any] = []
        self.results: list[tuple[Any, str]] = []
        """Ids of calls, and what they gave."""
        if role == "tool":
            content = result_of(content)
        if content is None or isinstance(content, str):
            self.text: str = content or ""
        elif isinstance(content, list | tuple):
            self.text = self._parts(content)
        elif isinstance(content, Mapping):
            self.text = self._part(content, field)
        else:
            raise InvalidOptionError(
                field, f"is {quoted(content)}, expected a text or a list of parts of text"
            )
        check_unicode(self.text, field)

    def _parts(self, parts: Sequence[Any]) -> str:
        return "".join(self._part(part, f"{self._field}[{i}]") for i, part in enumerate(parts))

    def _part(self, part: Any, field: str) -> str:
        if isinstance(part, str):
            return part
        if not isinstance(part, Mapping):
            raise InvalidOptionError(field, f"is {quoted(part)}, expected a part of type text")
        kind = part.get("type", "text" if "text" in part else None)
        is_answer = self._role == "assistant"
        if is_answer and kind in _THINKING:
            self.reasoning += _thought(part)
        elif is_answer and kind in _CALLING:
            if part.get("name"):
                self.calls.append(part)
        elif kind in _RESULTS:
            inner = part.get("content", part.get("output"))
            result = _Content(inner, f"{field}.content", "tool").text
            self.results.append((part.get("tool_use_id", part.get("call_id")), result))
        elif kind == "refusal" and isinstance(part.get("refusal"), str):
            return str(part["refusal"])
        elif not _is_media(kind) and isinstance(part.get("text"), str):
            return str(part["text"])
        elif self._role == "tool" and not _is_media(kind):
            return _as_json(part)
        else:
            raise InvalidOptionError(
                field,
                f"is a content part of type {quoted(kind)}, expected text; describe it in words or leave "
                "it out",
            )
        return ""


def _is_part(part: Any) -> bool:
    return isinstance(part, Mapping) and ("type" in part or isinstance(part.get("text"), str))


def _is_media(kind: Any) -> bool:
    return isinstance(kind, str) and kind.split("_url")[0] in _MEDIA


def _thought(part: Mapping[str, Any]) -> str:
    """The reasoning in a part, in the forms of Anthropic, Mistral, OpenAI and Bedrock."""
    for name in ("thinking", "reasoning", "text", "summary", "content", REASONING):
        held = part.get(name)
        if isinstance(held, str):
            return held
        if isinstance(held, Mapping):
            held = [held]
        if isinstance(held, list):
            texts = [each.get("text") if isinstance(each, Mapping) else each for each in held]
            return "".join(text for text in texts if isinstance(text, str))
    return ""


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return f"{a_type(value)} that is nested too deeply to show"
    except (TypeError, ValueError):
        return str(value)


# -- arguments --------------------------------------------------------------------------------------


def _json(text: str) -> Any:
    return json.loads(text, strict=False, parse_float=_number, parse_constant=str)


def _number(text: str) -> float | str:
    """A number; one that JSON has not stays text."""
    return number if math.isfinite(number := float(text)) else text


def _objects(text: str) -> Any:
    """Several objects, one after the other, as one."""
    decoder = json.JSONDecoder(strict=False, parse_float=_number, parse_constant=str)
    made, at = dict[str, Any](), 0
    while at < len(text):
        found, at = decoder.raw_decode(text, at)
        if not isinstance(found, dict) or made.keys() & found.keys():
            raise ValueError("no objects with different keys")
        made |= found
        while at < len(text) and text[at] in " \n\r\t,;":
            at += 1
    return made


def _completed(text: str) -> Any:
    """JSON that was cut off, with what it needs to end; without a key or a word that was cut."""
    closers = ""
    in_text = is_escaped = False
    whole = (0, "")
    for at, char in enumerate(text):
        if in_text:
            is_escaped, in_text = char == "\\" and not is_escaped, char != '"' or is_escaped
        elif char == '"':
            in_text = True
        elif char in "{[":
            closers = ("}" if char == "{" else "]") + closers
            whole = (at + 1, closers)
        elif char in "}]":
            closers = closers[1:]
        elif char == ",":
            whole = (at, closers)
        if len(closers) > _DEPTH:
            break
    if not closers or len(closers) > _DEPTH:
        raise ValueError("nothing was cut off, or it is too deep")
    ended = text[:-1] if is_escaped else text
    with suppress(ValueError):
        return _json(ended + ('"' if in_text else "") + closers)
    return _json(text[: whole[0]] + whole[1])


def _not_object(found: Any, written: str = "") -> dict[str, Any] | str:
    """Arguments that are JSON, but no object: a list of one object, nothing, or other values."""
    if isinstance(found, list | tuple) and len(found) == 1 and isinstance(found[0], Mapping):
        return _finite(found[0])
    return {} if found is None or found in ([], "") else written or _as_json(found)


def _finite(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """With words for numbers that JSON has not."""
    made: dict[str, Any] = _finite_value(arguments, {}, 0)
    return made


#: Values deeper than this stay as they are, and are refused before they are rendered.
_DEPTH = 200


def _finite_value(value: Any, done: dict[int, Any], depth: int) -> Any:
    """``done``: what was made of each list and mapping, some of which may be shared or contain themselves."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if depth > _DEPTH or not isinstance(value, Mapping | list | tuple):
        return value
    if id(value) not in done:
        done[id(value)] = value
        if isinstance(value, Mapping):
            done[id(value)] = {k: _finite_value(v, done, depth + 1) for k, v in value.items()}
        else:
            done[id(value)] = [_finite_value(v, done, depth + 1) for v in value]
    return done[id(value)]
