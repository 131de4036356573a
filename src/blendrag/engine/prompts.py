"""From messages to a rendered prompt, and where in it the contents of the messages are.

Owns blendrag's own RAG prompt and the template call. A plain string is one user message through the
chat template; ``apply_chat_template=False`` sends it raw, with BOS where the tokenizer adds one.

Contents are found by rendering twice: as asked, and with a mark at both ends of every content. Marks are
inside of outer white space, which templates strip. They are drawn for each request, so no document can
contain them. Where the marked rendering without its marks differs from the first rendering (a template that
looks at how a content begins) or a mark is lost, each content is replaced by a random word in turn: what
changes is the content.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from blendrag.corpus.retriever import RetrievedChunk
from blendrag.engine.options import Options
from blendrag.engine.types import Prompt, RagPrompt
from blendrag.errors import InvalidInputError, check_unicode
from blendrag.model.tokens import Tokens
from blendrag.text.chunking import canonical, chunk_id_of
from blendrag.text.matches import Match, common_prefix

LEADING = "Answer the question from the context.\n\n"
SEPARATOR = "\n\n"

Span = tuple[int, int]

_BEGIN, _END, _CLOSE = "\ue0f0", "\ue0f1", "\ue0f2"  # for private use; a random word follows


@dataclass(frozen=True)
class Rendered:
    """What the model reads. Spans are in characters of ``text``."""

    text: str
    contents: tuple[Span, ...] | None = None
    """Contents of messages, ascending and disjoint; ``None`` where that is not known."""
    turn: Span | None = None
    """Content of the last user message, where that is known."""
    chunks: tuple[Match, ...] | None = None
    """The chunks, where they need not be looked for. All other text in ``contents`` is plain then."""


def rag_prompt(question: str, chunks: Sequence[RetrievedChunk]) -> RagPrompt:
    """blendrag's own prompt over retrieved chunks."""
    return prompt_over(question, [chunk.text for chunk in chunks])


def prompt_over(question: str, texts: Sequence[str]) -> RagPrompt:
    """blendrag's own prompt over the texts of chunks."""
    question = question.strip()
    if not question:
        raise InvalidInputError("the question is empty; ask something")
    matches, at = [], len(LEADING)
    for text in texts:
        chunk = canonical(text)
        start = at + text.index(chunk)
        matches.append(Match(chunk_id_of(chunk), start, start + len(chunk), complete=True))
        at += len(text) + len(SEPARATOR)
    asked = f"{LEADING}{SEPARATOR.join(texts)}{SEPARATOR}Question: {question}"
    end = len(asked)
    return RagPrompt(f"{asked}\nAnswer:", tuple(matches), (end - len(question), end))


def render(prompt: Prompt, tokens: Tokens, options: Options) -> Rendered:
    """The text the model reads. Raises :class:`InvalidInputError` for what cannot be rendered."""
    _check_tools(tokens, options)
    if isinstance(prompt, str | RagPrompt):
        text = prompt if isinstance(prompt, str) else prompt.text
        if not text.strip():
            raise InvalidInputError("the prompt is empty; ask something")
        check_unicode(text, "the prompt")
        if not (options.apply_chat_template and tokens.has_template):
            return _raw(prompt, text, tokens, options)
        messages: Sequence[Mapping[str, Any]] = [{"role": "user", "content": text}]
    elif isinstance(prompt, Sequence) and all(isinstance(m, Mapping) for m in prompt):
        messages = [_flattened(message) for message in prompt if isinstance(message, Mapping)]
    else:
        raise InvalidInputError(
            f"a prompt that is a {type(prompt).__name__}, expected a text or a list of messages with "
            "role and content; send one of them"
        )
    _check_messages(messages, tokens)
    given = dict(options.template) | ({"tools": list(options.tools)} if options.tools else {})
    try:
        rendered = tokens.render([dict(m) for m in messages], **given)
    except Exception as exc:  # jinja errors of many kinds, raised by the template's own checks
        roles = ", ".join(str(m.get("role")) for m in messages)
        raise InvalidInputError(
            f"the chat template refuses these messages (roles: {roles}): {exc}"
        ) from exc
    made = _located(rendered, messages, tokens, given)
    if isinstance(prompt, RagPrompt):
        made = _known(made, prompt.text, prompt.chunks)
    text = made.text + options.opening
    check_unicode(text, "the rendered prompt")
    return replace(made, text=text)


def _raw(prompt: str | RagPrompt, text: str, tokens: Tokens, options: Options) -> Rendered:
    bos = tokens.tokenizer.bos_token if tokens.adds_bos else ""
    bos = "" if text.startswith(bos) else bos
    made = Rendered(f"{bos}{text}{options.opening}")
    if isinstance(prompt, RagPrompt):
        turn = (len(bos), len(bos) + len(text))
        return _known(replace(made, contents=(turn,), turn=turn), text, prompt.chunks)
    return made


def _check_messages(messages: Sequence[Mapping[str, Any]], tokens: Tokens) -> None:
    if not messages:
        raise InvalidInputError("no messages; send at least one")
    if not tokens.has_template:
        raise InvalidInputError(
            "this model's tokenizer has no chat template; send a plain string, or set "
            "tokenizer.chat_template"
        )
    for number, message in enumerate(messages):
        if isinstance(message.get("content"), str):
            check_unicode(message["content"], f"message {number}")


