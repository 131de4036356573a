"""A damaged or hostile corpus returns what was put, less of it with a warning, or raises one sentence."""

from __future__ import annotations

import logging
import os
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from blendrag.corpus import database
from blendrag.corpus.corpus import Corpus, check_corpus
from blendrag.corpus.database import FILE_NAME
from blendrag.errors import BlendragError, CorpusError
from blendrag.text.chunking import chunk_id_of
from corpus.small_corpus import change, make_corpus, text_of, vector_of
from lab.soak.corpus_fuzz import CorpusFuzzing


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_corpus(tmp_path / "store")
    return tmp_path / "store"


def execute(root: Path, *statements: str) -> None:
    with closing(sqlite3.connect(root / "corpus" / FILE_NAME, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


def test_damaged_copies_give_no_wrong_answer_and_no_other_error(tmp_path: Path) -> None:
    fuzzing = CorpusFuzzing(tmp_path, seed=3)
    fuzzing.run(12)
    assert fuzzing.failures == []
    assert fuzzing.refused > 3


def test_the_fuzzer_notices_unchecked_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unchecked(table: database.CheckedTable, row: tuple) -> tuple:
        columns = zip(row, table.columns.values(), strict=False)
        return tuple({"n": 1} if kind is database.Json else value for value, kind in columns)

    monkeypatch.setattr(database.CheckedTable, "checked", unchecked)
    fuzzing = CorpusFuzzing(tmp_path, seed=3)
    fuzzing.run(6)
    assert fuzzing.failures


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TRIGGER t AFTER INSERT ON meta BEGIN DELETE FROM chunk; END",
        "CREATE VIEW v AS SELECT * FROM chunk, chunk, chunk, chunk, chunk, chunk",
        "CREATE TABLE theirs (x)",
        "CREATE INDEX theirs ON chunk(text)",
        "DROP INDEX passage_by_chunk",
    ],
)
def test_a_schema_with_anything_else_is_refused(root: Path, statement: str) -> None:
    execute(root, statement)
    for read_only in (True, False):
        with pytest.raises(CorpusError, match="has other tables than a corpus"):
            Corpus.open(root, read_only=read_only)


def test_a_huge_row_is_not_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "MAX_ROW_BYTES", 1 << 20)
    execute(root, "UPDATE chunk SET text = zeroblob(3000000) WHERE id = 1")
    with Corpus.open(root) as corpus, pytest.raises(CorpusError, match="a row of over"):
        corpus.text(chunk_id_of(text_of(0, 0)))


@pytest.mark.parametrize("name", [FILE_NAME, f"{FILE_NAME}-wal"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, partial(os.symlink, "/dev/zero")])
def test_irregular_files_are_refused_at_once(root: Path, name: str, make: Any) -> None:
    path = root / "corpus" / name
    path.unlink(missing_ok=True)
    make(path)
    with pytest.raises(CorpusError, match="is not a regular file"):
        Corpus.open(root)


def test_a_linked_directory_and_a_journal_that_would_delete_a_file_are_refused(root: Path) -> None:
    journal = root / "corpus" / f"{FILE_NAME}-journal"
    journal.write_bytes(bytes(512) + database._SUPER_JOURNAL)
    with pytest.raises(CorpusError, match="was not written by blendrag"):
        Corpus.open(root)
    assert journal.exists()
    (root / "corpus").rename(root / "moved")
    (root / "corpus").symlink_to(root / "moved")
    with pytest.raises(CorpusError, match="is not a directory"):
        Corpus.open(root)


