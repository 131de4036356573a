"""From a rendered prompt to the document chunks in it.

Owns where chunks are looked for, and which of what is found is the question. Chunks stand inside the
contents of messages, never in or across the template's own text: a document that consists of template markup
must not turn the markup of every prompt into plain text. Where contents are not known (a prompt that the
caller rendered), no match covers a control token.

The question is always computed, also where it is itself a chunk, as in a corpus of frequent questions.
:func:`is_question` says how it is told from a document.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from blendrag.corpus.corpus import Corpus
from blendrag.engine.prompts import Rendered, Span, merged
from blendrag.model.tokens import Tokens
from blendrag.text.matches import Match

#: Longest line taken for a label that an answer is to follow ("Answer:"), in characters.
LABEL_CHARS = 48

#: Longest chunk that may be a question, in characters.
QUESTION_CHARS = 600
#: Longest text that may be no question but say how to answer ("Answer in one sentence."), in characters.
TAIL_CHARS = 120

_QUESTION_MARKS = "?？؟"
_TAGS = re.compile(r"<[^<>]*>|\[[^\[\]]*\]")
_NAME = r"(question|query|q|frage|pregunta|pergunta|domanda|вопрос|问题|問題|質問|질문)"
_LABEL_BEFORE = re.compile(rf"(?<!/)\b{_NAME}[^\n:：]{{0,24}}[:：>][\W_]*$", re.IGNORECASE)
#: At the beginning of a line: "Answer the question: be brief" is no label.
_LABEL_AND_QUESTION = re.compile(
    rf"^[^\w\n/]*((the|your|my|user|user's|new|current|original)\s){{0,2}}{_NAME}"
    r"(\s[^\n:：]{0,24})?[:：>]\W*\w",
    re.IGNORECASE | re.MULTILINE,
)


@dataclass(frozen=True)
class Recognised:
    """What is known of a rendered prompt."""

    chunks: tuple[Match, ...] = ()
    """Document chunks, ascending and disjoint."""
    plain: tuple[Span, ...] = ()
    """Other text whose look-alikes of control tokens stay text; ascending, outside of chunks."""
    notes: tuple[str, ...] = ()


def recognise(corpus: Corpus | None, rendered: Rendered, tokens: Tokens) -> Recognised:
    """The document chunks of ``rendered`` that ``corpus`` has."""
    control = tokens.control_spans(rendered.text)
    if rendered.chunks is not None:
        known = corpus.chunk_index if corpus is not None else ()
        there = tuple(m for m in rendered.chunks if m.chunk_id in known)
        rest = _without(rendered.contents or (), there)
        return Recognised(there, tuple(span for span in rest if _overlaps(span, control)))
    if corpus is None:
        return Recognised()
    text, contents = rendered.text, rendered.contents
    within = _between(control, len(text)) if contents is None else contents
    found = corpus.chunk_index.find(text, within)
    chunks = without_question(found, text, rendered.turn or _last_turn(text, within))
    plain: list[Span] = []
    if contents is not None and any(_overlaps(span, control) for span in contents):
        left = _without(contents, chunks)
        loose = corpus.chunk_index.find(text, left, strict=False)
        maybe = [(m.start, m.end) for m in loose]
        maybe += [_rest(m, text, left) for m in found if not m.complete]
        plain = [span for span in merged(maybe) if _overlaps(span, control)]
    return Recognised(tuple(chunks), tuple(plain), _why_missed(corpus, text, found))


def without_question(matches: Sequence[Match], text: str, turn: Span) -> list[Match]:
    """``matches`` but for those in the user's last ``turn`` that are, or may be, the question itself."""
    start, end = turn
    inside = [m for m in matches if start <= m.start and m.end <= end]
    outside = [m for m in matches if m not in inside]
    elsewhere = any(not _asks(text[m.start : m.end]) for m in outside)
    asked = False
    while inside:
        last = inside[-1]
        before, after = text[start : last.start], text[last.end : end]
        chunk = text[last.start : last.end]
        if elsewhere:
            fresh = not _labelled(after)
        elif asked:  # what follows can be the question
            fresh = bool(_LABEL_BEFORE.search(before)) or _is_asked(chunk, after)
        else:
            fresh = is_question(before, chunk, after, others=len(inside) > 1)
        if not fresh:
            break
        asked = True
        inside.pop()
    return sorted([*outside, *inside], key=lambda m: m.start)


