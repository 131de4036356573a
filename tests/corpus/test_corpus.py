"""The corpus keeps texts, hashes and vectors together through every change."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blendrag.corpus import vectors as vectors_module
from blendrag.corpus.corpus import Corpus
from blendrag.corpus.database import FILE_NAME, mapped
from blendrag.errors import CorpusError, InvalidInputError, StoreFullError
from blendrag.text.chunking import chunk_id_of
from blendrag.text.readers import Document, digest_of
from corpus.small_corpus import DIM, MANIFEST, chunk_of, vector_of


def put(corpus: Corpus, source: str, *texts: str, title: str = "T") -> list[str]:
    document = Document(source, "\n".join(texts), title, {"year": 1871})
    chunks, at = [], 0
    for text in texts:
        chunks.append(chunk_of(text, at))
        at += len(text) + 1
    vectors = np.stack([vector_of(text) for text in texts]) if texts else np.zeros((0, DIM))
    return corpus.put_document(document, digest_of(document), chunks, vectors)


def texts_found(corpus: Corpus, text: str, k: int = 9) -> list[str]:
    return [stored.text for stored, _ in corpus.nearest(vector_of(text), k)]


def long(text: str) -> str:
    return f"{text}: a sentence that is longer than any match needs to be, by far."


@pytest.fixture
def corpus(tmp_path: Path) -> Iterator[Corpus]:
    with Corpus.open(tmp_path, create=True) as opened:
        yield opened


# -- who may use the files ----------------------------------------------------------------------


def modes(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in directory.iterdir()}


@pytest.mark.parametrize(("root_mode", "mode"), [(0o755, 0o600), (0o770, 0o660)])
def test_a_corpus_is_its_owners_and_a_groups_that_may_write_to_the_store(
    tmp_path: Path, root_mode: int, mode: int
) -> None:
    tmp_path.chmod(root_mode)
    with Corpus.open(tmp_path, create=True):
        names = [f"{FILE_NAME}{end}" for end in ("", "-wal", "-shm")]
        assert modes(tmp_path / "corpus") == dict.fromkeys(names, mode)


def test_a_corpus_that_an_earlier_version_left_readable_is_tightened(tmp_path: Path) -> None:
    with Corpus.open(tmp_path, create=True):  # as long as it is open, its other files exist
        for path in (tmp_path / "corpus").iterdir():
            path.chmod(0o644)
        Corpus.open(tmp_path, read_only=True).close()
        assert set(modes(tmp_path / "corpus").values()) == {0o644}
        Corpus.open(tmp_path).close()
        assert set(modes(tmp_path / "corpus").values()) == {0o600}


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("name", ["", "corpus"])
def test_a_corpus_that_every_user_can_write_is_refused(
    tmp_path: Path, name: str, read_only: bool
) -> None:
    Corpus.open(tmp_path, create=True).close()
    (tmp_path / name).chmod(0o777)
    with pytest.raises(
        CorpusError, match=r"by every user \(mode 0777\), expected 0700; run chmod o-w"
    ):
        Corpus.open(tmp_path, read_only=read_only)


# -- documents and chunks -----------------------------------------------------------------------


def test_what_was_put_is_there_after_reopening(tmp_path: Path) -> None:
    with Corpus.open(tmp_path, create=True) as corpus:
        corpus.set_manifest(MANIFEST)
        assert put(corpus, "a.md", long("one"), long("zwei ü 世界")) == []
        assert corpus.nearest(vector_of(long("one")), 1)[0][1] == pytest.approx(0, abs=1e-3)
    assert os.stat(tmp_path / "corpus").st_mode & 0o777 == 0o700
    with Corpus.open(tmp_path) as corpus:
        assert corpus.manifest == MANIFEST
        assert corpus.sources() == ["a.md"]
        assert [c.text for c in corpus.chunks_of("a.md")] == [long("one"), long("zwei ü 世界")]
        stored = corpus.chunk(chunk_id_of(long("zwei ü 世界")))
        assert (stored.text, stored.source, stored.title) == (long("zwei ü 世界"), "a.md", "T")
        assert stored.start == len(long("one")) + 1
        assert stored.metadata == {"year": 1871}
        assert texts_found(corpus, long("one"), 1) == [long("one")]
        assert [m.complete for m in corpus.chunk_index.find(f"x {long('one')} y")] == [True]
        assert len(corpus) == 2


def test_chunks_come_in_the_documents_order(corpus: Corpus) -> None:
    put(corpus, "b", "shared", "second")
    put(corpus, "a", "first", "shared", "third", "shared")
    put(corpus, "c")
    assert corpus.sources() == ["a", "b", "c"]
    places = [(chunk.text, chunk.start) for chunk in corpus.chunks_of("a")]
    assert places == [("first", 0), ("shared", 6), ("third", 13), ("shared", 19)]
    assert corpus.chunks_of("unknown") == []
    for read in (corpus.text, corpus.chunk):
        with pytest.raises(KeyError):
            read("unknown")


def test_a_new_version_replaces_the_old_one_and_names_orphans(corpus: Corpus) -> None:
    put(corpus, "a", long("kept"), long("dropped"))
    assert put(corpus, "a", long("kept"), long("new")) == [chunk_id_of(long("dropped"))]
    assert set(texts_found(corpus, "new")) == {long("kept"), long("new")}
    found = corpus.chunk_index.find(f"{long('kept')} {long('dropped')} {long('new')}")
    assert [corpus.text(match.chunk_id) for match in found] == [long("kept"), long("new")]


def test_a_shared_text_is_stored_once_and_kept_while_a_document_holds_it(corpus: Corpus) -> None:
    put(corpus, "a", "shared", "only a", "shared")
    put(corpus, "b", "shared")
    assert len(corpus) == 2
    assert len(texts_found(corpus, "shared")) == 2, "each chunk is returned once"
    assert corpus.remove_source("a") == [chunk_id_of("only a")]
    assert corpus.chunk(chunk_id_of("shared")).source == "b"
    assert corpus.remove_source("b") == [chunk_id_of("shared")]
    assert corpus.remove_source("b") == []
    assert corpus.nearest(vector_of("shared"), 3) == []
    assert len(corpus) == 0
    assert corpus, "an empty corpus is a corpus"


def test_sources_of_a_path_are_the_file_its_lines_or_all_below(corpus: Corpus) -> None:
    inside = ["d/a.md", "d/e/b.txt", "d/x.jsonl#1", "d/x.jsonl#2"]
    for name in [*inside, "d2/a.md", "d%/a", "/abs/a"]:
        put(corpus, name)
    assert corpus.sources_of("d/x.jsonl") == inside[2:]
    assert corpus.sources_of("d/e/b") == []
    assert corpus.sources_of(Path("./d/a.md")) == inside[:1]
    assert corpus.sources_of(Path("d")) == inside
    assert corpus.sources_of("/") == ["/abs/a"], "relative ones are names"
    put(corpus, file := f"{Path.cwd()}/d2/a.md")
    assert corpus.sources_of("d2") == [file], "d2/a.md is the name of a text that is no file"


def test_a_failed_change_leaves_nothing_behind(corpus: Corpus) -> None:
    put(corpus, "a", "one")
    document = Document("a", "two", "T", {})
    for vectors in (np.zeros((2, DIM)), np.zeros((1, DIM + 1)), np.zeros(DIM)):
        with pytest.raises(InvalidInputError, match="vectors of"):
            corpus.put_document(document, "d", [chunk_of("two")], vectors)
    chunks: Any = [chunk_of("two"), "not a chunk"]
    with pytest.raises(AttributeError):
        corpus.put_document(document, "d", chunks, np.zeros((2, DIM)))
    assert [chunk.text for chunk in corpus.chunks_of("a")] == ["one"]
    assert len(corpus) == 1


def test_the_manifest_is_missing_until_set_and_guards_the_embedder(corpus: Corpus) -> None:
    other = replace(MANIFEST, embedder="other/model")
    assert corpus.manifest_or_none is None
    with pytest.raises(CorpusError, match="ingest first"):
        _ = corpus.manifest
    corpus.set_manifest(other)
    corpus.set_manifest(MANIFEST)
    put(corpus, "a", "one")
    with pytest.raises(CorpusError, match="embedded with 'minilm-offline', not 'other/model'"):
        corpus.set_manifest(other)
    same = "sentence-transformers/all-MiniLM-L6-v2"
    corpus.set_manifest(replace(MANIFEST, embedder=same))
    assert corpus.manifest.embedder == same


# -- vectors ------------------------------------------------------------------------------------


def test_what_is_known_of_the_file_is_read_again_when_anyone_changes_it(
    corpus: Corpus, tmp_path: Path
) -> None:
    asked: list[str] = []
    assert corpus.state() == (None, False)
    corpus.begin(MANIFEST)
    assert corpus.state() == (MANIFEST, False)
    put(corpus, "a", long("one"))
    corpus.file.connection.set_trace_callback(asked.append)
    assert corpus.state() == corpus.state() == (MANIFEST, True)
    assert asked[-1:] == ["PRAGMA data_version"]
    assert asked.count("PRAGMA data_version") < 9
    with Corpus.open(tmp_path) as other:
        other.remove_source("a")
        other.set_manifest(replace(MANIFEST, model="other"))
    assert corpus.state() == (replace(MANIFEST, model="other"), False)
    with suppress(KeyError), corpus.file.writing():
        corpus.file.set_meta("manifest", MANIFEST.to_json())
        assert corpus.state() == (MANIFEST, False)
        raise KeyError
    assert corpus.manifest.model == "other"


def test_chunks_are_read_together_as_one_by_one(corpus: Corpus) -> None:
    texts = [long(name) for name in ("one", "shared", "two")]
    put(corpus, "b", *texts[1:])
    put(corpus, "a", *texts[:2])
    ids = [*map(chunk_id_of, texts)]
    with corpus.file.writing() as connection:  # its first place, of two
        connection.execute("UPDATE passage SET end = 1 WHERE id = 1")
    found = corpus.chunks([*ids, "absent"])
    assert [*found] == ids
    assert found == {each: corpus.chunk(each) for each in ids}
    assert [each.source for each in found.values()] == ["a", "a", "b"]


def test_distances_are_euclidean_and_ascend(corpus: Corpus) -> None:
    texts = [f"text {i}" for i in range(20)]
    put(corpus, "a", *texts)
    expected = sorted((np.linalg.norm(vector_of(text) - vector_of("q")), text) for text in texts)
    hits = corpus.nearest(vector_of("q"), 5)
    assert [stored.text for stored, _ in hits] == [text for _, text in expected[:5]]
    assert [distance for _, distance in hits] == pytest.approx([d for d, _ in expected[:5]])
    with pytest.raises(InvalidInputError, match="expected"):
        corpus.nearest(np.zeros(DIM + 1, np.float32), 1)


def test_the_search_widens_until_enough_chunks_differ(corpus: Corpus) -> None:
    for i in range(20):
        put(corpus, f"copy {i}", "the same")
    put(corpus, "other", "another")
    assert texts_found(corpus, "the same", 2) == ["the same", "another"]


def test_vectors_known_under_a_title_need_no_embedding(corpus: Corpus) -> None:
    put(corpus, "a", "one", "two", title="T")
    known = corpus.known_vectors("T", [chunk_id_of("one"), chunk_id_of("new")])
    assert list(known) == [chunk_id_of("one")]
    assert np.array_equal(known[chunk_id_of("one")], vector_of("one"))
    assert corpus.known_vectors("another title", [chunk_id_of("one")]) == {}


def test_an_emptied_corpus_takes_vectors_of_any_length(corpus: Corpus) -> None:
    put(corpus, "a", "one", "two")
    assert len(texts_found(corpus, "one")) == 2
    corpus.remove_source("a")
    vector = np.ones((1, DIM + 3), np.float32)
    corpus.put_document(Document("b", "three", "T", {}), "d", [chunk_of("three")], vector)
    assert [stored.text for stored, _ in corpus.nearest(vector[0], 9)] == ["three"]


def test_a_search_sees_one_state_while_another_connection_writes(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(corpus, "a", "one", "two")
    read = vectors_module._vectors_of

    def meanwhile(*args: Any) -> Any:
        monkeypatch.setattr(vectors_module, "_vectors_of", read)
        with Corpus.open(tmp_path) as writer:
            writer.remove_source("a")
            put(writer, "b", "three")
        return read(*args)

    monkeypatch.setattr(vectors_module, "_vectors_of", meanwhile)
    assert set(texts_found(corpus, "one")) == {"one", "two"}
    assert texts_found(corpus, "one") == ["three"]


def test_a_search_that_fails_halfway_adds_no_vector_twice(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(corpus, "a", *(f"text {i}" for i in range(6)))
    read = vectors_module._vectors_of

    def fails_behind_the_first(file: Any, ids: np.ndarray, dim: int) -> Any:
        if ids[0] > 1:
            raise sqlite3.OperationalError("disk I/O error")
        return read(file, ids, dim)

    with monkeypatch.context() as patch:
        patch.setattr(vectors_module, "_BATCH", 2)
        patch.setattr(vectors_module, "_vectors_of", fails_behind_the_first)
        with pytest.raises(CorpusError, match="disk I/O error"):
            corpus.nearest(vector_of("query"), 9)
    assert len(texts_found(corpus, "query")) == 6
    assert corpus.vectors._index.ntotal == 6


# -- several users ------------------------------------------------------------------------------


def test_a_reader_sees_what_a_writer_commits(corpus: Corpus, tmp_path: Path) -> None:
    put(corpus, "a", long("one"))
    with Corpus.open(tmp_path, read_only=True) as reader:
        for texts in ["one"], ["one", "two"], ["two"], ["two", "three"]:
            put(corpus, "a", *map(long, texts))
            assert set(texts_found(reader, "x")) == set(map(long, texts))
            assert len(reader.chunk_index) == len(texts)


def test_threads_share_one_corpus(corpus: Corpus) -> None:
    def work(name: int) -> None:
        for i in range(8):
            put(corpus, f"{name}/{i}", long(f"{name} {i}"))
            corpus.nearest(vector_of("q"), 3)
            assert corpus.chunk_index.find(long(f"{name} {i}"))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert len(corpus) == 32


# -- opening and errors -------------------------------------------------------------------------


def test_a_corpus_that_cannot_be_opened_is_not_created(tmp_path: Path) -> None:
    for options in ({}, {"create": True, "read_only": True}):
        with pytest.raises(CorpusError, match="ingest first"):
            Corpus.open(tmp_path / "store", **options)
    assert not (tmp_path / "store").exists()
    (tmp_path / "store").write_text("x")
    for options, words in (({}, "is a file"), ({"create": True}, "cannot be made")):
        with pytest.raises(CorpusError, match=words):
            Corpus.open(tmp_path / "store", **options)
    corpus = Corpus.open(tmp_path, create=True)
    corpus.close()
    corpus.close()
    with pytest.raises(CorpusError, match="is closed"):
        corpus.sources()


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        (None, "not a corpus database"),
        ("CREATE TABLE theirs (x)", "of another program"),
        ("PRAGMA user_version = 99", "has format 99, expected 4.*newer blendrag"),
        ("PRAGMA user_version = 2", "has format 2, expected 4.*ingest again"),
    ],
)
def test_what_is_not_a_corpus_of_this_format_is_refused(
    tmp_path: Path, statement: str | None, words: str
) -> None:
    path = tmp_path / "corpus" / FILE_NAME
    Corpus.open(tmp_path, create=True).close()
    if statement is None:
        path.write_bytes(b"not a database, but long enough to be looked at" * 100)
    else:
        if "TABLE" in statement:
            path.unlink()
        with closing(sqlite3.connect(path)) as other:
            other.execute(statement)
    with pytest.raises(CorpusError, match=words):
        Corpus.open(tmp_path, create=True)


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (sqlite3.SQLITE_READONLY_DIRECTORY, CorpusError, "cannot be written, expected"),
        (sqlite3.SQLITE_CANTOPEN_ISDIR, CorpusError, "cannot be opened, expected"),
        (sqlite3.SQLITE_IOERR_READ, CorpusError, "expected a working disk"),
        (sqlite3.SQLITE_IOERR_FSYNC, StoreFullError, "no space left"),
        (sqlite3.SQLITE_FULL, StoreFullError, "no space left"),
        (None, CorpusError, "cannot be used"),
    ],
)
def test_an_error_of_sqlite_becomes_one_sentence(
    tmp_path: Path, code: int | None, kind: type[Exception], words: str
) -> None:
    error = sqlite3.OperationalError("as SQLite puts it")
    if code is not None:
        error.sqlite_errorcode = code
    said = mapped(error, tmp_path)
    assert isinstance(said, kind)
    assert words in str(said)
    assert str(tmp_path) in str(said)


def test_a_full_disk_costs_nothing_stored(corpus: Corpus) -> None:
    put(corpus, "a", "one")
    corpus.file.connection.execute("PRAGMA max_page_count = 1")  # SQLite then reports a full disk
    with pytest.raises(StoreFullError, match="no space left"):
        put(corpus, "b", *(f"text {i} " * 200 for i in range(50)))
    assert corpus.sources() == ["a"]
    corpus.file.connection.execute("PRAGMA max_page_count = 1000000")
    put(corpus, "b", "two")
    assert corpus.sources() == ["a", "b"]


# -- reading only -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "is_writable"),
    [
        ({"read_only": True}, True),
        ({}, False),
        ({"create": True}, False),
        ({"read_only": True}, False),
    ],
)
def test_a_corpus_opened_for_reading_is_searched_and_never_changed(
    tmp_path: Path, options: dict[str, bool], is_writable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As asked, or because the file system is read-only."""
    root = tmp_path / "a store? 100%"
    with Corpus.open(root, create=True) as corpus:
        corpus.set_manifest(MANIFEST)
        put(corpus, "a", long("one"), long("two"))
    before = {path: path.read_bytes() for path in (root / "corpus").iterdir()}
    if not is_writable:
        real, connect = os.access, sqlite3.connect

        def refuse(database: object, **kwargs: object) -> sqlite3.Connection:
            assert "immutable=1" in str(database), "SQLite would try to create files"
            return connect(database, **kwargs)

        monkeypatch.setattr(
            os, "access", lambda path, mode: not mode & os.W_OK and real(path, mode)
        )
        monkeypatch.setattr(sqlite3, "connect", refuse)
    with Corpus.open(root, **options) as corpus:
        assert corpus.read_only
        assert corpus.manifest == MANIFEST
        assert texts_found(corpus, long("two"), 1) == [long("two")]
        assert len(corpus.chunk_index) == 2
        for change in (
            lambda: put(corpus, "new", long("new")),
            lambda: corpus.set_manifest(MANIFEST),
            lambda: corpus.remove_source("a"),
        ):
            with pytest.raises(
                CorpusError, match=r"is read-only.*without read_only.*another store"
            ):
                change()
    assert {path: path.read_bytes() for path in before} == before
    assert is_writable or set((root / "corpus").iterdir()) == set(before)