@pytest.mark.parametrize(
    ("statement", "row"),
    [
        ("UPDATE chunk SET text = replace(text, 'lamp', 'lump') WHERE id = 4", "chunk 4"),
        ("UPDATE document SET source = 'other.md' WHERE id = 2", "document 2"),
        ("UPDATE passage SET chunk = 1 WHERE id = 4", "passage 4"),
        ("UPDATE passage SET vector = 'text' WHERE id = 4", "passage 4"),
        ("UPDATE document SET metadata = x'ff' WHERE id = 2", "document 2"),
    ],
)
def test_a_damaged_row_is_left_out_reported_and_repaired(
    root: Path, statement: str, row: str, caplog: pytest.LogCaptureFixture
) -> None:
    execute(root, statement)
    text = text_of(1, 0)
    with Corpus.open(root) as corpus, caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert text not in [found.text for found, _ in corpus.nearest(vector_of(text), 3)]
        assert corpus.unchanged("doc1.md", "digest 1") is None
        assert corpus.unchanged("doc2.md", "digest 2") is not None
    assert sum(f"row {row} " in record.getMessage() for record in caplog.records) == 1
    found = check_corpus(root)
    assert not found.is_good
    assert any(row in fault for fault in found.faults)
    assert check_corpus(root, repair=True).repaired
    assert check_corpus(root).is_good
    change(root)
    with Corpus.open(root) as corpus:
        assert corpus.nearest(vector_of(text), 1)[0][0].text == text
        assert corpus.unchanged("doc1.md", "digest 1") is not None


def test_ingesting_a_document_again_mends_its_rows(root: Path) -> None:
    execute(root, "UPDATE chunk SET tokens = 1 WHERE id = 4", "DELETE FROM passage WHERE id = 5")
    for is_mended in (False, True):
        with Corpus.open(root) as corpus:
            assert (corpus.unchanged("doc1.md", "digest 1") is not None) == is_mended
        change(root)
    assert check_corpus(root).is_good


@pytest.mark.parametrize("value", ["x", "[]", "[" * 100_000, '{"model": 1}', "null"])
def test_an_invalid_manifest_is_one_sentence(root: Path, value: str) -> None:
    with Corpus.open(root) as corpus:
        with corpus.file.writing():
            corpus.file.set_meta("manifest", value)
        with pytest.raises(CorpusError, match="not a valid manifest"):
            _ = corpus.manifest


def test_a_damaged_setting_is_one_sentence(root: Path) -> None:
    execute(root, "UPDATE meta SET value = 'y' WHERE key = 'manifest'")
    with Corpus.open(root, read_only=True) as corpus, pytest.raises(CorpusError, match="row meta"):
        _ = corpus.manifest
    with pytest.raises(CorpusError, match=r"settings .* are damaged"):
        check_corpus(root, repair=True)


def test_settings_are_checked_again_when_they_change(
    root: Path,
) -> None:
    with Corpus.open(root) as corpus:
        found = corpus.manifest
        with tiny.counted(database.META, "checked") as checked:
            assert corpus.manifest is found
            assert corpus.manifest_or_none is found
            assert not checked
            execute(root, "UPDATE meta SET value = 'y' WHERE key = 'manifest'")
            with pytest.raises(CorpusError, match="row meta"):
                _ = corpus.manifest
            assert checked


def test_damaged_hashes_are_computed_from_the_text(root: Path) -> None:
    execute(root, "UPDATE anchor SET packed = x'00' WHERE chunk < 4")
    with Corpus.open(root) as corpus:
        assert len(corpus.chunk_index.find(text_of(0, 0))) == 1


def test_forged_vectors_of_another_length_or_nan_are_left_out(root: Path) -> None:
    with Corpus.open(root) as corpus, corpus.file.writing() as connection:
        passages = corpus.file.sound_rows((database.PASSAGE,), "WHERE id < 3")
        for (values,), numbers in zip(passages, ([1.0], [np.nan] * 8), strict=True):
            vector = np.asarray(numbers, np.float32).tobytes()
            connection.execute("UPDATE passage SET vector = ? WHERE id = ?", (vector, values[0]))
            database.PASSAGE.seal(connection, *values[:5], vector)
    with Corpus.open(root) as corpus:
        assert len(corpus.nearest(vector_of("x"), 99)) == 5 * 3 + 3 - 2


def test_an_emptied_database_is_not_silently_begun_anew(root: Path) -> None:
    (root / "corpus" / FILE_NAME).write_bytes(b"")
    for read_only in (True, False):
        with pytest.raises(CorpusError, match=r"is empty, expected a corpus; .* ingest again"):
            Corpus.open(root, read_only=read_only)
    assert (root / "corpus" / FILE_NAME).read_bytes() == b""
    with pytest.raises(BlendragError, match="is empty"):
        check_corpus(root)
