"""Each sheet of an XLSX is a section with a table, whose chunks carry its header."""

from __future__ import annotations

import io
from collections.abc import Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pytest

from blendrag.errors import UnreadableDocumentError
from blendrag.text import xlsx_files
from blendrag.text.inputs import scan_inputs
from blendrag.text.limited_reading import ReaderPool
from blendrag.text.outline import outline_of
from blendrag.text.readers import open_documents
from blendrag.text.tables import tables_of

openpyxl = pytest.importorskip("openpyxl")
PARTS = [
    ["SKU", "Part", "Price", "From", "Sold"],
    ["B-7", "Bell | brass", 12.5, date(2026, 3, 1), True],
    ["C-8", "Chain\nlong", 30.0, datetime(2026, 4, 1, 8, 30), None],
]


def book(title: str = "", **sheets: Sequence[Sequence[Any]]) -> bytes:
    made, out = openpyxl.Workbook(), io.BytesIO()
    made.remove(made.active)
    made.properties.title = title
    for name, rows in sheets.items():
        sheet = made.create_sheet(name)
        for row in rows:
            sheet.append(row)
    made.save(out)
    return out.getvalue()


def text_of(**sheets: Sequence[Sequence[Any]]) -> str:
    return xlsx_files.read(book(**sheets))[0]


def test_a_sheet_is_a_section_with_a_table() -> None:
    text = text_of(Parts=PARTS, Empty=[], Towns=[["Town", "Height"], ["Ulm", 478]])
    assert text == (
        "## Parts\n\n"
        "| SKU | Part | Price | From | Sold |\n| --- | --- | --- | --- | --- |\n"
        "| B-7 | Bell \\| brass | 12.5 | 2026-03-01 | TRUE |\n"
        "| C-8 | Chain long | 30 | 2026-04-01 08:30:00 |  |\n\n"
        "## Towns\n\n| Town | Height |\n| --- | --- |\n| Ulm | 478 |"
    )
    assert [each.label for each in outline_of(text, "parts.xlsx").sections] == ["Parts", "Towns"]
    parts, towns = tables_of(text, "parts.xlsx")
    assert parts.header.startswith("| SKU | Part")
    assert (len(parts.rows), len(towns.rows)) == (2, 1)


def test_a_title_is_above_the_table_and_columns_without_names_have_letters() -> None:
    titled = text_of(S=[["Parts of 2026"], [], ["SKU", "Price"], ["B-7", 12]])
    assert titled == "## S\n\nParts of 2026\n\n| SKU | Price |\n| --- | --- |\n| B-7 | 12 |"
    unnamed = text_of(S=[[1, 2], [3, 4]])
    assert unnamed == "## S\n\n| A | B |\n| --- | --- |\n| 1 | 2 |\n| 3 | 4 |"
    assert [xlsx_files._letters(at) for at in (0, 25, 26, 701, 702)] == [
        "A",
        "Z",
        "AA",
        "ZZ",
        "AAA",
    ]


def test_a_child_reads_a_workbook_and_its_title(tmp_path: Path) -> None:
    path = tmp_path / "parts-1.xlsx"
    path.write_bytes(book("Bell price", Prices=[["Bell price", "In"], ["12", "Ulm"]]))
    pool = ReaderPool()
    try:
        (document,), failure = pool.read(path)
    finally:
        pool.close()
    assert failure is None
    assert document.title == "Bell price"
    assert document.text.startswith("## Prices\n\n| Bell price | In |")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (book(S=PARTS)[:900], "cannot be read as XLSX"),
        (b"PK\x03\x04nothing more", "cannot be read as XLSX"),
        (book(S=[]), "is XLSX without text"),
    ],
)
def test_a_bad_workbook_is_one_sentence(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "a.xlsx"
    path.write_bytes(content)
    with pytest.raises(UnreadableDocumentError, match=says):
        list(open_documents(path).documents)


def test_cells_that_fill_rows_up_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xlsx_files, "MAX_CELLS", 100)
    assert text_of(S=[["a", "b"]] * 40)
    with pytest.raises(ValueError, match="more than 100 cells"):
        text_of(S=[["a"]] * 90 + [[None] * 9 + ["far"]])


def test_without_the_extra_workbooks_are_skipped_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.xlsx"
    path.write_bytes(book(S=PARTS))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    skipped = {"XLSX, which needs pip install 'blendrag[files]'": [str(path)]}
    assert scan_inputs([tmp_path]) == ([], skipped)
