"""Find passages that return: what a prompt has in common with earlier ones, cut into chunks.

1. Of each prompt, keep the text and the hashes of some windows of 32 characters. The hash itself decides
   which (about every eighth), so that equal texts keep equal windows.
2. Where a window of a new prompt is known, extend the match to both sides as far as the texts agree. Such a
   *run* ends where the neighbours differ.
3. Cut it back to where a line, a sentence or a value of JSON or XML begins and ends in both prompts. So
   nobody finds out another's text by guessing it word by word: a guess has nothing in common with it until
   a sentence is whole.
4. Cut runs at blank lines, rules (``-----``), labels (``Context:``, ``[2]``) and after unwrapped lines, so
   that retrieved texts that happened to follow each other twice are told apart. Join short paragraphs of
   one run.

Everything is linear in the length of the prompt, and kept in memory only.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from blendrag.text.matches import Match, common_prefix, letters_in
from blendrag.text.recognition import U64, PrefixSums

CharRange = tuple[int, int]

#: Characters of recent prompts that are kept.
MEMORY_CHARS = 4_000_000
WINDOW = 32
#: One window in so many is kept.
SAMPLED = 8
#: Letters of the shortest passage, about 25 tokens.
MIN_LETTERS = 80
#: A paragraph is joined to a passage of fewer characters.
JOINED_CHARS = 120
#: Overlapping matches are compared within runs of fewer characters.
COMPARED_CHARS = 400
#: A line of so many characters is a paragraph of its own.
UNWRAPPED_CHARS = 200

_RULE = r"[ \t]*(?:([-=*_#~])\1{2,}[ \t]*)?"
_LABEL = r"(?:context|documents?|passages?|sources?|information)\b[^\n:]{0,24}:|[\[(]\d{1,3}[\])]"
#: What is between passages: a blank line or a rule, a label at the beginning of a line or paragraph.
_BREAK = re.compile(
    rf"^(?:{_RULE}(?=\n|\Z)|{_LABEL})|(?<=[^\n]{{{UNWRAPPED_CHARS}}})\n",
    re.IGNORECASE | re.MULTILINE,
)
#: Before the first character of a line, a sentence or a value of JSON or XML.
_OPENS = r"""\n|[.!?…]["'”’)\]]*\s+|[。！？]|>\s*|[)\]]\s+|[:,=(\[{]\s*["']"""
_OPEN = re.compile(_OPENS)
_OPENED = re.compile(rf"(?:\A|{_OPENS})\Z")
#: After the last one: the sentence's end, and what follows where a line or a value ends.
_ENDED = re.compile(r"""[.!?…。！？]["'”’)\]]*\Z""")
_CLOSING = r"""\n|\s*<|["']\s*[,\])}:]"""
_CLOSED = re.compile(rf"\Z|{_CLOSING}")
_CLOSE = re.compile(rf"""(?={_CLOSING})|(?<=[.!?…])["'”’)\]]*(?=\s)|(?<=[。！？])""")
#: Characters around the end of a run that tell whether it is one of these.
_AROUND = 16
_END_LABEL = re.compile(r"\n[^\n:]{1,48}:\s*$")
#: Between the pieces of a prompt in the memory.
_GAP = "\0"


@dataclass(frozen=True)
class FreshText:
    """The text of a prompt that is in no known chunk. Spans are in characters of ``text``."""

    text: str
    spans: tuple[CharRange, ...]
    """Searched, outside of known chunks; without what the model wrote."""
    chunks: tuple[Match, ...]
    """The known chunks in ``text``."""
    turn: CharRange
    """The last user message."""
    control: tuple[CharRange, ...]
    """What is or looks like control tokens."""


class CommonText(NamedTuple):
    """``text[start:end]`` of a prompt is also in an earlier one."""

    start: int
    end: int
    begins_prompts: bool
    """Whether both prompts begin with it."""
    ends_parts: bool = False
    """Whether a searched part ends with it in both."""
    opens: bool = True
    """Whether a line, a sentence or a value begins with it in both."""
    closes: bool = True
    """Whether one ends with it in both."""

    @property
    def chars(self) -> int:
        return self.end - self.start


def _add(text: str, runs: list[CommonText], run: CommonText) -> None:
    """Add a run to those before it. What two of them share goes to the later one from the last line break on,
    else to the longer one."""
    while runs and run.start <= runs[-1].start and run.chars > runs[-1].chars:
        runs.pop()
    if runs and run.start < runs[-1].end:
        last = runs[-1]
        cut = text.rfind("\n", max(run.start, last.start), min(run.end, last.end)) + 1
        at_line = cut > 0
        cut = cut or (run.start if run.chars > last.chars else last.end)
        runs[-1] = last._replace(end=cut, closes=last.closes if cut == last.end else at_line)
        run = run._replace(start=cut, opens=run.opens if cut == run.start else at_line)
    if run.chars > 0:
        runs.append(run)


class PromptMemory:
    """The texts of recent prompts. Not thread-safe."""

    def __init__(self, max_chars: int = MEMORY_CHARS) -> None:
        self._max_chars = max_chars
        self._texts: deque[str] = deque()
        self._first = 0
        """Number of the oldest text."""
        self._chars = 0
        self._hashes = np.zeros(0, U64)  # sorted
        self._places = np.zeros(0, np.int64)  # number of the text << 32 | start of the window

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def chars(self) -> int:
        return self._chars

    def meet(self, text: str, within: Sequence[CharRange]) -> list[CommonText]:
        """Runs in these parts of ``text``, ascending and disjoint; then remember the parts.

        ``within``: ascending and disjoint. A run lies in one of them.
        """
        parts = [text[low:high] for low, high in within]
        whole = _GAP.join(parts)
        if len(whole) < WINDOW or len(whole) > self._max_chars:
            return []
        windows = PrefixSums(whole).windows(WINDOW)
        starts = np.flatnonzero(windows % U64(SAMPLED) == 0)
        hashes = windows[starts]
        runs: list[CommonText] = []
        at = part = 0  # where the current part begins in ``whole``
        for start, place in zip(*self._known(hashes, starts), strict=True):
            while start >= at + len(parts[part]) + 1:
                at += len(parts[part]) + 1
                part += 1
            shift = within[part][0] - at
            if runs and start + shift < runs[-1].end and runs[-1].chars >= COMPARED_CHARS:
                continue
            run = self._extended(whole, start, at, at + len(parts[part]), place)
            if run is not None:
                moved = run._replace(start=run.start + shift, end=run.end + shift)
                _add(text, runs, moved)
        self._remember(whole, hashes, starts)
        return runs

    def _known(self, hashes: np.ndarray, starts: np.ndarray) -> tuple[list[int], list[int]]:
        """The starts of windows that are known, and the latest place of each."""
        if not len(self._hashes):
            return [], []
        latest = np.searchsorted(self._hashes, hashes, "right") - 1
        known = (latest >= 0) & (self._hashes[latest] == hashes)
        return starts[known].tolist(), self._places[latest[known]].tolist()

    def _extended(
        self, text: str, start: int, low: int, high: int, place: int
    ) -> CommonText | None:
        """The run in ``text[low:high]`` around a window that is also at ``place``."""
        old, at = self._texts[(place >> 32) - self._first], place & 0xFFFFFFFF
        after = common_prefix(text[start:high], old[at : at + high - start])
        if after < WINDOW:  # another text with the same hash
            return None
        room = min(start - low, at)
        back = common_prefix(text[start - room : start][::-1], old[at - room : at][::-1])
        gap = old.rfind(_GAP, at - back, at)
        back = at - gap - 1 if gap >= 0 else back
        begins = start - back == 0 and at - back == 0
        ends = start + after == high and old[at + after : at + after + 1] in ("", _GAP)
        here = _edges(text, start - back, start + after, low, high)
        earlier = _edges(old, at - back, at + after, 0, len(old))
        opens, closes = here[0] and earlier[0], here[1] and earlier[1]
        return CommonText(start - back, start + after, begins, ends, opens, closes)

    def _remember(self, text: str, hashes: np.ndarray, starts: np.ndarray) -> None:
        place = (self._first + len(self._texts) << 32) | starts
        order = np.argsort(hashes, kind="stable")
        at = np.searchsorted(self._hashes, hashes[order], "right")
        self._hashes = np.insert(self._hashes, at, hashes[order])
        self._places = np.insert(self._places, at, place[order])
        self._texts.append(text)
        self._chars += len(text)
        while self._chars > self._max_chars:
            self.forget_oldest()

    def forget_oldest(self) -> None:
        """Forget the text that was met first."""
        self._chars -= len(self._texts.popleft())
        self._first += 1
        kept = self._places >> 32 >= self._first
        self._hashes, self._places = self._hashes[kept], self._places[kept]


class PromptMemories:
    """The texts of recent prompts, apart for each scope. Not thread-safe.

    Together they take as much as one :class:`PromptMemory`; the largest forgets first.
    """

    def __init__(self, max_chars: int = MEMORY_CHARS) -> None:
        self._max_chars = max_chars
        self._of: dict[str, PromptMemory] = {}

    def meet(self, scope: str, text: str, within: Sequence[CharRange]) -> list[CommonText]:
        """See :meth:`PromptMemory.meet`: runs that an earlier prompt of the same scope has, too."""
        memory = self._of.setdefault(scope, PromptMemory(self._max_chars))
        runs = memory.meet(text, within)
        while sum(each.chars for each in self._of.values()) > self._max_chars:
            max(self._of.values(), key=lambda each: each.chars).forget_oldest()
        self._of = {name: each for name, each in self._of.items() if len(each)}
        return runs


def _edges(text: str, start: int, end: int, low: int, high: int) -> tuple[bool, bool]:
    """Whether a line, a sentence or a value begins at ``start``, and one ends at ``end``, within
    ``text[low:high]``."""
    before = text[max(low, start - _AROUND) : start]
    before = before[before.rfind(_GAP) + 1 :] if _GAP in before else before
    opens = start == low or not before or _OPENED.search(before) is not None
    after = text[end : min(high, end + _AROUND)].partition(_GAP)[0]
    ended = _ENDED.search(text, max(start, end - _AROUND), end) is not None
    closes = _CLOSED.match(after) is not None or (ended and after[0].isspace())
    return opens, closes


def paragraphs(text: str, run: CommonText) -> list[CharRange]:
    """The paragraphs of a run, without labels and without short remains of paragraphs that the run cuts.

    The paragraph that begins both prompts is their instruction, which is reused as an exact prefix; it is
    left out.
    """
    low, end = _whole(text, run)
    spans, is_instruction = [], run.begins_prompts
    for cut in _BREAK.finditer(text, low, end):
        if not is_instruction:
            spans.append(_stripped(text, low, cut.start()))
        is_instruction &= cut[0] == "\n"  # a long line, not the end of a paragraph
        low = cut.end()
    if not is_instruction:
        low, last = _stripped(text, low, end)
        label = _END_LABEL.search(text, low, last)
        spans.append((low, label.start() if label else last))
    return [span for span in spans if _is_long(text, span) or _is_whole(text, span)]


def joined(text: str, spans: Sequence[CharRange], runs: Sequence[CommonText]) -> list[CharRange]:
    """Passages of whole paragraphs. A short paragraph is joined to a short passage or ends a long one, if
    only white space is between them and no run begins there: a heading that ends a retrieved text is not
    joined to the text that happens to follow."""
    passages: list[CharRange] = []
    is_ended = False
    starts = [run.start for run in runs]
    for low, high in spans:
        begins_run = passages and bisect_right(starts, low) > bisect_right(starts, passages[-1][0])
        if passages and not begins_run and not text[passages[-1][1] : low].strip():
            start, end = passages[-1]
            ends = not is_ended and text[high - 1] in ".!?" and not _is_long(text, (low, high))
            if end - start < JOINED_CHARS or ends:
                passages[-1], is_ended = (start, high), end - start >= JOINED_CHARS
                continue
        passages.append((low, high))
        is_ended = False
    return [span for span in passages if _is_long(text, span)]


def _whole(text: str, run: CommonText) -> CharRange:
    """The lines, sentences and values that the run holds whole; an empty span if it holds none."""
    low, high = run.start, run.end
    if not run.opens:
        first = _OPEN.search(text, low, high)
        low = high if first is None else first.end()
    if not run.closes:
        high = max((each.end() for each in _CLOSE.finditer(text, low, high)), default=low)
    return low, max(low, high)


def _stripped(text: str, low: int, high: int) -> CharRange:
    piece = text[low:high]
    low += len(piece) - len(piece.lstrip())
    return low, low + len(piece.strip())


def _is_long(text: str, span: CharRange) -> bool:
    return letters_in(text[slice(*span)]) >= MIN_LETTERS


def _is_whole(text: str, span: CharRange) -> bool:
    """Whether it is not empty and nothing but a label shares its lines."""
    begin, end = text.rfind("\n", 0, span[0]) + 1, text.find("\n", span[1])
    before, after = text[begin : span[0]].strip(), text[span[1] : end if end >= 0 else None]
    is_alone = not before or re.fullmatch(_LABEL, before, re.IGNORECASE) is not None
    return span[0] < span[1] and is_alone and not after.strip()
