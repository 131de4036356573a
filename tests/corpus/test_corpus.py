"""The corpus keeps texts, hashes and vectors together through every change."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
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
from corpus.corpus_fuzz import DIM, MANIFEST, chunk_of, vector_of


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
        assert corpus.chunk_ids() == [chunk_id_of(long("one")), chunk_id_of(long("zwei ü 世界"))]
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
    chunks = corpus.chunks_of("a")
    assert [chunk.text for chunk in chunks] == ["first", "shared", "third", "shared"]
    assert [chunk.start for chunk in chunks] == [0, 6, 13, 19]
    assert corpus.chunks_of("unknown") == []
    for read in (corpus.text, corpus.chunk):
        with pytest.raises(KeyError):
            read("unknown")


def test_an_empty_corpus_is_a_corpus(corpus: Corpus) -> None:
    assert corpus
    assert put(corpus, "a") == []
    assert corpus.sources() == ["a"]
    assert corpus.nearest(np.zeros(DIM, np.float32), 3) == []


def test_a_new_version_replaces_the_old_one_and_names_orphans(corpus: Corpus) -> None:
    put(corpus, "a", "kept", "dropped")
    before = corpus.document_digest("a")
    assert put(corpus, "a", "kept", "new") == [chunk_id_of("dropped")]
    assert corpus.document_digest("a") != before
    assert set(texts_found(corpus, "new")) == {"kept", "new"}
    assert corpus.document_digest("unknown") is None


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


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("d/x.jsonl", ["d/x.jsonl#1", "d/x.jsonl#2"]),
        ("d/e/b", []),
        (Path("./d/a.md"), ["d/a.md"]),
        (Path("d"), ["d/a.md", "d/e/b.txt", "d/x.jsonl#1", "d/x.jsonl#2"]),
        (".", ["d%/a", "d/a.md", "d/e/b.txt", "d/x.jsonl#1", "d/x.jsonl#2", "d2/a.md"]),
        ("/", ["/abs/a"]),
    ],
)
def test_sources_of_a_path_are_the_file_its_lines_or_all_below(
    corpus: Corpus, path: Path | str, expected: list[str]
) -> None:
    for name in ["d/a.md", "d/x.jsonl#1", "d/x.jsonl#2", "d2/a.md", "d/e/b.txt", "d%/a", "/abs/a"]:
        put(corpus, name)
    assert corpus.sources_of(path) == expected


def test_the_chunk_index_follows_every_change(corpus: Corpus) -> None:
    prompt = f"{long('one')} {long('two')} {long('three')}"
    put(corpus, "a", long("one"), long("two"))
    assert len(corpus.chunk_index.find(prompt)) == 2
    put(corpus, "a", long("three"))
    assert [corpus.text(m.chunk_id) for m in corpus.chunk_index.find(prompt)] == [long("three")]


def test_a_failed_change_leaves_nothing_behind(corpus: Corpus) -> None:
    put(corpus, "a", "one")
    document = Document("a", "two", "T", {})
    for vectors in (np.zeros((2, DIM)), np.zeros((1, DIM + 1)), np.zeros(DIM)):
        with pytest.raises(InvalidInputError, match="vectors of"):
            corpus.put_document(document, "d", [chunk_of("two")], vectors)
    chunks: Any = [chunk_of("two"), "not a chunk"]
    with pytest.raises(AttributeError):
        corpus.put_document(document, "d", chunks, np.zeros((2, DIM)))
    assert corpus.chunk_ids() == [chunk_id_of("one")]
    assert corpus.document_digest("a") is not None


def test_the_manifest_is_missing_until_set_and_guards_the_embedder(corpus: Corpus) -> None:
    other = replace(MANIFEST, embedder="other/model")
    assert not corpus.has_manifest
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


def test_distances_are_euclidean_and_ascend(corpus: Corpus) -> None:
    put(corpus, "a", *(f"text {i}" for i in range(20)))
    hits = corpus.nearest(vector_of("query"), 5)
    assert [distance for _, distance in hits] == sorted(distance for _, distance in hits)
    for stored, distance in hits:
        expected = np.linalg.norm(vector_of(stored.text) - vector_of("query"))
        assert distance == pytest.approx(expected, abs=1e-5)
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
    ((stored, distance),) = corpus.nearest(vector[0], 9)
    assert (stored.text, distance) == ("three", 0)


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
    monkeypatch.setattr(vectors_module, "_BATCH", 2)
    read, calls = vectors_module._vectors_of, []

    def fails_once(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise sqlite3.OperationalError("disk I/O error")
        return read(*args)

    monkeypatch.setattr(vectors_module, "_vectors_of", fails_once)
    with pytest.raises(CorpusError, match="disk I/O error"):
        corpus.nearest(vector_of("query"), 9)
    assert len(texts_found(corpus, "query")) == 6
    assert corpus.vectors._index.ntotal == 6


# -- several users ------------------------------------------------------------------------------


def test_another_process_sees_changes_at_once(corpus: Corpus, tmp_path: Path) -> None:
    put(corpus, "a", long("one"))
    assert len(corpus.chunk_index) == len(texts_found(corpus, "x")) == 1
    script = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[2])\n"
        "from corpus.corpus_fuzz import change; change(Path(sys.argv[1]))"
    )
    tests = str(Path(__file__).parent.parent)
    subprocess.run([sys.executable, "-c", script, tmp_path, tests], check=True)
    assert len(corpus.chunk_index) == len(texts_found(corpus, "x")) == 4


def test_threads_share_one_corpus(corpus: Corpus) -> None:
    errors: list[BaseException] = []

    def work(name: int) -> None:
        try:
            for i in range(8):
                put(corpus, f"{name}/{i}", long(f"{name} {i}"))
                corpus.nearest(vector_of("q"), 3)
                assert corpus.chunk_index.find(long(f"{name} {i}"))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(corpus) == 32


# -- opening and errors -------------------------------------------------------------------------


def test_an_absent_corpus_says_ingest_first_and_is_not_created(tmp_path: Path) -> None:
    for options in ({}, {"create": True, "read_only": True}):
        with pytest.raises(CorpusError, match="ingest first"):
            Corpus.open(tmp_path / "store", **options)
    assert not (tmp_path / "store").exists()
    path = tmp_path / "corpus" / FILE_NAME
    path.parent.mkdir()
    path.touch()
    with pytest.raises(CorpusError, match="is empty"):
        Corpus.open(tmp_path, read_only=True)
    assert path.stat().st_size == 0


def test_a_store_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("x")
    for options, words in (({}, "is a file"), ({"create": True}, "cannot be made")):
        with pytest.raises(CorpusError, match=words):
            Corpus.open(tmp_path / "store", **options)


def test_what_is_not_a_corpus_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "corpus" / FILE_NAME
    path.parent.mkdir()
    path.write_bytes(b"not a database, but long enough to be looked at" * 100)
    with pytest.raises(CorpusError, match="not a corpus database"):
        Corpus.open(tmp_path)
    path.unlink()
    with sqlite3.connect(path) as foreign:
        foreign.execute("CREATE TABLE theirs (x)")
    foreign.close()
    with pytest.raises(CorpusError, match="of another program"):
        Corpus.open(tmp_path, create=True)


@pytest.mark.parametrize(("version", "words"), [(99, "newer blendrag"), (2, "ingest again")])
def test_a_corpus_of_another_format_is_refused(tmp_path: Path, version: int, words: str) -> None:
    Corpus.open(tmp_path, create=True).close()
    with sqlite3.connect(tmp_path / "corpus" / FILE_NAME) as other:
        other.execute(f"PRAGMA user_version = {version}")
    other.close()
    with pytest.raises(CorpusError, match=f"has format {version}, expected 3.*{words}"):
        Corpus.open(tmp_path)


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
    corpus._file.connection.execute("PRAGMA max_page_count = 1")  # SQLite then reports a full disk
    with pytest.raises(StoreFullError, match="no space left"):
        put(corpus, "b", *(f"text {i} " * 200 for i in range(50)))
    assert corpus.sources() == ["a"]
    corpus._file.connection.execute("PRAGMA max_page_count = 1000000")
    put(corpus, "b", "two")
    assert corpus.sources() == ["a", "b"]


def test_a_closed_corpus_says_so(tmp_path: Path) -> None:
    corpus = Corpus.open(tmp_path, create=True)
    corpus.close()
    corpus.close()
    with pytest.raises(CorpusError, match="is closed"):
        corpus.sources()


# -- reading only -------------------------------------------------------------------------------


def assert_refuses_changes(corpus: Corpus) -> None:
    for change in (
        lambda: put(corpus, "new", long("new")),
        lambda: corpus.set_manifest(MANIFEST),
        lambda: corpus.remove_source("a"),
    ):
        with pytest.raises(CorpusError, match=r"is read-only.*--store"):
            change()


def files_of(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((root / "corpus").iterdir())}


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    root = tmp_path / "a store? 100%"
    with Corpus.open(root, create=True) as corpus:
        corpus.set_manifest(MANIFEST)
        put(corpus, "a", long("one"), long("two"))
    return root


def test_a_corpus_opened_read_only_is_searched_and_never_changed(filled: Path) -> None:
    before = files_of(filled)
    with Corpus.open(filled, read_only=True) as corpus:
        assert corpus.manifest == MANIFEST
        assert texts_found(corpus, long("two"), 1) == [long("two")]
        assert len(corpus.chunk_index) == 2
        assert_refuses_changes(corpus)
    assert files_of(filled)[FILE_NAME] == before[FILE_NAME]


def test_a_reader_sees_what_a_writer_commits(filled: Path) -> None:
    with Corpus.open(filled, read_only=True) as reader, Corpus.open(filled) as writer:
        put(writer, "b", long("three"))
        assert reader.sources() == ["a", "b"]
        assert texts_found(reader, long("three"), 1) == [long("three")]


@pytest.mark.parametrize("options", [{}, {"create": True}, {"read_only": True}])
def test_a_corpus_on_a_read_only_file_system_is_opened_for_reading(
    filled: Path, options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, connect = os.access, sqlite3.connect
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and real(path, mode))

    def refuse(database: object, **kwargs: object) -> sqlite3.Connection:
        assert "immutable=1" in str(database), "SQLite would try to create files"
        return connect(database, **kwargs)

    monkeypatch.setattr(sqlite3, "connect", refuse)
    before = files_of(filled)
    with Corpus.open(filled, **options) as corpus:
        assert corpus.read_only
        assert texts_found(corpus, long("one"), 1) == [long("one")]
        assert_refuses_changes(corpus)
    assert files_of(filled) == before
