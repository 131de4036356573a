"""Split document text into chunks of at most ``chunk_tokens`` tokens.

Cuts follow paragraphs, then sentences, then words (``semantic-text-splitter``), and in tables rows. A chunk
is an exact substring; one that begins inside a table has the table's header before it. The caller passes a
*text* tokenizer, one for which control tokens are ordinary text.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from blendrag.errors import InvalidInputError, check_unicode
from blendrag.text.tables import Table, tables_of
from blendrag.wording import quoted

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MIN_CHUNK_TOKENS = 64
MAX_CHUNK_TOKENS = 4096

#: The splitter takes quadratic time on text without word boundaries (0.23 of semantic-text-splitter:
#: 4 s for 80,000 CJK characters), so it sees windows of about this many chunks. All but a window's last
#: chunk are kept, and the next window starts at that last one.
WINDOW_CHUNKS = 8
#: Largest number of characters of a chunk per token it may have. Bounds the window where a tokenizer makes
#: one token of any run of characters.
MAX_CHARS_PER_TOKEN = 64
#: First guess of characters per token, replaced by what the text shows.
TYPICAL_CHARS_PER_TOKEN = 4

#: In front of a header whose first cell is empty: a chunk begins without white space.
EMPTY_CELL = '""'
#: Rows whose tokens are counted at a time.
BATCH_ROWS = 1024


class ChunkSpan(NamedTuple):
    """A chunk within a text, and its number of tokens with the ``header`` that comes before it."""

    start: int
    end: int
    tokens: int
    header: str = ""


@dataclass(frozen=True)
class Chunk:
    """``document.text[start:end]``, without white space at either end, after the header of its table if it
    begins inside one.

    Offsets count characters (code points). ``tokens`` is counted without special tokens.
    """

    text: str
    start: int
    end: int
    tokens: int
    chunk_id: str


def canonical(text: str) -> str:
    """The form of a chunk's text that is stored, hashed and searched for in prompts."""
    return text.strip()


def chunk_id_of(text: str) -> str:
    """SHA-256 hex of the canonical text: equal texts are one chunk, wherever they occur."""
    return hashlib.sha256(canonical(text).encode("utf-8")).hexdigest()


#: How the ids of passages begin that were learned from prompts.
_LEARNED_ID = "learned:"


def learned_id(scope: str, text: str) -> str:
    """Id of a passage that was learned from the prompts of ``scope``. Scopes share no passage, and a passage
    is no chunk of a document with the same text."""
    return f"{_LEARNED_ID}{scope}:{chunk_id_of(text)}"


def scope_of(chunk_id: str) -> str | None:
    """Where a passage was learned; ``None`` for a chunk of a document."""
    if not chunk_id.startswith(_LEARNED_ID):
        return None
    return chunk_id.removeprefix(_LEARNED_ID).partition(":")[0]