def _located(
    rendered: str,
    messages: Sequence[Mapping[str, Any]],
    tokens: Tokens,
    given: Mapping[str, Any],
) -> Rendered:
    """With the places of contents: of messages, and of ``documents`` that a template takes beside them."""
    word = _absent_word(rendered)
    mark = re.compile(f"([{_BEGIN}{_END}]){word}([0-9]+){_CLOSE}")

    def changed(change: Callable[[int, str], str]) -> str | None:
        try:
            return _rendered_with(change, messages, tokens, given)
        except Exception:  # jinja errors of many kinds: a template that looks closely at contents
            return None

    marked = changed(lambda i, body: f"{_BEGIN}{word}{i}{_CLOSE}{body}{_END}{word}{i}{_CLOSE}")
    found = _unmarked(marked, rendered, mark) if marked is not None else None
    if found is None:
        found = _compared(rendered, f"{_BEGIN}{word}{_CLOSE}", changed)
    if found is None:
        return Rendered(rendered)
    last = [i for i, m in enumerate(messages) if m.get("role") == "user"] or [len(messages) - 1]
    turns = [span for number, span in found if number == last[-1]]
    return Rendered(
        rendered,
        merged([span for _, span in found]),
        turns[-1] if turns else (len(rendered),) * 2,
    )


def _absent_word(text: str) -> str:
    """A random word that is not in ``text``."""
    while (word := f"x{secrets.token_hex(8)}x") in text:
        pass
    return word


def _rendered_with(
    change: Callable[[int, str], str],
    messages: Sequence[Mapping[str, Any]],
    tokens: Tokens,
    given: Mapping[str, Any],
) -> str:
    """The rendering with each content, by its number, changed; documents are numbered behind messages."""

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
    return tokens.render([made(m, ("content",), i) for i, m in enumerate(messages)], **given)


def _unmarked(marked: str, rendered: str, mark: re.Pattern[str]) -> list[tuple[int, Span]] | None:
    """Number and span of each content between its marks.

    ``None`` if the marks changed more than that, or the template has cut a content and one of its marks.
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
    rendered: str, word: str, changed: Callable[[Callable[[int, str], str]], str | None]
) -> list[tuple[int, Span]] | None:
    """Number and span of what each content changes in the rendering when ``word`` replaces it."""
    numbers: set[int] = set()

    def noted(number: int, body: str) -> str:
        numbers.add(number)
        return body

    changed(noted)
    found = []
    for number in sorted(numbers):
        other = changed(lambda i, body, number=number: word if i == number else body)  # type: ignore[misc]
        if other is None:
            return None
        low = common_prefix(rendered, 0, len(rendered), other)
        left = len(rendered) - low
        high = len(rendered) - common_prefix(rendered[::-1], 0, left, other[::-1])
        if low < high:
            found.append((number, (low, high)))
    return found


def merged(spans: Sequence[Span]) -> tuple[Span, ...]:
    """The same places as ascending, disjoint spans."""
    made: list[Span] = []
    for low, high in sorted(spans):
        if made and low < made[-1][1]:
            made[-1] = (made[-1][0], max(high, made[-1][1]))
        else:
            made.append((low, high))
    return tuple(made)


def _known(made: Rendered, asked: str, chunks: Sequence[Match]) -> Rendered:
    """With the chunks of a prompt ``asked`` whose parts are known, and nothing else to be looked for.

    A template may alter the prompt. Then chunks are those that are left as they were. Where it is not even
    known where the prompt is, all of the rendering counts as its text: a document never becomes markup.
    """
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
    return replace(made, contents=contents, chunks=tuple(there))


def refuse_silence(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise :class:`InvalidInputError` where there are messages and none says or calls anything."""
    if messages and not any(_says(m.get("content")) or m.get("tool_calls") for m in messages):
        empty = "the message is" if len(messages) == 1 else f"all {len(messages)} messages are"
        raise InvalidInputError(f"{empty} empty, expected some text; ask something")


def _says(content: Any) -> bool:
    """Whether there is more than white space in it; parts that are no text are :func:`render`'s to refuse."""
    if isinstance(content, str):
        return bool(content.strip())
    if not isinstance(content, list):
        return content is not None
    return any(
        _says(p.get("text") if isinstance(p, Mapping) and "text" in p else p) for p in content
    )


def _check_tools(tokens: Tokens, options: Options) -> None:
    if not options.tools:
        return
    if not options.apply_chat_template:
        raise InvalidInputError(
            f"tools given ({len(options.tools)}) with apply_chat_template=False, which shows them to nobody; "
            "leave out one of the two"
        )
    if not tokens.has_tools:
        raise InvalidInputError(
            f"tools given ({len(options.tools)}) to a model whose chat template knows none; take a model "
            "whose template does, or ask for the call in plain text"
        )


def _flattened(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and part.get("type") == "text":
            texts.append(str(part["text"]))
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise InvalidInputError(
                f"a content part of type {kind!r}, and only text can be read; say it in words or leave "
                "it out"
            )
    return {**message, "content": "".join(texts)}


def explain_bos(prompt: Prompt, tokens: Tokens, options: Options) -> tuple[str, ...]:
    """A sentence for the metrics when text that was rendered before goes through the template again."""
    bos = tokens.tokenizer.bos_token
    if not (bos and options.apply_chat_template and tokens.has_template):
        return ()
    if isinstance(prompt, RagPrompt):
        return ()
    contents = [prompt] if isinstance(prompt, str) else [m.get("content") for m in prompt]
    if not any(isinstance(text, str) and text.startswith(bos) for text in contents):
        return ()
    return (
        f"a message begins with {bos}, as if it had been through a chat template before; send rendered "
        "text with apply_chat_template=False",
    )
