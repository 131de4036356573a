"""Fits a conversation to what a chat template accepts, with nothing lost.

Templates differ in what they take: no system role (Gemma 2), roles that must alternate (Mistral), ids of nine
characters, one call a message, arguments as an object or as text, no tools at all. What a template does not
take it refuses, or leaves out in silence. Nothing here knows a model: short probes of the same shape as the
conversation are rendered, with a word in the place of each text, and the conversation is changed as little as
is needed for all words to appear.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from blendrag.chat.messages import REASONING, Message, function_call
from blendrag.chat.probes import TOOL, try_render
from blendrag.errors import InvalidOptionError
from blendrag.model.bounded_templates import bounded
from blendrag.wording import quoted

if TYPE_CHECKING:
    from blendrag.model.tokens import Tokens

#: Between texts that become one.
_BETWEEN = "\n\n"
Ids = Literal["given", "nine", "named"]
_IDS: tuple[Ids, ...] = ("given", "nine", "named")
_KNOWN_ROLES = ("system", "user", "assistant", "tool")
#: Names under which templates read the reasoning of an answer.
_REASONING_NAMES = (REASONING, "thinking", "reasoning", "thought")


# -- how a template reads one message ---------------------------------------------------------------


@dataclass(frozen=True)
class Style:
    """The form in which a template reads single messages."""

    arguments_as_text: bool = False
    """Whether arguments are JSON, not objects."""
    empty_is_none: bool = False
    """Whether the content next to calls is ``None`` if it is empty (DeepSeek R1)."""
    ids: Ids = "given"
    """Ids of calls: any, nine letters and digits (Mistral), or ``functions.NAME:NUMBER`` (Kimi)."""
    names_results: bool = False
    """Whether a result has the name of its call."""
    reasoning: str = ""
    """The name of the field that reasoning is read from; empty if it is not read."""


def _styled(messages: Sequence[Message], style: Style) -> list[Message]:
    """``messages``, each in the form that the template reads."""
    names: dict[str, str] = {}
    made = []
    for message in messages:
        message = dict(message)
        thought = message.pop(REASONING, None)
        if thought and style.reasoning:
            message[style.reasoning] = thought
        if message.get("tool_calls"):
            message["tool_calls"] = [_styled_call(c, style, names) for c in message["tool_calls"]]
        elif message["role"] == "tool":
            call_id = message["tool_call_id"]
            message["tool_call_id"] = names.get(call_id) or _styled_id(call_id, style, "", 0)
            if not style.names_results:
                message.pop("name", None)
        made.append(message)
    return made


def _styled_call(call: Message, style: Style, names: dict[str, str]) -> Message:
    function = call["function"]
    arguments, name = function["arguments"], function["name"]
    if style.arguments_as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not style.arguments_as_text and isinstance(arguments, str):
        arguments = {"input": arguments}
    call_id = _styled_id(call["id"], style, name, len(names))
    names[call["id"]] = call_id
    return {**call, "id": call_id, "function": {**function, "arguments": arguments}}


def _styled_id(call_id: str, style: Style, name: str, number: int) -> str:
    if style.ids == "nine" and len(call_id) != 9:
        return sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]
    if style.ids == "named" and name:
        return call_id if call_id.startswith(f"functions.{name}:") else f"functions.{name}:{number}"
    return call_id


@lru_cache(maxsize=16)
def _style_of(tokens: Tokens, template: str, given: Given, has_calls: bool) -> Style:
    """Found by trying, with a call and its result if it must have calls; the plain style if none is read
    right."""
    found = Style()
    if not has_calls:
        return found
    render = _Renderer(tokens, given)
    words = ("probeuser", "probename", "probekey", "probevalue", "proberesult")
    for ids, as_text, is_none in product(_IDS, (False, True), (False, True)):
        style = Style(ids=ids, arguments_as_text=as_text, empty_is_none=is_none)
        text = render(_probe(style))
        if text is not None and all(word in text for word in words) and _is_right(text, as_text):
            found = style
            break
    else:
        return found
    named = render(_probe(replace(found, names_results=True), "probeother"))
    return replace(found, names_results=named is not None and "probeother" in named)


def _probe(style: Style, name: str = "") -> list[Message]:
    call_id = "call_abc123def456"
    call = function_call(call_id, "probename", {"probekey": "probevalue"})
    made = [
        _user("probeuser"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "proberesult", "tool_call_id": call_id, "name": name},
    ]
    return [_finished(message, style) for message in _styled(made, style)]


def _is_right(text: str, as_text: bool) -> bool:
    """Whether arguments are neither JSON in JSON nor an object as Python prints it."""
    return '\\"probekey' not in text if as_text else "'probekey':" not in text


@lru_cache(maxsize=16)
def _reasoning_name(tokens: Tokens, template: str, given: Given, style: Style) -> str:
    """The field that the template reads reasoning from, after the user's last message or before it."""
    render = _Renderer(tokens, given)
    for name in _REASONING_NAMES:
        if name not in template:
            continue
        thinks = replace(style, reasoning=name)
        with_call = _probe(thinks)
        with_call[1] = {**with_call[1], name: "probethought"}
        answer = {"role": "assistant", "content": "probeanswer", name: "probethought"}
        plain = [_finished(m, thinks) for m in (_user("probeuser"), answer)]
        for messages in (with_call, plain, [*plain, _finished(_user("probeuser"), thinks)]):
            if render.shows(messages, ("probethought",)):
                return name
    return ""


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


