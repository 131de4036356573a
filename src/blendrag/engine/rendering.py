"""From messages to a rendered prompt.

A string is one user message through the chat template; ``apply_chat_template=False`` sends it raw, with BOS
where the tokenizer adds one.

Contents of messages are located by rendering twice: as asked, and with a mark at both ends of every
content. Marks are drawn per request, so no document can contain them. If the marked rendering without
its marks differs from the first, each content is replaced by a random word in turn, and what changes is
the content. In prompts of very many messages this is left out, and contents are unknown.

What of the messages is data, and therefore never markup, is decided by :mod:`blendrag.engine.data_text`.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any

from blendrag.chat.history import Fitted, fitted
from blendrag.chat.messages import cleaned
from blendrag.engine.data_text import Arrange, DataPrompt
from blendrag.engine.nested import check_nested
from blendrag.engine.request import Options, Prompt, RagPrompt
from blendrag.errors import InvalidInputError, InvalidOptionError, check_unicode
from blendrag.model.bounded_templates import FIXED_MOMENT, bounded
from blendrag.model.tokens import Tokens
from blendrag.text.chunking import canonical, chunk_id_of
from blendrag.text.matches import Match, common_prefix
from blendrag.text.names import short_name
from blendrag.text.rendered import Rendered
from blendrag.text.spans import Span, merged, overlapping
from blendrag.wording import a_type

LEADING = "Answer the question from the context.\n\n"
SEPARATOR = "\n\n"
CONTEXT, QUESTION = "{context}", "{question}"
#: Before the question, not in the head: small models follow what is near the answer, and KV stays exact.
UNKNOWN = "If the answer is not in the context, say that you do not know.\n\n"
#: Where base models and small ones begin to ask themselves.
NEXT_QUESTION = "\nQuestion:"

#: Every part of a date and a time differs between these and the fixed moment.
_OTHER_MOMENTS = (datetime(1981, 11, 5, 13, 47, 59), datetime(2037, 2, 18, 22, 31, 8))

_SYSTEM_ROLES = ("system", "developer")

Change = Callable[[int, str], str]
"""The number of a message and its content, to another content."""

#: Most contents that are located by a rendering for each.
MAX_COMPARED = 100
#: Private-use characters around contents; a random word follows.
_BEGIN, _END, _CLOSE = "\ue0f0", "\ue0f1", "\ue0f2"


def build_rag_prompt(
    question: str,
    texts: Sequence[str],
    names: Sequence[str] | None = None,
    answered: Sequence[tuple[str, str]] = (),
    template: str | None = None,
) -> RagPrompt:
    """The RAG prompt over the texts of chunks: blendrag's own, or that of a ``template``.

    With ``names``, one per text, the name of a document follows its chunks, and the model is told what to do
    if they do not contain the answer. All of this follows the first chunk, which stays an exact match.
    ``answered``: earlier questions and answers, for models without a chat template.
    """
    question = question.strip()
    if not question:
        raise InvalidInputError("the question is empty; ask something")
    instruction = UNKNOWN if names else ""
    template = (
        template or f"{LEADING}{CONTEXT}{SEPARATOR}{instruction}Question: {QUESTION}\nAnswer:"
    )
    asked, _, rest = template.partition(CONTEXT)
    before, _, after = rest.partition(QUESTION)
    matches: list[Match] = []
    for number, text in enumerate(texts):
        asked += SEPARATOR * bool(number)
        chunk = canonical(text)
        start = len(asked) + text.index(chunk)
        matches.append(Match(chunk_id_of(chunk), start, start + len(chunk), complete=True))
        asked += text
        if names and names[number : number + 1] != names[number + 1 : number + 2]:
            asked += f"\n[{short_name(names[number])}]"
    asked += "".join(f"{SEPARATOR}Question: {q}\nAnswer: {a}" for q, a in answered)
    asked += f"{before}{question}"
    end = len(asked)
    return RagPrompt(f"{asked}{after}", tuple(matches), (end - len(question), end))


def prefix_token_ids(tokens: Tokens) -> tuple[int, ...]:
    """Ids of what precedes the first chunk in :func:`build_rag_prompt`'s prompt: BOS, the chat template's
    beginning, the instruction.

    Chunks are encoded after them by default, because KV that was computed after an instruction is nearer to
    that of a full prefill than KV computed after BOS alone (docs/quality.md). Where a template writes today's
    date, the head has a fixed one, so that keys are the same every day and everywhere.
    """
    return _head_at(FIXED_MOMENT, tokens)


def daily_part(tokens: Tokens) -> int:
    """How many tokens of :func:`prefix_token_ids` are the same every day."""
    head = prefix_token_ids(tokens)
    return min(common_prefix(head, _head_at(moment, tokens)) for moment in _OTHER_MOMENTS)


def _head_at(moment: datetime, tokens: Tokens) -> tuple[int, ...]:
    with bounded(moment):
        rendered = [
            render(build_rag_prompt("?", [text]), tokens, Options()).text for text in ("A", "1")
        ]
    first, second = (tuple(tokens.encode_prompt(text, begins=True).ids) for text in rendered)
    return first[: common_prefix(first, second)]


def render(prompt: Prompt, tokens: Tokens, options: Options, may_be_empty: bool = True) -> Rendered:
    """Render ``prompt``. Raises :class:`InvalidInputError` if it cannot be rendered.

    Messages are fitted to what the chat template accepts (:mod:`blendrag.chat.history`). ``may_be_empty``:
    whether all of them may be without text.
    """
    if isinstance(prompt, Rendered):
        return prompt
    check_tools(tokens, options)
    if isinstance(prompt, str | RagPrompt):
        text = prompt if isinstance(prompt, str) else prompt.text
        if not text.strip():
            raise InvalidInputError("the prompt is empty; ask something")
        check_unicode(text, "the prompt")
        if not (options.apply_chat_template and tokens.has_template):
            return _raw(prompt, text, tokens, options)
        history = prompt.history if isinstance(prompt, RagPrompt) else ()
        messages: Sequence[Mapping[str, Any]] = [*history, {"role": "user", "content": text}]
    elif isinstance(prompt, Sequence) and all(isinstance(m, Mapping) for m in prompt):
        messages = [message for message in prompt if isinstance(message, Mapping)]
    else:
        raise InvalidInputError(
            f"a prompt that is {a_type(prompt)}, expected a text or a list of messages with "
            "role and content; send one of them"
        )
    messages = _with_system(cleaned(messages), options.system)
    _check_messages(messages, tokens)
    if not may_be_empty:
        require_text(messages)
    given = options.template_arguments | ({"tools": list(options.tools)} if options.tools else {})
    only_data, asked = bool(options.plain_messages), None
    if isinstance(prompt, RagPrompt) and prompt.chunks is not None:
        only_data = True
    elif isinstance(prompt, RagPrompt) and not only_data:
        asked = prompt.question
    fit = fitted(messages, tokens, given)
    with bounded():  # the second rendering included
        made = _rendered(fit, given, tokens, only_data, asked)
    if isinstance(prompt, RagPrompt) and prompt.chunks is not None:
        made = _known(made, prompt.text, prompt.chunks)
    made = _opened(made, tokens, options)
    check_unicode(made.text, "the rendered prompt")
    return replace(made, notes=_rendered_twice(messages, tokens))


def _with_system(messages: list[dict[str, Any]], system: str | None) -> list[dict[str, Any]]:
    """``messages`` after a ``system`` message, unless they have one, or there are none."""
    if not system or not messages or any(each["role"] in _SYSTEM_ROLES for each in messages):
        return messages
    return [{"role": "system", "content": system}, *messages]


def _rendered(
    fit: Fitted, given: Mapping[str, Any], tokens: Tokens, only_data: bool, asked: Span | None
) -> Rendered:
    """Messages through the chat template. Spans are those of the messages as they were sent."""
    data = DataPrompt(fit.messages, given, tokens, only_data, asked, fit.arranged)
    try:
        rendered = data.render()
    except Exception as exc:  # jinja errors of many types, raised by the template's checks
        roles = ", ".join(str(message["role"]) for message in fit.messages)
        raise InvalidInputError(
            f"the chat template refuses these messages (roles: {roles}): {exc}"
        ) from exc
    made = _located(rendered.marked, rendered.messages, tokens, rendered.given, fit.arranged)
    return replace(made, text=rendered.text, plain=rendered.lookalikes(tokens))


def _opened(made: Rendered, tokens: Tokens, options: Options) -> Rendered:
    """With the beginning of the answer, in which names of tools are data."""
    if not options.opening:
        return made
    text, begins = made.text + options.opening, len(made.text)
    names = [str(tool.get("function", tool).get("name")) for tool in options.tools]
    spans = [
        (begins + found.start(), begins + found.end())
        for name in names
        for found in re.finditer(re.escape(name), options.opening)
    ]
    return replace(made, text=text, plain=(*made.plain, *lookalikes(text, spans, tokens)))


def lookalikes(text: str, data: Sequence[Span], tokens: Tokens) -> list[Span]:
    """What looks like control tokens in ``data``, which are spans of ``text``."""
    data = merged([span for span in data if span[0] < span[1]])
    return overlapping(tokens.control_spans(text), data) if data else []


def _raw(prompt: str | RagPrompt, text: str, tokens: Tokens, options: Options) -> Rendered:
    """A prompt without a chat template. What the caller rendered is not data."""
    bos = tokens.tokenizer.bos_token if tokens.adds_bos else ""
    bos = "" if text.startswith(bos) else bos
    if options.system and (options.apply_chat_template or isinstance(prompt, RagPrompt)):
        bos += options.system + SEPARATOR
    made = Rendered(f"{bos}{text}{options.opening}")
    turn = (len(bos), len(bos) + len(text))
    if isinstance(prompt, RagPrompt) and prompt.chunks is not None:
        return _known(replace(made, contents=(turn,), turn=turn), text, prompt.chunks)
    if options.plain_messages and not tokens.has_template:
        plain = lookalikes(made.text, [turn], tokens)
        return replace(made, contents=(turn,), turn=turn, plain=tuple(plain))
    if isinstance(prompt, RagPrompt):
        low, high = (at + len(bos) for at in prompt.question)
        data = [(turn[0], low), (high, turn[1])]
        return replace(made, plain=tuple(lookalikes(made.text, data, tokens)))
    return made


def _check_messages(messages: Sequence[Mapping[str, Any]], tokens: Tokens) -> None:
    if not messages:
        raise InvalidOptionError("messages", "is empty; send at least one")
    if not tokens.has_template:
        raise InvalidInputError(
            "this model's tokenizer has no chat template; send a plain string, or set "
            "tokenizer.chat_template"
        )
    for number, message in enumerate(messages):
        if isinstance(message.get("content"), str):
            check_unicode(message["content"], f"message {number}")
        if message.get("tool_calls"):
            check_nested(message["tool_calls"], f"a tool call in message {number}")


def _rendered_twice(messages: Sequence[Mapping[str, Any]], tokens: Tokens) -> tuple[str, ...]:
    """A note if text that was already rendered went through the template again."""
    bos = tokens.tokenizer.bos_token
    if not bos or not any(str(m.get("content")).startswith(bos) for m in messages):
        return ()
    return (
        f"a message begins with {bos}, as if it had already been rendered; send rendered text with "
        "apply_chat_template=False",
    )


def _located(
    rendered: str,
    messages: Sequence[Mapping[str, Any]],
    tokens: Tokens,
    given: Mapping[str, Any],
    arranged: Arrange,
) -> Rendered:
    """With the spans of contents: of messages, and of ``documents`` given to the template."""
    while (word := f"x{secrets.token_hex(8)}x") in rendered:
        pass
    mark = re.compile(f"([{_BEGIN}{_END}]){word}([0-9]+){_CLOSE}")
    changed = partial(
        _rendered_with, messages=messages, tokens=tokens, given=given, arranged=arranged
    )
    marked = changed(lambda i, body: f"{_BEGIN}{word}{i}{_CLOSE}{body}{_END}{word}{i}{_CLOSE}")
    found = _unmarked(marked, rendered, mark) if marked is not None else None
    if found is None:
        documents = given.get("documents")
        count = len(messages) + (len(documents) if isinstance(documents, list) else 0)
        if count <= MAX_COMPARED:
            found = _compared(rendered, f"{_BEGIN}{word}{_CLOSE}", changed, count)
    if found is None:
        return Rendered(rendered)
    last = [i for i, m in enumerate(messages) if m.get("role") == "user"] or [len(messages) - 1]
    turns = [span for number, span in found if number == last[-1]]
    return Rendered(
        rendered,
        tuple(merged([span for _, span in found])),
        turns[-1] if turns else (len(rendered),) * 2,
        replies=tuple(span for n, span in found if _role(messages, n) == "assistant"),
    )


def _role(messages: Sequence[Mapping[str, Any]], number: int) -> Any:
    return messages[number].get("role") if number < len(messages) else None


def _rendered_with(
    change: Change,
    messages: Sequence[Mapping[str, Any]],
    tokens: Tokens,
    given: Mapping[str, Any],
    arranged: Arrange,
) -> str | None:
    """The rendering with each content changed; documents are numbered after messages.

    ``None`` if the template refuses it.
    """

    def made(fields: Mapping[str, Any], names: Sequence[str], number: int) -> dict[str, Any]:
        other = dict(fields)
        for name in names:
            text = other.get(name)
            if isinstance(text, str) and (body := text.strip()):
                other[name] = text.replace(body, change(number, body), 1)
        return other

    documents = given.get("documents")
    if isinstance(documents, list):
        given = {**given, "documents": [
            made(document, tuple(document), len(messages) + i)
            for i, document in enumerate(documents) if isinstance(document, Mapping)
        ]}  # fmt: skip
    try:
        changed = [made(message, ("content",), i) for i, message in enumerate(messages)]
        return tokens.render([dict(message) for message in arranged(changed)], **given)
    except Exception:  # jinja errors of many types, from templates that check contents
        return None


def _unmarked(marked: str, rendered: str, mark: re.Pattern[str]) -> list[tuple[int, Span]] | None:
    """Number and span of each content between its marks.

    ``None`` if the marks changed anything else, or if the template cut off a content and one of its marks.
    """
    if mark.sub("", marked) != rendered:
        return None
    found: list[tuple[int, Span]] = []
    begun = (-1, 0)
    marks = 0
    for each in mark.finditer(marked):
        number, at = int(each[2]), each.start() - marks
        marks += len(each[0])
        if (each[1] == _BEGIN) != (begun[0] < 0) or (each[1] == _END and begun[0] != number):
            return None
        if each[1] == _BEGIN:
            begun = (number, at)
        else:
            found.append((number, (begun[1], at)))
            begun = (-1, 0)
    return found if begun[0] < 0 else None


def _compared(
    rendered: str, word: str, changed: Callable[[Change], str | None], count: int
) -> list[tuple[int, Span]] | None:
    """Number and span of what changes when ``word`` replaces each of ``count`` contents."""
    found = []
    for number in range(count):
        other = changed(lambda i, body, number=number: word if i == number else body)  # type: ignore[misc]
        if other is None:
            return None
        low = common_prefix(rendered, other)
        left = len(rendered) - low
        high = len(rendered) - common_prefix(rendered[::-1][:left], other[::-1])
        if low < high:
            found.append((number, (low, high)))
    return found


def _known(made: Rendered, asked: str, chunks: Sequence[Match]) -> Rendered:
    """With the known chunks of ``asked``; if the template altered it, with the unaltered ones."""
    start, end = made.turn or (0, 0)
    if made.text[start:end] == asked:
        there = [replace(m, start=m.start + start, end=m.end + start) for m in chunks]
        return replace(made, chunks=tuple(there))
    contents = made.contents or ((0, len(made.text)),)
    there = []
    at, end = contents[0][0], contents[-1][1]
    for match in chunks:
        text = asked[match.start : match.end]
        low = made.text.find(text, at, end)
        if low >= 0 and any(a <= low and low + len(text) <= b for a, b in contents):
            at = low + len(text)
            there.append(replace(match, start=low, end=at))
    return replace(made, chunks=tuple(there))


def require_text(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise :class:`InvalidInputError` if no message has text or a tool call. Messages are ``cleaned``."""
    said = [message["content"].strip() or message.get("tool_calls") for message in messages]
    if messages and not any(said):
        empty = "the message is" if len(messages) == 1 else f"all {len(messages)} messages are"
        raise InvalidInputError(f"{empty} empty, expected some text; ask something")


def check_tools(tokens: Tokens, options: Options) -> None:
    """Raise :class:`InvalidOptionError` for tools that the model would not be shown."""
    if not options.tools:
        return
    if not options.apply_chat_template:
        raise InvalidOptionError(
            "tools",
            f"given ({len(options.tools)}) with apply_chat_template=False, but only a chat "
            "template shows them to the model; leave out one of the two",
        )
    if not tokens.has_tools:
        raise InvalidOptionError(
            "tools",
            f"given ({len(options.tools)}) to a model whose chat template does not support tools; "
            "use a model whose template does, or ask for the call in plain text",
        )
    for number, tool in enumerate(options.tools):
        check_nested(tool, f"tools[{number}]")
