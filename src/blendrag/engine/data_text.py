"""Text of a prompt that is data: documents, tool results, earlier answers. It is never parsed as markup.

Control tokens come from the chat template and from what the developer and the user write, which are the
contents of system and user messages. All other text is data.

A template may change what it is given, so data is marked before it is rendered: the characters that control
tokens begin and end with are replaced by private-use characters, and put back afterwards. A control token of
the rendered prompt that has such a character came from data. If that changes the rendering, because the
template looks at these characters, only what looks like a control token is marked, except for the tags around
the reasoning that an answer begins with, if the template looks for them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

from blendrag.errors import InvalidInputError
from blendrag.model.tokens import Tokens

Message = Mapping[str, Any]
Span = tuple[int, int]
#: A text that is data, and whether it is the content of an answer, to another text.
Change = Callable[[str, bool], str]
Arrange = Callable[[Sequence[Message]], Sequence[Message]]

#: Roles whose contents the developer and the user write.
WRITERS = ("system", "developer", "user")
#: Arguments of a chat template that are data.
GIVEN = ("documents", "tools")
#: Private-use characters of planes 15 and 16.
_PRIVATE = (*range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE))
#: Most kinds of reasoning tags in one conversation.
_MAX_TAGS = 4


@dataclass(frozen=True)
class RenderedData:
    """A rendered prompt, and what it was rendered from."""

    text: str
    marked: str
    """``text``, in which characters of data may be private-use characters."""
    messages: Sequence[Message]
    given: Mapping[str, Any]
    """``messages`` and arguments of the template that render to ``marked``."""
    at: tuple[int, ...] = ()
    """Characters of ``text`` that are data and could be part of control tokens, ascending."""

    def lookalikes(self, tokens: Tokens) -> tuple[Span, ...]:
        """Spans of ``text`` that look like control tokens and came from data, ascending and disjoint."""
        if not self.at:
            return ()
        spans = tokens.control_spans(self.text)
        return tuple(
            (low, high)
            for low, high in spans
            if bisect_left(self.at, low) < bisect_left(self.at, high)
        )


class DataPrompt:
    """Messages to be rendered, in which some text is data."""

    def __init__(
        self,
        messages: Sequence[Message],
        given: Mapping[str, Any],
        tokens: Tokens,
        only_data: bool = False,
        asked: Span | None = None,
        arranged: Arrange = list,
    ) -> None:
        """
        Args:
            given: arguments of the chat template.
            arranged: how the template takes the messages, whatever their texts are.
            only_data: contents of all roles are data.
            asked: what of the last content is not data.

        Raises :class:`InvalidInputError` for data that cannot be marked.
        """
        self._messages, self._given, self._tokens = messages, given, tokens
        self._only_data, self._asked, self._arranged = only_data, asked, arranged
        edges, found = tokens.control_edges, dict[str, None]()

        def find(text: str, _: bool) -> str:
            found.update(dict.fromkeys(sorted(edges.intersection(text))))
            found.update(dict.fromkeys(text[low] for low, _ in tokens.control_spans(text)))
            return text

        used = set(tokens.template_text)
        try:
            self._changed(find)
            if found:
                used.update(chain.from_iterable(_texts([*messages, given])))
        except RecursionError:
            raise InvalidInputError(
                "the messages or tools are nested too deeply, expected a few levels; flatten them"
            ) from None
        free = (chr(code) for code in _PRIVATE if chr(code) not in used)
        self._marks = dict(zip(found, free, strict=False))
        if len(self._marks) < len(found):
            raise InvalidInputError(
                f"the messages have all {len(_PRIVATE):,} private-use characters, expected a few at most; "
                "remove them"
            )
        self._edges = str.maketrans({c: mark for c, mark in self._marks.items() if c in edges})
        self._back = str.maketrans({mark: char for char, mark in self._marks.items()})

    def render(self) -> RenderedData:
        """Render with the chat template. Raises what the template raises."""
        if self._marks:
            return self._as_stock() or self._guarded()
        text = self._through_template(self._messages, self._given)
        return RenderedData(text, text, self._messages, self._given)

    def _through_template(self, messages: Sequence[Message], given: Mapping[str, Any]) -> str:
        return self._tokens.render([dict(m) for m in self._arranged(messages)], **given)

    def _as_stock(self) -> RenderedData | None:
        """The stock rendering, if marks do not change it."""
        with suppress(Exception):  # jinja errors of many types, from templates that check contents
            stock = self._through_template(self._messages, self._given)
            made = self._rendered(lambda text, _: self._marked(text, ()).translate(self._edges))
            if made.text == stock:
                return RenderedData(stock, stock, self._messages, self._given, made.at)
        return None

    def _guarded(self) -> RenderedData:
        """The rendering of data in which nothing looks like a control token."""
        answers = [str(m.get("content")) for m in self._messages if m.get("role") == "assistant"]
        tags = {self._tags(answer)[-1] for answer in answers if self._tags(answer)}
        return self._rendered(
            self._guard([tag for tag in sorted(tags)[:_MAX_TAGS] if self._sees(tag)])
        )

    def _sees(self, tag: str) -> bool:
        """Whether the template looks for the tag that ends an answer's reasoning."""
        texts = []
        for kept in ((), (tag,)):
            with suppress(Exception):  # jinja errors of many types
                texts.append(self._rendered(self._guard(kept)).text)
        return len(texts) < 2 or texts[0] != texts[1]

    def _guard(self, kept: Sequence[str]) -> Change:
        return lambda text, is_answer: self._marked(text, kept if is_answer else ())

    def _marked(self, text: str, kept: Sequence[str]) -> str:
        """``text`` with what looks like control tokens marked, but not the tags around reasoning that end
        with one of ``kept``."""
        spans = self._tokens.control_spans(text)
        tags = self._tags(text) if kept else ()
        if tags and tags[-1] in kept:
            spans = spans[len(tags) :]
        chars = list(text)
        for low, _ in spans:
            chars[low] = self._marks[chars[low]]
        return "".join(chars)

    def _tags(self, answer: str) -> tuple[str, ...]:
        """``<think>`` and ``</think>`` around the reasoning that ``answer`` begins with, or the second alone,
        which templates that begin the answer leave to the model."""
        spans = self._tokens.control_spans(answer)[:2]
        first, second = (*(answer[low:high] for low, high in spans), "", "")[:2]
        if first[1:2] == "/":
            return (first,)
        opens = bool(first) and not answer[: spans[0][0]].strip()
        return (first, second) if opens and second == f"{first[0]}/{first[1:]}" else ()

    # -- changing data --------------------------------------------------------------------------

    def _rendered(self, change: Change) -> RenderedData:
        messages, given = self._changed(change)
        marked = self._through_template(messages, given)
        at = tuple(i for i, char in enumerate(marked) if ord(char) in self._back)
        return RenderedData(marked.translate(self._back), marked, messages, given, at)

    def _changed(self, change: Change) -> tuple[list[Message], dict[str, Any]]:
        """The messages and the template's arguments with all data changed."""
        messages: list[Message] = [
            {name: self._field(message, name, change) for name in message}
            for message in self._messages
        ]
        if self._asked is not None:
            low, high = self._asked
            text = self._messages[-1]["content"]
            content = change(text[:low], False) + text[low:high] + change(text[high:], False)
            messages[-1] = {**messages[-1], "content": content}
        given = {
            name: _changed(value, lambda text: change(text, False)) if name in GIVEN else value
            for name, value in self._given.items()
        }
        return messages, given

    def _field(self, message: Message, name: str, change: Change) -> Any:
        role = message.get("role")
        if name == "role" or (name == "content" and role in WRITERS and not self._only_data):
            return message[name]
        is_answer = name == "content" and role == "assistant"
        return _changed(message[name], lambda text: change(text, is_answer))


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """``value`` with every text in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_changed(key, change): _changed(held, change) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [_changed(held, change) for held in value]
    return value


def _texts(value: Any) -> Iterator[str]:
    """All texts in ``value``."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from _texts(list(pair))
    elif isinstance(value, list | tuple):
        for held in value:
            yield from _texts(held)
