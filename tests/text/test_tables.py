"""Chunks of long tables: cut between rows, each with the header, and stable when a row changes."""

from __future__ import annotations

import csv
import io
import random

import pytest

import tiny
from blendrag.text.chunking import Chunk, Chunker
from blendrag.text.tables import markdown_table, tables_of

CHUNKER = Chunker(tiny.tokenizer().backend_tokenizer, 256)
NAMES = ("sku", "name", "price_eur", "weight_kg", "warranty_months")


def rows(count: int) -> list[tuple[str, ...]]:
    rng = random.Random(1)
    return [
        (f"P-{i:04}", f"part {i}", f"{rng.uniform(1, 90):.2f}", f"{rng.uniform(0, 9):.2f}", "12")
        for i in range(count)
    ]


def delimited(count: int, delimiter: str = ",", names: tuple[str, ...] = NAMES) -> str:
    return "".join(f"{delimiter.join(row)}\n" for row in [names, *rows(count)] if row)


def chunks_of(text: str, source: str = "a.csv") -> list[Chunk]:
    """The chunks, which together are the text, and each within the limit."""
    chunks, position = CHUNKER.split(text, source), 0
    for chunk in chunks:
        assert not text[position : chunk.start].strip()
        assert chunk.text.endswith(text[chunk.start : chunk.end])
        assert chunk.text == chunk.text.strip()
        assert chunk.tokens == CHUNKER.count(chunk.text) <= CHUNKER.chunk_tokens
        position = chunk.end
    assert not text[position:].strip()
    return chunks


MARKDOWN = markdown_table([NAMES, *rows(100)])


@pytest.mark.parametrize(
    ("source", "text", "header"),
    [
        *[("a.csv", delimited(100, d), d.join(NAMES)) for d in ",;\t|"],
        ("export.TSV", delimited(100, "\t"), "\t".join(NAMES)),
        ("a.csv", "Parts 2024\n\n" + delimited(100), ",".join(NAMES)),
        ("a.csv", "Parts 2024,,,,\n,,,,\n" + delimited(100), ",".join(NAMES)),
        ("a.csv", "sep=;\n" + delimited(100, ";"), ";".join(NAMES)),
        ("without a suffix", delimited(100), ",".join(NAMES)),
        ("a.csv", "land,2020,2021\n" + "Land,1.5,2.5\n" * 300, "land,2020,2021"),
        ("a.csv", "question,answer\n" + "What is it?,A word\n" * 99, "question,answer"),
        ("a.tsv", "\ta\tb\n" + "".join(f"r{i}\t{i}\t{i}\n" for i in range(300)), '""\ta\tb'),
        ("a.md", MARKDOWN, "\n".join(MARKDOWN.split("\n")[:2])),
        ("a.md", "# Parts\n\nWords.\n\n" + MARKDOWN, "\n".join(MARKDOWN.split("\n")[:2])),
        ("a.md", "a | b\n-|-\n" + "x y z | 1\n" * 200, "a | b\n-|-"),
        ("a.txt", " id | n\n----+---\n" + " 12 | 5\n" * 200, "id | n\n----+---"),
    ],
)  # fmt: skip
def test_every_chunk_of_a_table_has_its_header(source: str, text: str, header: str) -> None:
    chunks = chunks_of(text, source)
    assert len(chunks) > 2
    assert all(header in chunk.text for chunk in chunks)
    path = "Parts\n\n" * text.startswith("# Parts")
    assert all(chunk.text.startswith(f"{path}{header}\n") for chunk in chunks[1:])
    lines = {line.strip() for line in text.split("\n")}
    for chunk in chunks:  # no row is cut
        assert {line.strip() for line in chunk.text.split("\n")[2:]} <= lines


def test_a_heading_stays_with_its_table_and_prose_after_it_has_no_header() -> None:
    prose = "The lamp was lit at dusk. Nobody knew who had climbed the stairs. " * 40
    chunks = chunks_of(f"{prose}\n\n## Parts\n\n{MARKDOWN}\n\n{prose}", "a.md")
    with_heading = next(chunk for chunk in chunks if "## Parts" in chunk.text)
    assert "| P-0000 |" in with_heading.text
    assert "sku" not in chunks[0].text + chunks[-1].text


