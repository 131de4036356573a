"""Text of XLSX workbooks, through openpyxl (the extra ``files``): each sheet is a section with a table.

The values are read that the program saved, of formulas, too; a workbook that was never calculated has none.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, time
from io import BytesIO
from itertools import islice
from typing import Any

from blendrag.text.tables import PREAMBLE_RECORDS, SAMPLE_RECORDS, is_header, markdown_table

#: Columns of a sheet, and cells of a workbook with those that fill its rows up.
MAX_COLUMNS, MAX_CELLS = 1000, 5_000_000


def read(data: bytes) -> tuple[str, str]:
    """Text and title, which may be empty. Raises many types for damaged files."""
    with _without_numpy():
        from openpyxl import load_workbook

    book = load_workbook(BytesIO(data), read_only=True, data_only=True)
    blocks, cells = [], 0
    for sheet in book.worksheets:
        rows = []
        width = 0
        for row in _rows(sheet):
            rows.append(row)
            width = max(width, len(row))
            if cells + width * len(rows) > MAX_CELLS:
                raise ValueError(f"it has more than {MAX_CELLS:,} cells")
        cells += width * len(rows)
        if rows:
            blocks += [f"## {' '.join(sheet.title.split())}", *_blocks(rows)]
    return "\n\n".join(blocks), book.properties.title or ""


@contextmanager
def _without_numpy() -> Iterator[None]:
    """openpyxl (3.1) imports numpy for types that no file holds, which is much for a reader with limits."""
    if "numpy" in sys.modules:
        yield
        return
    sys.modules["numpy"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["numpy"]


def _rows(sheet: Any) -> Iterator[list[str]]:
    """The rows that have text, each without empty cells at its end."""
    sheet.reset_dimensions()  # what a file says of its size may be wrong
    for values in sheet.iter_rows(max_col=MAX_COLUMNS, values_only=True):
        row = [_shown(value) for value in values]
        while row and not row[-1]:
            row.pop()
        if row:
            yield row


def _blocks(rows: Sequence[list[str]]) -> Iterator[str]:
    """The lines of a title, and the table; its columns are called by letters if they have no names."""
    width = max(map(len, rows))
    below = islice(enumerate(rows), PREAMBLE_RECORDS)
    first = next((at for at, row in below if 2 * sum(map(bool, row)) > width), 0)
    for row in rows[:first]:
        yield " ".join(filter(None, row))
    table = rows[first:]
    if not is_header(table[0], table[1 : 1 + SAMPLE_RECORDS], True):
        table = [[_letters(at) for at in range(width)], *table]
    yield markdown_table(table)


def _shown(value: Any) -> str:
    """A value as a spreadsheet shows it, but for formats of numbers."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    if isinstance(value, datetime):
        return str(value.date() if value.time() == time() else value)
    return str(value).strip()


def _letters(at: int) -> str:
    """``A``, …, ``Z``, ``AA``, …"""
    name = ""
    while at >= 0:
        at, letter = at // 26 - 1, at % 26
        name = chr(ord("A") + letter) + name
    return name
