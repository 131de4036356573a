"""Which of the known chunks in a user's last message is the question, and is therefore computed."""

from __future__ import annotations

import re
from collections.abc import Sequence

from blendrag.text.matches import Match

#: Longest line that counts as the label of an answer ("Answer:"), in characters.
LABEL_CHARS = 48

#: Longest chunk that can be a question, in characters.
QUESTION_CHARS = 600
#: Longest text that can be an instruction how to answer ("Answer in one sentence."), in characters.
TAIL_CHARS = 120

_QUESTION_MARKS = "?？؟"
_TAGS = re.compile(r"<[^<>]*>|\[[^\[\]]*\]")
_NAME = r"(question|query|q|frage|pregunta|pergunta|domanda|вопрос|问题|問題|質問|질문)"
_LABEL_BEFORE = re.compile(rf"(?<!/)\b{_NAME}[^\n:：]{{0,24}}[:：>][\W_]*$", re.IGNORECASE)
#: Only at the beginning of a line: "Answer the question: be brief" is not a label.
_QUESTION_FOLLOWS = re.compile(
    rf"^[^\w\n/]*((the|your|my|user|user's|new|current|original)\s){{0,2}}{_NAME}"
    r"(\s[^\n:：]{0,24})?[:：>]\W*\w",
    re.IGNORECASE | re.MULTILINE,
)


def without_question(matches: Sequence[Match], text: str, turn: tuple[int, int]) -> list[Match]:
    """``matches`` without those in the user's last ``turn`` that are, or may be, the question."""
    start, end = turn
    inside = [m for m in matches if start <= m.start and m.end <= end]
    outside = [m for m in matches if m not in inside]
    elsewhere = any(not _asks(text[m.start : m.end]) for m in outside)
    is_asked = bool(inside and _QUESTION_FOLLOWS.search(text[start : inside[0].start]))
    questions: list[Match] = []
    for match in reversed(inside):
        before, after = text[start : match.start], text[match.end : end]
        chunk = text[match.start : match.end]
        if elsewhere:
            fresh = not _QUESTION_FOLLOWS.search(after)
        elif questions or is_asked:  # the question may be what follows, or comes before all chunks
            fresh = bool(_LABEL_BEFORE.search(before)) or _is_asked(chunk, after)
        else:
            fresh = is_question(before, chunk, after, others=len(inside) > 1)
        if not fresh:
            break
        questions.append(match)
    return [m for m in matches if m not in questions]


def split_question(
    matches: Sequence[Match], text: str, turn: tuple[int, int]
) -> tuple[list[Match], tuple[str, ...]]:
    """:func:`without_question`, and a note if a chunk that does not look like a question was taken for one
    because of its place."""
    chunks = without_question(matches, text, turn)
    for match in matches:
        if match in chunks or _asks(text[match.start : match.end]):
            continue
        if not _LABEL_BEFORE.search(text[: match.start]):
            return chunks, (
                "the last chunk was computed, as it may be the question; put the question after the chunks, "
                "on a line that begins with Question:, to reuse all of them",
            )
    return chunks, ()


def is_question(before: str, chunk: str, after: str, others: bool) -> bool:
    """Whether the last chunk in the user's last message, between ``before`` and ``after``, is the question.

    It is

    - if it has such a label (``Question:``, ``Query:``);
    - if it is short, ends in a question mark, and no labelled question follows;
    - if no question follows, and it follows other chunks (``others``) or no text at all, unless it is long
      and a labelled question precedes it. After a short chunk, short text without a question mark (``Answer
      in one sentence.``) is not a question; after a long chunk, only the label of an answer (``Answer:``)
      is not.

    An ambiguous chunk is computed, which is correct but slower. Not detected is a question that is a chunk,
    has no question mark and no label, and follows only unknown documents.
    """
    if _LABEL_BEFORE.search(before) or _is_asked(chunk, after):
        return True
    if _QUESTION_FOLLOWS.search(after):
        return False
    if len(chunk) > QUESTION_CHARS and _QUESTION_FOLLOWS.search(before):
        return False
    after = _TAGS.sub("", after).strip()
    ends = not _has_text(after) or (
        len(after) <= LABEL_CHARS and "\n" not in after and after.endswith((":", "："))
    )
    if len(chunk) <= QUESTION_CHARS and len(after) <= TAIL_CHARS:
        ends = ends or not any(mark in after for mark in _QUESTION_MARKS)
    return ends and (others or not _has_text(_TAGS.sub("", before)))


def _is_asked(chunk: str, after: str) -> bool:
    """Whether the chunk is a question and no labelled question follows."""
    tail = re.match(r"[\W_]*", after)
    return _asks(chunk + (tail[0] if tail else "")) and not _QUESTION_FOLLOWS.search(after)


def _asks(chunk: str) -> bool:
    """Whether the chunk is short and ends in a question mark, possibly in quotes."""
    end = re.search(r"[\W_]*$", chunk)
    return len(chunk) <= QUESTION_CHARS and any(
        m in (end[0] if end else "") for m in _QUESTION_MARKS
    )


def _has_text(text: str) -> bool:
    return any(char.isalnum() for char in text)