# -- the order of messages --------------------------------------------------------------------------


class Order(NamedTuple):
    """How a conversation is arranged. Each field counts from 0, which changes nothing."""

    calls: int = 0
    """1: results without calls become text of the user; 2: the text next to calls is a message before them;
    3: each call is a message; 4: calls and results are text."""
    system: int = 0
    """1: system messages at the beginning are one, and later ones text of the user; 2: all of them are."""
    turns: int = 0
    """1: messages of the same role in a row are one; 2: empty ones are put between."""
    thoughts: int = 0
    """1: without reasoning."""

    @property
    def cost(self) -> float:
        """How much it changes."""
        calls, system, turns = (0, 1, 2, 3, 20)[self.calls], self.system, (0, 1, 5)[self.turns]
        return calls + system + turns + 2.5 * self.thoughts


@dataclass(frozen=True)
class Fitted:
    """A conversation whose messages are in the form that the template reads, but in the order in which they
    were sent."""

    messages: list[Message]
    style: Style
    order: Order

    def arranged(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """For the template: :attr:`messages`, or the same with other texts."""
        made = [dict(message) for message in messages]
        if self.order.thoughts and self.style.reasoning:
            for message in made:
                message.pop(self.style.reasoning, None)
        if self.order.calls:
            made = [*_without_orphans(made, all_calls=self.order.calls == 4)]
        if self.order.system:
            made = _without_system(made, keep_first=self.order.system == 1)
        if self.order.turns:
            made = _joined(made)
        if self.order.calls in (2, 3):
            made = [*_apart(made, one_each=self.order.calls == 3)]
        if self.order.turns == 2:
            made = [*_filled(made)]
        return [_finished(message, self.style) for message in made]


def fitted(messages: Sequence[Message], tokens: Tokens, given: Mapping[str, Any]) -> Fitted:
    """``messages``, :func:`~blendrag.chat.messages.cleaned`, as the model's template takes them.

    ``given``: the other arguments of the template. Raises :class:`InvalidInputError` for a role that it does
    not know.
    """
    scalars = {k: v for k, v in given.items() if isinstance(v, str | int | float | None)}
    arguments_given = Given(bool(given.get("tools")), tuple(sorted(scalars.items(), key=str)))
    shape = tuple(_shape(messages))
    style, order, missing = _arrangement(tokens, tokens.template_text, arguments_given, shape)
    for number, message in enumerate(messages):
        if number in missing and message["role"] not in _KNOWN_ROLES:
            raise InvalidOptionError(
                f"messages[{number}].role",
                f"is {quoted(message['role'])}, which this model's chat template does not show; expected "
                "system, user, assistant or tool",
            )
    return Fitted(_styled(messages, style), style, order)


class Given(NamedTuple):
    """What else a template is given, as far as its rendering of messages may depend on it."""

    has_tools: bool
    scalars: tuple[tuple[str, Any], ...]


class Turn(NamedTuple):
    """What a template may look at in a message, besides its texts."""

    role: str
    has_text: bool
    calls: tuple[int, ...] = ()
    """Numbers of the calls in it, or of the call that it is the result of."""
    has_reasoning: bool = False


def _shape(messages: Sequence[Message]) -> Iterator[Turn]:
    numbers: dict[str, int] = {}
    for message in messages:
        ids = [call["id"] for call in message.get("tool_calls") or ()]
        ids += [message["tool_call_id"]] if message["role"] == "tool" else []
        calls = tuple(numbers.setdefault(call_id, len(numbers)) for call_id in ids)
        text = message["content"]
        has_text = bool(text.strip()) if isinstance(text, str) else True
        yield Turn(message["role"], has_text, calls, REASONING in message)


@lru_cache(maxsize=16)
def _recent(tokens: Tokens, template: str, given: Given) -> deque[tuple[tuple[Turn, ...], Order]]:
    """Shapes that were fitted, and their orders, newest last."""
    return deque(maxlen=32)


@lru_cache(maxsize=256)
def _arrangement(
    tokens: Tokens, template: str, given: Given, shape: tuple[Turn, ...]
) -> tuple[Style, Order, frozenset[int]]:
    """The style and order in which all texts of a conversation of this shape appear, and the numbers of
    messages of which none does. If there is none, that which loses least."""
    has_calls = any(turn.calls for turn in shape)
    style = _style_of(tokens, template, given, has_calls)
    if any(turn.has_reasoning for turn in shape):
        style = replace(style, reasoning=_reasoning_name(tokens, template, given, style))
    render = _Renderer(tokens, given)
    probe, words = _probe_of(shape)
    messages = _styled(probe, style)
    orders = product(
        range(5 if has_calls else 1),
        range(3 if any(turn.role == "system" for turn in shape) else 1),
        range(3),
        range(2 if style.reasoning else 1),
    )
    recent = _recent(tokens, template, given)
    # a conversation that has grown probably takes the order that it had before
    likely = [found for known, found in tuple(recent) if known == shape[: len(known)]]
    others = sorted((Order(*each) for each in orders), key=lambda order: order.cost)
    best: tuple[int, Order, frozenset[int]] | None = None
    with bounded():  # all of them share one allowance
        for order in dict.fromkeys([Order(), *likely[::-1], *others]):
            text = render(Fitted(messages, style, order).arranged(messages))
            if text is None:
                continue
            lost = [number for number, word in words if word not in text]
            if best is None or len(lost) < best[0]:
                best = len(lost), order, frozenset(lost)
            if not lost:
                break
    if best is None:
        return style, Order(), frozenset(number for number, _ in words)
    if best[0] == 0 and len(shape) > 2:
        recent.append((shape, best[1]))
    return style, best[1], best[2]


def _probe_of(shape: Sequence[Turn]) -> tuple[list[Message], list[tuple[int, str]]]:
    """A conversation of this shape, and the words that its rendering must show, by the number of their
    messages."""
    messages: list[Message] = []
    words: list[tuple[int, str]] = []

    def word(number: int, kind: str) -> str:
        words.append((number, f"{kind}{number:04d}{len(words):05d}"))
        return words[-1][1]

    for number, turn in enumerate(shape):
        message: Message = {"role": turn.role, "content": ""}
        if turn.has_text:
            message["content"] = word(number, "text")
        if turn.has_reasoning:
            message[REASONING] = "thought"
        if turn.role == "tool":
            message |= {"tool_call_id": f"call{turn.calls[0]:05d}", "name": "probe"}
        elif turn.calls:
            message["tool_calls"] = [
                function_call(
                    f"call{call:05d}", word(number, "name"), {"key": word(number, "value")}
                )
                for call in turn.calls
            ]
        messages.append(message)
    return messages, words


class _Renderer:
    """Renders probes."""

    def __init__(self, tokens: Tokens, given: Given) -> None:
        self._tokens = tokens
        self._given = dict(given.scalars) | ({"tools": [TOOL]} if given.has_tools else {})

    def __call__(self, messages: Sequence[Message]) -> str | None:
        """``None`` if the template refuses them."""
        return try_render(self._tokens, messages, **self._given)

    def shows(self, messages: Sequence[Message], words: Sequence[str]) -> bool:
        text = self(messages)
        return text is not None and all(word in text for word in words)


# -- arranging --------------------------------------------------------------------------------------


def _plus(first: Any, second: Any) -> str:
    return _BETWEEN.join(filter(None, (first, second)))


def _without_system(messages: Sequence[Message], keep_first: bool) -> list[Message]:
    """System texts before the text of the user's next message, or as a message of the user."""
    made: list[Message] = []
    rest = list(messages)
    first = ""
    while keep_first and rest and rest[0]["role"] == "system":
        first = _plus(first, rest[0]["content"])
        made = [{**rest.pop(0), "content": first}]
    waiting = ""
    for message in rest:
        if message["role"] == "system":
            waiting = _plus(waiting, message["content"])
            continue
        if waiting and message["role"] == "user":
            message = {**message, "content": _plus(waiting, message["content"])}
        elif waiting:
            made.append(_user(waiting))
        waiting = ""
        made.append(message)
    return [*made, _user(waiting)] if waiting else made


def _joined(messages: Sequence[Message]) -> list[Message]:
    """Messages of the same role in a row as one, but for results."""
    made: list[Message] = []
    for message in messages:
        last = made[-1] if made else {}
        if message["role"] != last.get("role") or message["role"] not in _KNOWN_ROLES[:3]:
            made.append(message)
            continue
        if message["role"] == "assistant" and last.get("tool_calls"):
            made.append(message)  # its text follows the calls
            continue
        made[-1] = {**last, **message, "content": _plus(last["content"], message["content"])}
    return made


def _apart(messages: Sequence[Message], one_each: bool) -> Iterator[Message]:
    """Text next to calls as a message before them; with ``one_each``, calls one by one with their results."""
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls")
        if not calls:
            yield message
            continue
        if message["content"]:
            yield {name: held for name, held in message.items() if name != "tool_calls"}
            message = {"role": message["role"], "content": "", "tool_calls": calls}
        if not one_each or len(calls) == 1:
            yield message
            continue
        results = []
        while rest and rest[0]["role"] == "tool":
            results.append(rest.pop(0))
        for number, call in enumerate(calls):
            made = {**message, "tool_calls": [call]}
            yield made if number == 0 else {k: made[k] for k in ("role", "content", "tool_calls")}
            yield from (each for each in results if each["tool_call_id"] == call["id"])
        known = {call["id"] for call in calls}
        yield from (each for each in results if each["tool_call_id"] not in known)


def _filled(messages: Sequence[Message]) -> Iterator[Message]:
    """With empty messages between those of the same role, so that the user and the answers alternate,
    beginning with the user. Calls and results are between them."""
    last, has_begun = "assistant", False
    for message in messages:
        role = message["role"]
        counts = role in ("user", "assistant") and not message.get("tool_calls")
        if (counts and role == last) or (not has_begun and role in ("assistant", "tool")):
            last = "assistant" if role == "user" else "user"
            yield {"role": last, "content": ""}
        has_begun = has_begun or role != "system"
        if counts:
            last = role
        yield message


def _without_orphans(messages: Sequence[Message], all_calls: bool) -> Iterator[Message]:
    """Results without calls, or all calls and results, as text."""
    known: set[str] = set()
    for message in messages:
        calls = message.get("tool_calls") or ()
        if calls and all_calls:
            text = "\n".join(_call_text(call["function"]) for call in calls)
            held = {name: value for name, value in message.items() if name != "tool_calls"}
            yield {**held, "content": "\n".join(filter(None, (message["content"], text)))}
        elif message["role"] == "tool" and (all_calls or message["tool_call_id"] not in known):
            yield _user(f"<tool_response>\n{message['content']}\n</tool_response>")
        else:
            known.update(call["id"] for call in calls)
            yield message


def _call_text(function: Mapping[str, Any]) -> str:
    """A call, as the most common templates write it."""
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def _finished(message: Message, style: Style) -> Message:
    """With its content as the template reads it."""
    content = message["content"]
    if style.empty_is_none and message.get("tool_calls") and not content:
        return {**message, "content": None}
    return message