class Chunker:
    """Splits texts for one tokenizer and one limit."""

    def __init__(self, tokenizer: Tokenizer, chunk_tokens: int) -> None:
        from semantic_text_splitter import TextSplitter

        is_number = isinstance(chunk_tokens, int)
        if not is_number or not MIN_CHUNK_TOKENS <= chunk_tokens <= MAX_CHUNK_TOKENS:
            raise InvalidInputError(
                f"chunk_tokens is {quoted(chunk_tokens)}, expected a whole number, {MIN_CHUNK_TOKENS} to "
                f"{MAX_CHUNK_TOKENS}; 512 suits most corpora"
            )
        self.chunk_tokens = chunk_tokens
        self._tokenizer = uncapped(tokenizer)
        self._splitter = TextSplitter.from_huggingface_tokenizer(self._tokenizer, chunk_tokens)

    def count(self, text: str) -> int:
        """Tokens of ``text`` without special tokens."""
        check_unicode(text, "the text")
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def split(self, text: str, source: str = "", repeat_headers: bool = True) -> list[Chunk]:
        """Chunks of ``text`` in order, without the white space between them, in linear time.

        ``source``: name of the document, whose suffix tells CSV. ``repeat_headers``: cut tables between rows,
        and repeat their headers; ``False`` gives exact substrings. Raises :class:`InvalidInputError` for
        values other than valid Unicode strings.
        """
        check_unicode(text, "the text")
        tables = tables_of(text, source) if repeat_headers else []
        chunks = []
        for start, end, tokens, header in self._spans(text, tables):
            chunk = header + text[start:end]
            chunks.append(Chunk(chunk, start, end, tokens, chunk_id_of(chunk)))
        return chunks

    def _spans(self, text: str, tables: Sequence[Table]) -> Iterator[ChunkSpan]:
        """Spans of the whole text, window by window. A table that would be cut is cut by its rows."""
        largest = self.chunk_tokens * MAX_CHARS_PER_TOKEN
        window = self.chunk_tokens * TYPICAL_CHARS_PER_TOKEN * WINDOW_CHUNKS
        start = 0
        held: ChunkSpan | None = None
        while start < len(text):
            # A window starts at text, never inside white space.
            start, _ = _stripped(text, start, min(start + largest, len(text)))
            end = min(start + window, len(text))
            spans = self._window_spans(text, start, end)
            is_last = end == len(text)
            # One chunk or none: the window was too small to tell, unless it is the largest.
            if not is_last and len(spans) < 2 and window < largest:
                window = min(2 * window, largest)
                continue
            # The last chunk ends where the window happens to end: cut it again.
            keep = spans if is_last else spans[:-1] or spans
            for span in keep:
                if (table := _cut_by(span, tables)) is not None:
                    begin = min(span.start, table.start)
                    if held is not None and begin == table.start:
                        begin = self._lead(text, held)
                        yield from self._within_limit(text, held.start, begin)
                    else:
                        yield from filter(None, [held])
                    yield from self._rows(text, table, begin)
                    start, held = table.end, None
                    break
                yield from filter(None, [held])
                held = span
            else:
                start = spans[-1].start if len(spans) > 1 and not is_last else end
            chars = (keep[-1][1] - keep[0][0]) // len(keep) if keep else largest
            window = max(self.chunk_tokens, min(WINDOW_CHUNKS * chars, largest))
        yield from filter(None, [held])

    def _lead(self, text: str, held: ChunkSpan) -> int:
        """Where in the chunk before a table that begins which belongs to the table, such as its heading."""
        if held.tokens <= self.chunk_tokens // 2:
            return held.start
        last = text.rfind("\n\n", held.start, held.end)
        is_short = last >= 0 and self.count(text[last : held.end]) <= self.chunk_tokens // 4
        return last if is_short else held.end

    def _rows(self, text: str, table: Table, begin: int) -> Iterator[ChunkSpan]:
        """Chunks of a table, the first with what precedes it from ``begin`` on."""
        header = table.header + "\n" if table.header else ""
        if self.count(header) > self.chunk_tokens // 2:
            yield from self._within_limit(text, begin, table.rows[0], at=table.delimiter)
            for row, end in table.spans():
                yield from self._columns(text, table, row, end)
            return
        before = ""
        if self.count(text[begin : next(table.spans())[1]]) > self.chunk_tokens:
            yield from self._within_limit(text, begin, table.start)
            begin = table.start
        if begin == table.start and header.startswith("\t"):
            before = EMPTY_CELL + header[: len(header) - len(header.lstrip())]
        elif header[:1].isspace():
            header = header.lstrip(" ")
        header = EMPTY_CELL * header.startswith("\t") + header
        ends = [end for _, end in table.spans()]
        tokens = list(accumulate(self._row_tokens(text, table), initial=0))
        row = 0
        while row < len(ends):
            room = self.chunk_tokens - self.count(before + text[begin : table.rows[row]])
            last = bisect_right(tokens, tokens[row] + room) - 1  # rows before it fit
            while (
                last > row and self.count(before + text[begin : ends[last - 1]]) > self.chunk_tokens
            ):
                last -= 1
            if last <= row:  # a row that is longer than a chunk
                yield from self._within_limit(text, begin, table.rows[row])
                yield from self._columns(text, table, table.rows[row], ends[row])
                last = row + 1
            else:
                if last < len(ends):
                    last = _best_cut(text, table.rows, row, last)
                yield from self._within_limit(text, begin, ends[last - 1], before)
            row, before, begin = last, header, ends[last - 1]

    def _columns(self, text: str, table: Table, start: int, end: int) -> Iterator[ChunkSpan]:
        """A row in pieces, each with the names of its own columns before it."""
        cells = list(table.cells(text, start, end))
        names = list(table.cells(table.header.split("\n")[0], 0))
        at = 0
        while at < len(cells):
            most = len(cells) - at
            while True:
                head = _joined(table.header, names[at : at + most])
                used = self.count(head + text[cells[at][0] : cells[at + most - 1][1]])
                if used <= self.chunk_tokens or most == 1:
                    break
                most = max(1, min(most - 1, most * self.chunk_tokens // used))
            if self.count(head) > self.chunk_tokens // 2 and used > self.chunk_tokens:
                head = ""
            yield from self._within_limit(text, cells[at][0], cells[at + most - 1][1], head)
            at += most

    def _row_tokens(self, text: str, table: Table) -> Iterator[int]:
        rows = [text[start:end] for start, end in table.spans()]
        for at in range(0, len(rows), BATCH_ROWS):
            batch = rows[at : at + BATCH_ROWS]
            for encoding in self._tokenizer.encode_batch(batch, add_special_tokens=False):
                yield len(encoding.ids)

    def _window_spans(self, text: str, start: int, end: int) -> list[ChunkSpan]:
        """Chunks of ``text[start:end]``, each within the limit."""
        return [
            span
            for offset, piece in self._splitter.chunk_indices(text[start:end])
            for span in self._within_limit(text, start + offset, start + offset + len(piece))
        ]

    def _within_limit(
        self, text: str, start: int, end: int, header: str = "", at: str = " "
    ) -> list[ChunkSpan]:
        """A piece as a span, stripped as Python strips; cut near the middle, after ``at``, if it is too long.

        The splitter works on a copy without ``encode_special_tokens``, so it counts a control token as one
        token, and stripping may add tokens.
        """
        begin = start
        start, end = _stripped(text, start, end)
        if header and start < end:
            start = begin  # a row may begin with an empty cell
        if end - start <= self.chunk_tokens * MAX_CHARS_PER_TOKEN:
            tokens = self.count(header + text[start:end])
            if tokens <= self.chunk_tokens:
                return [ChunkSpan(start, end, tokens, header)] if start < end else []
        middle = (start + end) // 2
        found = text.rfind(at, start + 1, middle - 1)
        middle = middle if found < 0 else found + 1
        left = self._within_limit(text, start, middle, header, at)
        return left + self._within_limit(text, middle, end, header, at)


def _cut_by(span: ChunkSpan, tables: Sequence[Table]) -> Table | None:
    """The table that this chunk would begin and not end."""
    number = bisect_right(tables, span.end - 1, key=lambda table: table.start) - 1
    if number >= 0 and span.start <= tables[number].start and span.end < tables[number].end:
        return tables[number]
    return None


def _joined(header: str, names: Sequence[tuple[int, int]]) -> str:
    """These names of columns as they are in the header, with a line end."""
    return header[names[0][0] : names[-1][1]].strip(" ") + "\n" if names else ""


_CELL = re.compile(r"[^,;\t|]*[^,;\t|\s][^,;\t|]*")


def _best_cut(text: str, rows: Sequence[int], row: int, last: int) -> int:
    """Where to end a chunk of rows that may end at ``last``: in its second half, before the row whose first
    cell has the smallest hash. So a row that is changed, added or removed leaves chunks further on as they
    are."""

    def weight(number: int) -> tuple[int, int]:
        cell = _CELL.search(text, rows[number], min(rows[number] + 256, len(text)))
        return crc32((cell[0] if cell else "").encode("utf-8", "replace")), -number

    return min(range(row + (last - row + 1) // 2 + 1, last + 1), key=weight, default=last)


def _stripped(text: str, start: int, end: int) -> tuple[int, int]:
    body = text[start:end].lstrip()
    start = end - len(body)
    return start, start + len(body.rstrip())


def uncapped(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer, or a copy without truncation and padding, which would miscount."""
    is_capped = tokenizer.truncation is not None or tokenizer.padding is not None
    return uncapped_copy(tokenizer) if is_capped else tokenizer


def uncapped_copy(tokenizer: Tokenizer) -> Tokenizer:
    """A copy without truncation and padding, which nobody else changes."""
    copy = type(tokenizer).from_str(tokenizer.to_str())
    copy.encode_special_tokens = tokenizer.encode_special_tokens
    copy.no_truncation()
    copy.no_padding()
    return copy
