"""Tables in texts: CSV and its dialects, and Markdown. Where they are, their header, their rows.

A table that is longer than a chunk is cut between rows, and every chunk carries the header
(:mod:`blendrag.text.chunking`), because values without the names of their columns say little.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Literal

#: Suffixes of delimited files. Other texts are taken for one only if they can hardly be anything else.
_SUFFIXES = (".csv", ".tsv", ".tab", ".psv")
_DELIMITERS = ",;\t|"
#: Records that decide on delimiter and header, and those that may come before the header.
SAMPLE_RECORDS, PREAMBLE_RECORDS = 200, 20
#: A record of more characters is one whose quote was never closed.
MAX_RECORD_CHARS = 32 * 1024
#: Records and share of equal ones, from which a text without the suffix is a delimited file.
_LEAST_RECORDS, _EQUAL_SHARE = 5, 0.95

_NUMBER = re.compile(r"[-+(]?[$€£¥]?\s?\d[\d\s.,:/%()Ee+-]*[%€$£¥]?")
_YEAR = re.compile(r"(1[5-9]|20|21)\d\d")
_RULE = re.compile(r"(?m)^[ \t>|:+-]+$")


@dataclass(frozen=True)
class Table:
    """Offsets of a table in a text: ``start``, that of each row below the header, and ``end``.

    ``header`` is empty if the columns have no names. A title above it belongs to the table, too.
    """

    start: int
    header: str
    rows: Sequence[int]
    end: int
    delimiter: str

    def spans(self) -> Iterator[tuple[int, int]]:
        """Start and end of each row."""
        return zip(self.rows, [*self.rows[1:], self.end], strict=True)

    def cells(self, text: str, start: int, end: int | None = None) -> Iterator[tuple[int, int]]:
        """Start and end of each cell of a row, with its delimiter."""
        mark = re.escape(self.delimiter)
        cell = re.compile(rf'(?:"(?:[^"]|"")*"|[^{mark}])*(?:{mark}|\Z)')
        end = len(text) if end is None else end
        while start < end:
            found = cell.match(text, start, end)
            after = found.end() if found else end
            yield start, after
            start = after


def tables_of(text: str, source: str = "") -> list[Table]:
    """The tables of a text in order. ``source``: name of its file, whose suffix may tell the kind."""
    is_named = source.lower().endswith(_SUFFIXES)
    found = [] if is_named else list(_markdown(text))
    table = None if found else _delimited(text, is_named)
    return found if table is None else [table]


# -- Markdown ---------------------------------------------------------------------------------------


def _markdown(text: str) -> Iterator[Table]:
    """Tables of pipes with a rule below the header, as in Markdown, Org and psql."""
    end = 0
    for rule in _RULE.finditer(text):
        line = rule[0].strip(" \t>")
        if "-" not in line or not ("|" in line or ("+" in line and line[0] != "+")):
            continue
        before = rule.start() - 1
        start = text.rfind("\n", 0, max(before, 0)) + 1
        header = text[start : max(before, 0)]
        if start < end or "|" not in header or not header.strip(" \t>|"):
            continue
        rows, end = [], rule.end()
        while end < len(text):
            after = text.find("\n", end + 1)
            after = len(text) if after < 0 else after
            if text.find("|", end + 1, after) < 0:
                break
            rows.append(end + 1)
            end = after
        if rows:
            start += len(header) - len(header.lstrip())
            yield Table(start, text[start : rule.end()].rstrip(), rows, end, "|")


def markdown_table(rows: Iterable[Sequence[str]]) -> str:
    """Rows of cells as Markdown, the first as the header."""
    cleaned = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows]
    width = max(map(len, cleaned), default=0)
    lines = [f"| {' | '.join(row + [''] * (width - len(row)))} |" for row in cleaned]
    return "\n".join([*lines[:1], f"|{' --- |' * width}", *lines[1:]])


# -- delimited files --------------------------------------------------------------------------------


def _delimited(text: str, is_named: bool) -> Table | None:
    if not is_named and not _looks_delimited(text):
        return None
    delimiter, width, share = _delimiter(text)
    if width < 2 or (not is_named and (width < 3 or share < _EQUAL_SHARE)):
        return None
    rows, records = _records(text, delimiter)
    below = [record for _, record in islice(records, SAMPLE_RECORDS)]
    if not is_named and len(below) < _LEAST_RECORDS:
        return None
    start, end = len(text) - len(text.lstrip()), len(text.rstrip())
    first = next((n for n, cells in enumerate(below) if _is_full(cells, width)), 0)
    if first > PREAMBLE_RECORDS or not is_header(below[first], below[first + 1 :], is_named):
        return Table(start, "", rows, end, delimiter) if is_named else None
    if first + 1 >= len(rows):
        return None
    header = text[rows[first] : rows[first + 1]].rstrip("\n")
    return Table(start, header, rows[first + 1 :], end, delimiter)


def _looks_delimited(text: str) -> bool:
    """Whether the first lines have equal numbers of some delimiter; cheap, for texts of any kind."""
    lines = text[: 1 << 14].split("\n")[:_LEAST_RECORDS]
    return len(lines) == _LEAST_RECORDS and any(
        lines[0].count(each) > 1 and len({line.count(each) for line in lines}) == 1
        for each in _DELIMITERS
    )


def _delimiter(text: str) -> tuple[str, int, float]:
    """The delimiter that gives the most records of one width; that width, and the share of records."""
    best = (0.0, 0, ",")
    for delimiter in _DELIMITERS:
        sample = [r for _, r in islice(_records(text[: 1 << 18], delimiter)[1], SAMPLE_RECORDS)]
        widths = Counter(len(record) for record in sample if len(record) > 1)
        if widths:
            width, times = widths.most_common(1)[0]
            best = max(best, (times / len(sample), width, delimiter))
    share, width, delimiter = best
    return delimiter, width, share


def _records(text: str, delimiter: str) -> tuple[list[int], Iterator[tuple[int, list[str]]]]:
    """Starts of the records that are not empty, and these with their cells."""
    for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_NONE):
        try:
            starts, firsts = _parsed(text, delimiter, quoting)
        except csv.Error:  # a field is too long
            continue
        ends = [*starts[1:], len(text)]
        longest = max((b - a for a, b in zip(starts, ends, strict=False)), default=0)
        if longest <= MAX_RECORD_CHARS:
            return starts, iter(firsts)
    return [], iter(())


def _parsed(
    text: str, delimiter: str, quoting: Literal[0, 3]
) -> tuple[list[int], list[tuple[int, list[str]]]]:
    lines = map(len, io.StringIO(text, newline="\n"))
    offsets = list(accumulate(lines, initial=0))
    starts: list[int] = []
    firsts: list[tuple[int, list[str]]] = []
    source = io.StringIO(text, newline="\n")
    reader = csv.reader(source, delimiter=delimiter, quoting=quoting, strict=True)
    line = 0
    for cells in reader:
        if any(cells):
            starts.append(offsets[line])
            if len(firsts) < SAMPLE_RECORDS:
                firsts.append((offsets[line], cells))
        line = reader.line_num
    return starts, firsts


def _is_full(cells: Sequence[str], width: int) -> bool:
    """Whether this record is no title: it fills most of the columns."""
    return 2 * sum(bool(cell.strip()) for cell in cells) > width


def is_header(cells: Sequence[str], below: Sequence[Sequence[str]], is_named: bool) -> bool:
    """Whether the first record names columns: its cells are words, or years above other numbers.

    ``is_named``: the file is known to be delimited, where a table of words alone has a header, too.
    """
    names = [cell.strip() for cell in cells]
    given = [name for name in names if name]
    if len(given) < 2 or len(set(given)) < len(given) or not below:
        return False
    numeric = [_is_number(name) for name in names]
    columns = [[row[n].strip() for row in below if n < len(row)] for n in range(len(names))]
    numbers_below = [2 * sum(map(_is_number, column)) > len(column) for column in columns]
    for name, is_numeric, column in zip(names, numeric, columns, strict=True):
        if is_numeric and not (_YEAR.fullmatch(name) and not all(map(_YEAR.fullmatch, column))):
            return False
    if all(numeric):
        return False
    return is_named or any(
        below and not own for below, own in zip(numbers_below, numeric, strict=True)
    )


def _is_number(cell: str) -> bool:
    return bool(_NUMBER.fullmatch(cell))
