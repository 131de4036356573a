"""Split document text into chunks of at most ``chunk_tokens`` tokens.

1. Sections, or definitions of source code (:mod:`blendrag.text.outline`), are kept whole and packed into
   chunks, which end before the most important heading after their first third.
2. What is longer than a chunk is cut at paragraphs, then sentences, then words (``semantic-text-splitter``),
   and tables between rows.
3. A piece that is too small to say anything is joined to its neighbour, or balanced with it.

A chunk ends with an exact substring of the text. Before it are the headings of what it is part of, as in
``Guide > Install > Windows``; for code the name of the file and the lines of the enclosing definitions; and
for rows the header of their table. The caller passes a *text* tokenizer, one for which control tokens are
ordinary text.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from blendrag.errors import InvalidInputError, check_unicode
from blendrag.text.outline import Leaf, Outline, outline_of
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

#: What encloses a chunk takes at most this share of it; the outermost is left out first.
PATH_SHARE = 1 / 4
#: A piece of less than this share of a chunk is joined to its neighbour.
CRUMB_SHARE = 1 / 8
#: Columns of indentation that the first line of a chunk keeps below what encloses it.
INDENT_CHARS = 64

#: In front of a header whose first cell is empty: a chunk begins without white space.
EMPTY_CELL = '""'
#: Two texts take at most about so many tokens more or fewer together than apart.
MERGED_TOKENS = 2
#: Rows whose tokens are counted at a time.
BATCH_ROWS = 1024


#: Changes whenever documents are cut in another way, so that the next ingest cuts them again.
CHUNKING_REVISION = 2


class ChunkSpan(NamedTuple):
    """A chunk within a text, and its number of tokens with the ``header`` that comes before it."""

    start: int
    end: int
    tokens: int
    header: str = ""
    is_rows: bool = False
    """Whether it begins inside a table."""


@dataclass(frozen=True)
class Chunk:
    """``document.text[start:end]``, without white space at either end, after what encloses it: headings,
    lines of definitions, or the header of a table.

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
        is_number = isinstance(chunk_tokens, int)
        if not is_number or not MIN_CHUNK_TOKENS <= chunk_tokens <= MAX_CHUNK_TOKENS:
            raise InvalidInputError(
                f"chunk_tokens is {quoted(chunk_tokens)}, expected a whole number, {MIN_CHUNK_TOKENS} to "
                f"{MAX_CHUNK_TOKENS}; 512 suits most corpora"
            )
        self.chunk_tokens = chunk_tokens
        self._crumb_tokens = int(CRUMB_SHARE * chunk_tokens)
        self._tokenizer = uncapped(tokenizer)

    def count(self, text: str) -> int:
        """Tokens of ``text`` without special tokens."""
        check_unicode(text, "the text")
        return self._count(text)

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def split(self, text: str, source: str = "", with_context: bool = True) -> list[Chunk]:
        """Chunks of ``text`` in order, without the white space between them, in linear time.

        ``source``: name of the document, whose suffix tells its kind. ``with_context``: follow the outline of
        the text and its tables, and repeat headings and headers; ``False`` gives exact substrings. Raises
        :class:`InvalidInputError` for values other than valid Unicode strings.
        """
        check_unicode(text, "the text")
        tables = tables_of(text, source) if with_context else []
        place = _Place(self, text, outline_of(text, source) if with_context else Outline())
        spans = self._without_crumbs(place, list(self._packed(place, tables)))
        chunks = []
        for start, end, tokens, header, _ in spans:
            chunk = header + text[start:end]
            chunks.append(Chunk(chunk, start, end, tokens, chunk_id_of(chunk)))
        return chunks

    # -- sections -------------------------------------------------------------------------------------

    def _packed(self, place: _Place, tables: Sequence[Table]) -> Iterator[ChunkSpan]:
        """Sections that fit together in one chunk; the pieces of a section that does not fit in one."""
        text, leaves = place.text, place.leaves
        tokens = list(accumulate(self._leaf_tokens(text, leaves), initial=0))
        first = 0
        while first < len(leaves):
            room = self.chunk_tokens - self._count(place.header(leaves[first].start))
            last = bisect_right(tokens, tokens[first] + room) - 1  # leaves before it fit
            if first < last < len(leaves):
                last = _best_heading(leaves, tokens, first, last)
            while last > first:
                span = self._span(place, leaves[first].start, leaves[last - 1].end)
                if span is None or span.tokens <= self.chunk_tokens:
                    break
                last -= 1
            is_lead = last < len(leaves) and tokens[last] - tokens[first] < self._crumb_tokens
            if last > first and not is_lead:
                yield from filter(None, [span])
            else:
                last = min(last + 1, len(leaves))
                yield from self._spans(place, leaves[first:last], tables)
            first = last

    def _leaf_tokens(self, text: str, leaves: Sequence[Leaf]) -> Iterator[int]:
        largest = self.chunk_tokens * MAX_CHARS_PER_TOKEN
        for at in range(0, len(leaves), BATCH_ROWS):
            batch = [
                text[leaf.start : min(leaf.end, leaf.start + largest)]
                for leaf in leaves[at:][:BATCH_ROWS]
            ]
            encoded = self._tokenizer.encode_batch(batch, add_special_tokens=False)
            for piece, encoding in zip(batch, encoded, strict=True):
                yield max(len(encoding.ids), len(piece) // MAX_CHARS_PER_TOKEN, 1)

    def _span(self, place: _Place, start: int, end: int) -> ChunkSpan | None:
        """``text[start:end]`` without the white space around it and after what encloses it; ``None`` if there
        is no other text."""
        begin = start
        start, end = _stripped(place.text, start, end)
        if start == end:
            return None
        header = place.header(start)
        if header:
            start = _line_start(place.text, start, begin)
        return ChunkSpan(start, end, self._count(header + place.text[start:end]), header)

    def _without_crumbs(self, place: _Place, spans: Sequence[ChunkSpan]) -> list[ChunkSpan]:
        """Join each small piece to a neighbour that has room for it; else balance the two."""
        made: list[ChunkSpan] = []
        for span in spans:
            made.append(span)
            if len(made) > 1 and (self._is_crumb(made[-2]) or self._is_crumb(span)):
                made[-2:] = self._joined(place, made[-2], span)
        for at in range(len(made)):
            if len(made) > 1 and self._is_crumb(made[at]):
                pair = slice(at - 1, at + 1) if at else slice(0, 2)
                made[pair] = self._balanced(place, *made[pair])
        return made

    def _is_crumb(self, span: ChunkSpan) -> bool:
        at_most = self.chunk_tokens * (PATH_SHARE + CRUMB_SHARE)
        if span.is_rows or span.tokens > at_most:
            return False
        return span.tokens - self._count(span.header) < self._crumb_tokens

    def _joined(self, place: _Place, first: ChunkSpan, second: ChunkSpan) -> list[ChunkSpan]:
        """One chunk if it is within the limit."""
        own_tokens = second.tokens - self._count(second.header)
        if not second.is_rows and first.tokens + own_tokens <= self.chunk_tokens + MERGED_TOKENS:
            tokens = self._count(first.header + place.text[first.start : second.end])
            if tokens <= self.chunk_tokens:
                return [first._replace(end=second.end, tokens=tokens)]
        return [first, second]

    def _balanced(self, place: _Place, first: ChunkSpan, second: ChunkSpan) -> list[ChunkSpan]:
        """Two chunks of similar size. Whole definitions stay whole."""
        if first.is_rows or second.is_rows:
            return [first, second]
        cut = place.middle(first.start, second.end, whole=second.start)
        parts = [self._span(place, first.start, cut), self._span(place, cut, second.end)]
        made = [part for part in parts if part is not None and part.tokens <= self.chunk_tokens]
        return made if len(made) == 2 else [first, second]

    # -- what is longer than a chunk ------------------------------------------------------------------

    def _spans(
        self, place: _Place, leaves: Sequence[Leaf], tables: Sequence[Table]
    ) -> Iterator[ChunkSpan]:
        """Spans of these leaves, window by window. A table that would be cut is cut by its rows."""
        text, start, high = place.text, leaves[0].start, leaves[-1].end
        headers = [place.header(at) for leaf in leaves for at in (leaf.start, leaf.end - 1)]
        header_tokens = max(map(self._count, headers))
        room = self.chunk_tokens - header_tokens - MERGED_TOKENS * bool(header_tokens)
        largest = self.chunk_tokens * MAX_CHARS_PER_TOKEN
        window = self.chunk_tokens * TYPICAL_CHARS_PER_TOKEN * WINDOW_CHUNKS
        held: ChunkSpan | None = None
        while start < high:
            # A window starts at text, never inside white space.
            start, _ = _stripped(text, start, min(start + largest, high))
            end = min(start + window, high)
            spans = self._window_spans(place, start, end, room, leaves[0].start)
            is_last = end == high
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
                        yield from self._within_limit(text, held.start, begin, held.header)
                    else:
                        yield from filter(None, [held])
                    yield from self._rows(place, table, begin)
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
        is_short = last >= 0 and self._count(text[last : held.end]) <= self.chunk_tokens // 4
        return last if is_short else held.end

    def _rows(self, place: _Place, table: Table, begin: int) -> Iterator[ChunkSpan]:
        """Chunks of a table, the first with what precedes it from ``begin`` on."""
        text, path, before = place.text, place.header(table.rows[0]), place.header(begin)
        header = table.header + "\n" if table.header else ""
        if self._count(header) > self.chunk_tokens // 2:
            yield from self._within_limit(text, begin, table.rows[0], before, at=table.delimiter)
            for row, end in table.spans():
                yield from self._columns(text, table, row, end, path)
            return
        if self._count(before + text[begin : next(table.spans())[1]]) > self.chunk_tokens:
            yield from self._within_limit(text, begin, table.start, before)
            begin = table.start
            before = place.header(begin)
        if not before and begin == table.start and header.startswith("\t"):
            before = EMPTY_CELL + header[: len(header) - len(header.lstrip())]
        elif header[:1].isspace():
            header = header.lstrip(" ")
        header = path + EMPTY_CELL * header.startswith("\t") + header
        ends = [end for _, end in table.spans()]
        tokens = list(accumulate(self._row_tokens(text, table), initial=0))
        row = 0
        while row < len(ends):
            room = self.chunk_tokens - self._count(before + text[begin : table.rows[row]])
            last = bisect_right(tokens, tokens[row] + room) - 1  # rows before it fit
            while (
                last > row
                and self._count(before + text[begin : ends[last - 1]]) > self.chunk_tokens
            ):
                last -= 1
            if last <= row:  # a row that is longer than a chunk
                if row == 0:
                    yield from self._within_limit(text, begin, table.rows[row], before)
                yield from self._columns(text, table, table.rows[row], ends[row], path)
                last = row + 1
            else:
                if last < len(ends):
                    last = _best_cut(text, table.rows, row, last)
                    enough = bisect_right(tokens, tokens[-1] - self._crumb_tokens) - 1
                    last = min(last, enough) if enough > row else last
                for span in self._within_limit(text, begin, ends[last - 1], before):
                    yield span._replace(is_rows=True)
            row, before, begin = last, header, ends[last - 1]

    def _columns(
        self, text: str, table: Table, start: int, end: int, path: str
    ) -> Iterator[ChunkSpan]:
        """A row in pieces, each with the names of its own columns before it."""
        cells = list(table.cells(text, start, end))
        names = list(table.cells(table.header.split("\n")[0], 0))
        at = 0
        while at < len(cells):
            most = len(cells) - at
            while True:
                head = path + _names(table.header, names[at : at + most])
                used = self._count(head + text[cells[at][0] : cells[at + most - 1][1]])
                if used <= self.chunk_tokens or most == 1:
                    break
                most = max(1, min(most - 1, most * self.chunk_tokens // used))
            if self._count(head) > self.chunk_tokens // 2 and used > self.chunk_tokens:
                head = path
            low, high = cells[at][0], cells[at + most - 1][1]
            for span in self._within_limit(text, low, high, head):
                yield span._replace(is_rows=True)
            at += most

    def _row_tokens(self, text: str, table: Table) -> Iterator[int]:
        rows = [text[start:end] for start, end in table.spans()]
        for at in range(0, len(rows), BATCH_ROWS):
            batch = rows[at : at + BATCH_ROWS]
            for encoding in self._tokenizer.encode_batch(batch, add_special_tokens=False):
                yield len(encoding.ids)

    def _window_spans(
        self, place: _Place, start: int, end: int, room: int, low: int
    ) -> list[ChunkSpan]:
        """Chunks of ``text[start:end]``, each within the limit. ``low``: where the section begins."""
        from semantic_text_splitter import TextSplitter

        splitter, spans = TextSplitter.from_callback(self._count, room), []
        for offset, piece in splitter.chunk_indices(place.with_headings(start, end)):
            begin = start + offset
            header = place.header(begin)
            first = _line_start(place.text, begin, low) if header else begin
            spans += self._within_limit(place.text, first, begin + len(piece), header)
        return spans

    def _within_limit(
        self, text: str, start: int, end: int, header: str = "", at: str = " "
    ) -> list[ChunkSpan]:
        """A piece as a span, stripped as Python strips, which may add tokens; cut near the middle, after a
        line or ``at``, if it is too long."""
        begin = start
        start, end = _stripped(text, start, end)
        if header and start < end:
            start = begin  # a row may begin with an empty cell
        if end - start <= self.chunk_tokens * MAX_CHARS_PER_TOKEN:
            tokens = self._count(header + text[start:end])
            if tokens <= self.chunk_tokens:
                return [ChunkSpan(start, end, tokens, header)] if start < end else []
        middle = (start + end) // 2
        found = text.rfind("\n", (start + middle) // 2, middle - 1)
        found = text.rfind(at, start + 1, middle - 1) if found < 0 else found
        middle = middle if found < 0 else found + 1
        left = self._within_limit(text, start, middle, header, at)
        return left + self._within_limit(text, middle, end, header, at)


class _Place:
    """A text with its outline: what encloses a place, and where to cut."""

    def __init__(self, chunker: Chunker, text: str, outline: Outline) -> None:
        self.text = text
        self.leaves = outline.leaves(text)
        self._outline = outline
        self._count = chunker._count
        self._most_tokens = int(PATH_SHARE * chunker.chunk_tokens)
        self._header = lru_cache(maxsize=16)(self._header_of)

    def header(self, place: int) -> str:
        """What comes before a chunk that begins at a place."""
        return self._header(*self._outline.section_at(self.text, place))

    def _header_of(self, number: int, is_beginning: bool) -> str:
        name = self._outline.name
        labels = self._outline.path(number, is_beginning)
        for first in range(len(labels) + 1):
            within = labels[first:]
            header = "\n".join(filter(None, [name, *within])) if name else " > ".join(within)
            header += ("\n" if name else "\n\n") * bool(header)
            if self._count(header) <= self._most_tokens:
                return header
        return ""

    def with_headings(self, start: int, end: int) -> str:
        """``text[start:end]`` with spaces for the line ends in and after headings and lines of definitions,
        so that they are not parted from the text below."""
        pieces: list[str] = []
        sections = self._outline.sections
        at = bisect_left(sections, start, key=lambda section: section.body)
        while at < len(sections) and (body := sections[at].body) < end:
            if sections[at].label:
                after, _ = _stripped(self.text, body, end)
                first = max(start, sections[at].start)
                pieces += self.text[start:first], self.text[first:after].replace("\n", " ")
                start = after
            at += 1
        return "".join([*pieces, self.text[start:end]])

    def middle(self, start: int, end: int, whole: int) -> int:
        """Where to cut ``text[start:end]`` in two: at a heading or a definition, else at a paragraph, line,
        sentence or word near the middle. ``whole``: where it is cut now; definitions are not cut."""
        center, low, high = (start + end) // 2, start + (end - start) // 4, end - (end - start) // 4
        starts = [leaf.start for leaf in self.leaves[self._leaf(start) : self._leaf(end) + 1]]
        is_whole = bool(self._outline.name) and whole in starts
        inner = [at for at in starts if (start if is_whole else low) < at < high]
        if inner or is_whole:
            return min(inner, key=lambda at: abs(at - center), default=whole)
        for mark in _BOUNDARIES:
            ends = [found.end() for found in mark.finditer(self.text, low, high)]
            if ends:
                return min(ends, key=lambda at: abs(at - center))
        return center

    def _leaf(self, place: int) -> int:
        return max(0, bisect_right(self.leaves, place, key=lambda leaf: leaf.start) - 1)


#: Ends of paragraphs, lines, sentences and words.
_BOUNDARIES = [re.compile(each) for each in (r"\n\n+", r"\n", r"[.!?…][\"')\]]* |[。！？]", " ")]


def _best_heading(leaves: Sequence[Leaf], tokens: Sequence[int], first: int, last: int) -> int:
    """Where to end a chunk of sections that may end at ``last``: before the most important heading after its
    first third, the last one of these."""
    third = tokens[first] + (tokens[last] - tokens[first]) // 3
    begin = max(first + 1, bisect_right(tokens, third, first, last))
    return min(range(begin, last + 1), key=lambda at: (leaves[at].depth, -at))


def _line_start(text: str, start: int, low: int) -> int:
    """Where the line begins, if only white space is before ``start`` in it."""
    low = max(low, start - INDENT_CHARS)
    begin = max(low, text.rfind("\n", low, start) + 1)
    return begin if text[begin:start].isspace() else start


def _cut_by(span: ChunkSpan, tables: Sequence[Table]) -> Table | None:
    """The table that this chunk would begin and not end."""
    number = bisect_right(tables, span.end - 1, key=lambda table: table.start) - 1
    if number >= 0 and span.start <= tables[number].start and span.end < tables[number].end:
        return tables[number]
    return None


def _names(header: str, names: Sequence[tuple[int, int]]) -> str:
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