def test_cells_with_line_breaks_stay_whole() -> None:
    text = "id,note\n" + "".join(f'{i},"line one\nline, ""two"" {i}"\n' for i in range(100))
    for chunk in chunks_of(text):
        records = list(csv.reader(io.StringIO(chunk.text), strict=True))
        assert {len(record) for record in records} == {2}
        assert records[0] == ["id", "note"]


@pytest.mark.parametrize(
    "text",
    [
        delimited(100, names=()),
        "".join(f"{i},{i * 2},{i * 3.5}\n" for i in range(300)),
        "".join(f"2024-01-{i % 28 + 1:02},{i},x\n" for i in range(300)),
        "a,a,b\n" + "x,y,z\n" * 300,  # names differ
    ],
)
def test_no_header_is_invented(text: str) -> None:
    chunks = chunks_of(text)
    assert all(chunk.text == text[chunk.start : chunk.end] for chunk in chunks)
    assert all(text[chunk.end : chunk.end + 1] in ("\n", "") for chunk in chunks)


def test_a_row_that_does_not_fit_is_cut_between_cells_each_with_its_own_names() -> None:
    names = [f"column_{i}" for i in range(200)]
    text = (
        ",".join(names) + "\n" + "\n".join(",".join(f"{r}x{i}" for i in range(200)) for r in "abc")
    )
    pieces = [chunk for chunk in chunks_of(text) if "x" in chunk.text]
    for piece in pieces:
        head, cells = (line.rstrip(",").split(",") for line in piece.text.split("\n"))
        assert [name.split("_")[1] for name in head] == [cell[2:] for cell in cells]


def test_wide_headers_and_long_cells_stay_within_the_limit() -> None:
    wide = ",".join(f"a long name of a column {i}" for i in range(30))
    chunks_of(wide + "\n" + "\n".join(",".join("12345" for _ in range(30)) for _ in range(20)))
    chunks_of("id,text\n" + "\n".join(f"{i},{'word ' * 1000}" for i in range(3)))
    chunks_of(markdown_table([["id", "text"], ["1", "word " * 1000], ["2", "x" * 5000]]), "a.md")


@pytest.mark.parametrize(
    "text",
    [
        delimited(50) + "P-1\nP-2,a\n\n" + delimited(50, names=()) + "x," * 20,
        delimited(100).replace("part 5,", '"part 5,'),
        delimited(100).replace("part 5,", 'pipe 5",'),
        "a,b\n" + "x" * 20_000 + ",1\n",
        "name\n" + "person of a name\n" * 200,
        "a,b,c\n",
        ",,,\n" * 500,
        '"' * 3001 + "\n" + ",\n" * 500,
        "|" * 3000 + "\n" + "|-" * 1500 + "\n" + "|x" * 1000,
        "|a|\n|-|\n" * 500 + "|-|\n" * 500,
    ],
)
def test_odd_tables_are_split_without_loss(text: str) -> None:
    for source in ("a.csv", "a.md"):
        chunks_of(text, source)


def test_a_changed_row_changes_only_the_chunks_near_it() -> None:
    lines = delimited(400).split("\n")
    known = {chunk.chunk_id for chunk in chunks_of("\n".join(lines))}
    new = []
    for at in range(1, 400, 80):
        cells = lines[at].split(",")
        changed = [*lines[:at], ",".join([*cells[:2], "1234.56", *cells[3:]]), *lines[at + 1 :]]
        longer = [*lines[:at], "P-9999,new,1,2,3", *lines[at:]]
        for each in (changed, longer):
            new.append(len({c.chunk_id for c in chunks_of("\n".join(each))} - known))
    assert len(known) > 60
    assert sum(new) / len(new) < 2.5
    assert max(new) < 12


@pytest.mark.parametrize(
    "text",
    [
        "One, two, three.\n" * 300,
        "She sells, he buys; they trade, we look.\nIt rains | it snows.\n" * 200,
        "key: value, other: value\n" * 300,
        "x = f(a, b, c)\ny = g(a, b, c)\n" * 200,
        ("Words about something here. " * 9 + "\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n") * 3,
    ],
)
def test_texts_without_a_long_table_are_cut_as_before(text: str) -> None:
    assert CHUNKER.split(text, "a.md") == CHUNKER.split(text, with_context=False)


def test_tables_of_markdown_are_found() -> None:
    text = "x\n\n> | a | b |\n> |:--|--:|\n> | 1 | 2 |\n\n+---+---+\n| a | b |\n+---+---+\n"
    (table,) = tables_of(text)
    assert text[table.rows[0] : table.end] == "> | 1 | 2 |"
