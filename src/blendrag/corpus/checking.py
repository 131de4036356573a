"""Is every row of a corpus the one that was written? And mending what can be mended.

Reads all rows, and lets SQLite check the file's pages and indexes. A repair removes what is damaged, and
with it the document that it belonged to, so that the next ingest of that document restores it.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blendrag.corpus.corpus import Corpus
from blendrag.corpus.file import CorpusFile
from blendrag.corpus.rows import CHUNK, DOCUMENT, PASSAGE, TABLES, DamagedRow, Table

#: Faults described in words; all are counted.
MAX_FAULTS = 1000
#: Faults that SQLite finds which are described.
_MAX_STRUCTURE_FAULTS = 10


@dataclass(frozen=True)
class CorpusCheck:
    """What was found in a corpus, before any repair."""

    rows: int
    damaged: int
    faults: tuple[str, ...]
    """What is damaged; the first :data:`MAX_FAULTS`."""
    repaired: bool

    @property
    def is_good(self) -> bool:
        return not self.damaged


def check_corpus(root: Path, repair: bool = False) -> CorpusCheck:
    """Check the corpus of the store at ``root``; with ``repair``, remove what is damaged.

    Raises :class:`CorpusError` where it cannot be opened.
    """
    with Corpus.open(root, read_only=not repair) as corpus:
        file = corpus._file
        with file.reading():
            rows, damaged, faults = _scan(file)
        if repair and faults:
            with file.writing():
                _repair(corpus, damaged)
        return CorpusCheck(
            rows, len(faults), tuple(faults[:MAX_FAULTS]), repaired=repair and bool(faults)
        )


def _scan(file: CorpusFile) -> tuple[int, list[tuple[Table, Any]], list[str]]:
    """Rows read; table and key of those that are damaged; all faults in words."""
    connection = file.connection
    structure = [
        str(row[0])
        for row in connection.execute(f"PRAGMA integrity_check({_MAX_STRUCTURE_FAULTS})")
    ]
    faults = [f"structure: {fault}" for fault in structure if fault != "ok"]
    rows = 0
    damaged: list[tuple[Table, Any]] = []
    for table in TABLES:
        for row in connection.execute(f"SELECT {table.selected} FROM {table.name} NOT INDEXED"):
            rows += 1
            try:
                table.checked(row)
            except DamagedRow as exc:
                damaged.append((table, row[0]))
                faults.append(f"row {exc} is not what was written")
    for table_name, key, parent, _ in connection.execute("PRAGMA foreign_key_check"):
        faults.append(f"row {table_name} {key}: its {parent} is lost")
    short = connection.execute(
        "SELECT source FROM document WHERE passages != "
        "(SELECT count(*) FROM passage WHERE passage.document = document.id)"
    )
    faults += [f"document {source!r:.80}: some of its passages are lost" for (source,) in short]
    return rows, damaged, faults


def _repair(corpus: Corpus, damaged: list[tuple[Table, Any]]) -> None:
    """Within a transaction."""
    file = corpus._file
    connection: sqlite3.Connection = file.connection
    connection.execute("REINDEX")
    for table, key in damaged:
        name, column = table.name, table.columns[0][0]
        if table is CHUNK:  # a document without one of its chunks is not whole
            connection.execute("DELETE FROM passage WHERE chunk = ?", (key,))
        connection.execute(f"DELETE FROM {name} WHERE {column} = ?", (key,))
    for statement in (
        f"DELETE FROM {PASSAGE.name} WHERE document NOT IN (SELECT id FROM document) "
        "OR chunk NOT IN (SELECT id FROM chunk)",
        f"DELETE FROM {DOCUMENT.name} WHERE passages != "
        "(SELECT count(*) FROM passage WHERE passage.document = document.id)",
        "DELETE FROM entry WHERE document NOT IN (SELECT id FROM document)",
        "DELETE FROM anchor WHERE chunk NOT IN (SELECT id FROM chunk)",
    ):
        connection.execute(statement)
    orphans = connection.execute(
        "SELECT id FROM chunk WHERE id NOT IN (SELECT chunk FROM passage)"
    ).fetchall()
    corpus._changed([row for (row,) in orphans])
    corpus.search.index.drop()