def is_question(before: str, chunk: str, after: str, others: bool) -> bool:
    """Whether the last chunk in the user's last message, between these texts, is what is asked.

    It is

    - if it is labelled so (``Question:``, ``Query:``);
    - if it is short and ends in a question mark, and no labelled question follows;
    - if no question follows, and other chunks stand before it (``others``) or nothing else does. Short
      text without a question mark (``Answer in one sentence.``) is no question behind a short chunk;
      behind a long one only the label of an answer is not (``Answer:``).

    A lone chunk behind an instruction is a document (``Summarise this: …``).

    What stays ambiguous is computed, which is right and costs time: the last document of a prompt that puts
    its documents behind the question. Not noticed is a question without question mark that is a chunk,
    without label, behind documents of which none is known.
    """
    if _LABEL_BEFORE.search(before) or _is_asked(chunk, after):
        return True
    if _labelled(after):
        return False
    after = _TAGS.sub("", after).strip()
    ends = not _has_text(after) or (
        len(after) <= LABEL_CHARS and "\n" not in after and after.endswith((":", "："))
    )
    if len(chunk) <= QUESTION_CHARS and len(after) <= TAIL_CHARS:
        ends = ends or not any(mark in after for mark in _QUESTION_MARKS)
    return ends and (others or not _has_text(_TAGS.sub("", before)))


def _is_asked(chunk: str, after: str) -> bool:
    """Whether a chunk asks, and no labelled question follows it."""
    tail = re.match(r"[\W_]*", after)
    return _asks(chunk + (tail[0] if tail else "")) and not _labelled(after)


def _asks(chunk: str) -> bool:
    """Whether a chunk is short and ends in a question mark, maybe in quotes."""
    end = re.search(r"[\W_]*$", chunk)
    return len(chunk) <= QUESTION_CHARS and any(
        m in (end[0] if end else "") for m in _QUESTION_MARKS
    )


def _labelled(after: str) -> bool:
    """Whether a labelled question follows."""
    return bool(_LABEL_AND_QUESTION.search(after))


def _has_text(text: str) -> bool:
    return any(char.isalnum() for char in text)


def _last_turn(text: str, pieces: Sequence[Span]) -> Span:
    """Of a prompt that the caller rendered: the last piece between control tokens that says more than a
    role's name."""
    said = [span for span in pieces if len(text[slice(*span)].split()) > 1]
    return said[-1] if said else (0, len(text))


def _between(spans: Sequence[Span], size: int) -> list[Span]:
    """What ``spans`` leave of a text."""
    edges = [0, *(edge for span in spans for edge in span), size]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return [(low, high) for low, high in pairs if low < high]


def _without(contents: Sequence[Span], chunks: Sequence[Match]) -> list[Span]:
    """What ``chunks``, each of which is inside one of ``contents``, leave of them."""
    left = []
    for start, end in contents:
        inside = [(m.start - start, m.end - start) for m in chunks if start <= m.start < end]
        left += [(start + low, start + high) for low, high in _between(inside, end - start)]
    return left


def _rest(match: Match, text: str, within: Sequence[Span]) -> Span:
    """What may be the rest of a chunk of which only the beginning was matched: up to a blank line."""
    for low, high in within:
        if low <= match.end < high:
            end = text.find("\n\n", match.end, high)
            return (match.start if low <= match.start else match.end, high if end < 0 else end)
    return (match.end, match.end)


def _overlaps(span: Span, others: Sequence[Span]) -> bool:
    return any(low < span[1] and span[0] < high for low, high in others)


def _why_missed(corpus: Corpus, text: str, found: Sequence[Match]) -> tuple[str, ...]:
    """Sentences for the metrics when nothing was recognised, or less than there is."""
    if not len(corpus):
        return ()
    if corpus.chunk_index.looks_escaped(text, found):
        return (
            "chunk text arrived escaped (as JSON or a Python repr), so not all of it could be recognised; "
            "pass texts, not their representation",
        )
    if found:
        return ()
    return ("no known chunk was recognised in this prompt; it was prefilled normally",)
