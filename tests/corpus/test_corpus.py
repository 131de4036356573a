"""The corpus keeps texts, anchors and vectors together through every change."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blendrag.corpus import vectors as vector_index
from blendrag.corpus.corpus import Corpus
from blendrag.corpus.database import FILE_NAME, mapped
from blendrag.corpus.manifest import Manifest
from blendrag.errors import CorpusError, InvalidInputError, StoreFullError
from blendrag.text.chunking import Chunk, chunk_id_of
from blendrag.text.readers import Document, digest_of

DIM = 8
MANIFEST = Manifest("m", "sig", "tok", "ns", 512, (1, 2), "<s>\n", "minilm-offline")


def vector_of(text: str) -> np.ndarray:
    """A unit vector that depends on the text alone."""
    rng = np.random.default_rng(int(chunk_id_of(text)[:8], 16))
    vector = rng.standard_normal(DIM).astype(np.float32)
    return vector / np.linalg.norm(vector)


def put(corpus: Corpus, source: str, *texts: str, title: str = "T") -> list[str]:
    document = Document(source, "\n".join(texts), title, {"year": 1871})
    chunks, at = [], 0
    for text in texts:
        chunks.append(Chunk(text, at, at + len(text), len(text.split()), chunk_id_of(text)))
        at += len(text) + 1
    vectors = np.stack([vector_of(text) for text in texts]) if texts else np.zeros((0, DIM))
    return corpus.put_document(document, digest_of(document), chunks, vectors)


def texts_found(corpus: Corpus, text: str, k: int) -> list[str]:
    return [stored.text for stored, _ in corpus.nearest(vector_of(text), k)]


def long(text: str) -> str:
    return f"{text}: a sentence that is longer than any anchor needs to be, by far."


@pytest.fixture
def corpus(tmp_path: Path) -> Iterator[Corpus]:
    with Corpus.open(tmp_path, create=True) as opened:
        yield opened


def test_what_was_put_is_there_after_opening_again(tmp_path: Path) -> None:
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


def test_chunks_of_a_document_come_in_its_order(corpus: Corpus) -> None:
    put(corpus, "b", "shared", "second")
    put(corpus, "a", "first", "shared", "third", "shared")
    chunks = corpus.chunks_of("a")
    assert [chunk.text for chunk in chunks] == ["first", "shared", "third", "shared"]
    assert [chunk.start for chunk in chunks] == [0, 6, 13, 19]
    assert corpus.chunks_of("unknown") == []


def test_an_empty_corpus_is_a_corpus(corpus: Corpus) -> None:
    assert corpus
    assert put(corpus, "a") == []
    assert corpus.sources() == ["a"]
    assert corpus.nearest(np.zeros(DIM, np.float32), 3) == []


def test_a_full_disk_is_said_in_words_and_costs_nothing_stored(corpus: Corpus) -> None:
    put(corpus, "a", "one")
    corpus._file.connection.execute("PRAGMA max_page_count = 1")  # SQLite then reports a full disk
    with pytest.raises(StoreFullError, match="no space left"):
        put(corpus, "b", *(f"text {i} " * 200 for i in range(50)))
    assert corpus.sources() == ["a"]
    corpus._file.connection.execute("PRAGMA max_page_count = 1000000")
    put(corpus, "b", "two")
    assert corpus.sources() == ["a", "b"]


def test_distances_are_euclidean_and_ascend(corpus: Corpus) -> None:
    put(corpus, "a", *(f"text {i}" for i in range(20)))
    hits = corpus.nearest(vector_of("query"), 5)
    distances = [distance for _, distance in hits]
    assert distances == sorted(distances)
    for stored, distance in hits:
        expected = np.linalg.norm(vector_of(stored.text) - vector_of("query"))
        assert distance == pytest.approx(expected, abs=1e-5)


def test_a_new_version_replaces_the_old_one_and_names_orphans(corpus: Corpus) -> None:
    put(corpus, "a", "kept", "dropped")
    before = corpus.document_digest("a")
    assert put(corpus, "a", "kept", "new") == [chunk_id_of("dropped")]
    assert corpus.document_digest("a") != before
    assert texts_found(corpus, "new", 9)[0] == "new"
    assert set(texts_found(corpus, "new", 9)) == {"kept", "new"}
    assert corpus.document_digest("unknown") is None


def test_a_text_shared_by_documents_is_stored_once_and_kept_while_one_holds_it(
    corpus: Corpus,
) -> None:
    put(corpus, "a", "shared", "only a", "shared")
    put(corpus, "b", "shared")
    assert len(corpus) == 2
    assert len(texts_found(corpus, "shared", 9)) == 2, "each chunk is returned once"
    assert corpus.remove_source("a") == [chunk_id_of("only a")]
    assert corpus.chunk(chunk_id_of("shared")).source == "b"
    assert corpus.remove_source("b") == [chunk_id_of("shared")]
    assert corpus.remove_source("b") == []
    assert corpus.nearest(vector_of("shared"), 3) == []
    assert len(corpus) == 0


def test_the_search_widens_until_enough_chunks_differ(corpus: Corpus) -> None:
    for i in range(50):
        put(corpus, f"copy {i}", "the same")
    put(corpus, "other", "another")
    assert texts_found(corpus, "the same", 2) == ["the same", "another"]


def test_removing_a_path_takes_the_file_its_lines_or_all_below(corpus: Corpus) -> None:
    names = ["d/a.md", "d/x.jsonl#1", "d/x.jsonl#2", "d2/a.md", "d/e/b.txt", "d%/a", "/abs/a"]
    for name in names:
        put(corpus, name, f"text of {name}")
    assert len(corpus.remove_path(Path("d/x.jsonl"))) == 2
    assert corpus.remove_path("d/e/b") == []
    assert corpus.remove_path(Path("./d/a.md")) == [chunk_id_of("text of d/a.md")]
    assert corpus.remove_path(Path("d")) == [chunk_id_of("text of d/e/b.txt")]
    assert corpus.sources() == ["/abs/a", "d%/a", "d2/a.md"]
    assert len(corpus.remove_path(Path("."))) == 2
    assert len(corpus.remove_path(Path("/"))) == 1


def test_anchors_follow_every_change(corpus: Corpus) -> None:
    prompt = f"{long('one')} {long('two')} {long('three')}"
    put(corpus, "a", long("one"), long("two"))
    assert len(corpus.chunk_index.find(prompt)) == 2
    put(corpus, "a", long("three"))
    assert [corpus.text(m.chunk_id) for m in corpus.chunk_index.find(prompt)] == [long("three")]


def test_vectors_known_under_a_title_need_no_embedding(corpus: Corpus) -> None:
    put(corpus, "a", "one", "two", title="T")
    known = corpus.known_vectors("T", [chunk_id_of("one"), chunk_id_of("new")])
    assert list(known) == [chunk_id_of("one")]
    assert np.array_equal(known[chunk_id_of("one")], vector_of("one"))
    assert corpus.known_vectors("another title", [chunk_id_of("one")]) == {}


def test_a_failed_change_leaves_nothing_behind(corpus: Corpus) -> None:
    put(corpus, "a", "one")
    bad = Chunk("two", 0, 3, 1, chunk_id_of("two"))
    document = Document("a", "two", "T", {})
    for vectors in (np.zeros((2, DIM)), np.zeros((1, DIM + 1)), np.zeros(DIM)):
        with pytest.raises(InvalidInputError, match="vectors of"):
            corpus.put_document(document, "d", [bad], vectors)
    with pytest.raises(AttributeError):
        corpus.put_document(document, "d", [bad, "not a chunk"], np.zeros((2, DIM)))  # type: ignore[list-item]
    assert corpus.chunk_ids() == [chunk_id_of("one")]
    assert corpus.document_digest("a") is not None
    with pytest.raises(InvalidInputError, match="expected"):
        corpus.nearest(np.zeros(DIM + 1, np.float32), 1)


def test_the_vector_cache_is_only_a_cache(tmp_path: Path) -> None:
    cache = tmp_path / "corpus" / "vectors.faiss"
    with Corpus.open(tmp_path, create=True) as corpus:
        put(corpus, "a", *(f"text {i}" for i in range(30)))
        expected = texts_found(corpus, "query", 5)
    good = cache.read_bytes()
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 1
    for content in (b"", b"BLRGVEC1", good[:-1], bytes(flipped), good):
        cache.write_bytes(content)
        with Corpus.open(tmp_path) as corpus:
            assert texts_found(corpus, "query", 5) == expected
    cache.unlink()
    with Corpus.open(tmp_path) as corpus:
        assert texts_found(corpus, "query", 5) == expected
    assert cache.read_bytes() == good


def test_an_old_vector_cache_is_brought_up_to_date(tmp_path: Path) -> None:
    with Corpus.open(tmp_path, create=True) as corpus:
        put(corpus, "a", "one", "two")
        put(corpus, "b", "three")
        texts_found(corpus, "one", 1)
    with Corpus.open(tmp_path) as corpus:  # changed without a search: the cache stays old
        corpus.remove_source("a")
        put(corpus, "c", "four")
    with Corpus.open(tmp_path) as corpus:
        assert set(texts_found(corpus, "one", 9)) == {"three", "four"}


def found_where_it_is(corpus: Corpus, text: str) -> bool:
    """Whether ``text`` is the nearest to its own vector, by the vector that was stored with it."""
    (stored, distance), *_ = corpus.nearest(vector_of(text), 1)
    return stored.text == text and distance < 1e-3


def remove_database(root: Path) -> None:
    for file in (root / "corpus").glob(f"{FILE_NAME}*"):
        file.unlink()


def test_a_corpus_made_anew_does_not_take_the_vectors_of_the_old_one(tmp_path: Path) -> None:
    with Corpus.open(tmp_path, create=True) as corpus:
        put(corpus, "a", "one", "two")
        assert found_where_it_is(corpus, "one")
    remove_database(tmp_path)
    with Corpus.open(tmp_path, create=True) as corpus:
        put(corpus, "b", "three", "four")  # passages of the same ids
        assert found_where_it_is(corpus, "three")
        assert found_where_it_is(corpus, "four")


def test_a_backup_brought_back_does_not_take_the_vectors_of_its_future(tmp_path: Path) -> None:
    path = tmp_path / "corpus" / FILE_NAME
    with Corpus.open(tmp_path, create=True) as corpus:
        put(corpus, "a", "one")
    backup = path.read_bytes()
    with Corpus.open(tmp_path) as corpus:
        put(corpus, "b", "two", "three")
        assert found_where_it_is(corpus, "two")
    remove_database(tmp_path)
    path.write_bytes(backup)
    with Corpus.open(tmp_path, read_only=True) as corpus:
        assert texts_found(corpus, "two", 9) == ["one"]
    with Corpus.open(tmp_path) as corpus:
        for name in ("four", "five", "six"):  # ids and generations that were given before
            put(corpus, name, name)
    with Corpus.open(tmp_path) as corpus:
        for name in ("one", "four", "five", "six"):
            assert found_where_it_is(corpus, name)


def test_a_corpus_that_lost_its_id_is_searched_without_the_cache(tmp_path: Path) -> None:
    with Corpus.open(tmp_path, create=True) as corpus:
        put(corpus, "a", "one")
        assert found_where_it_is(corpus, "one")
    with sqlite3.connect(tmp_path / "corpus" / FILE_NAME) as damaged:
        damaged.execute("DELETE FROM meta WHERE key = 'corpus_id'")
    damaged.close()
    for read_only in (True, False):
        with Corpus.open(tmp_path, read_only=read_only) as corpus:
            assert found_where_it_is(corpus, "one")


def test_an_emptied_corpus_takes_vectors_of_any_length(corpus: Corpus) -> None:
    put(corpus, "a", "one", "two")
    assert len(texts_found(corpus, "one", 9)) == 2
    corpus.remove_source("a")
    chunk = Chunk("three", 0, 5, 1, chunk_id_of("three"))
    vector = np.ones((1, DIM + 3), np.float32)
    corpus.put_document(Document("b", "three", "T", {}), "d", [chunk], vector)
    ((stored, distance),) = corpus.nearest(vector[0], 9)
    assert stored.text == "three"
    assert distance == 0


def test_a_search_sees_one_state_while_another_connection_writes(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(corpus, "a", "one", "two")
    read = vector_index._vectors_of

    def meanwhile(*args: Any) -> np.ndarray:
        monkeypatch.setattr(vector_index, "_vectors_of", read)
        with Corpus.open(tmp_path) as writer:
            writer.remove_source("a")
            put(writer, "b", "three")
        return read(*args)

    monkeypatch.setattr(vector_index, "_vectors_of", meanwhile)
    assert set(texts_found(corpus, "one", 9)) == {"one", "two"}
    assert texts_found(corpus, "one", 9) == ["three"]


def test_a_search_that_fails_halfway_adds_no_vector_twice(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(corpus, "a", *(f"text {i}" for i in range(6)))
    monkeypatch.setattr(vector_index, "_BATCH", 2)
    read, calls = vector_index._vectors_of, []

    def fails_once(*args: Any) -> np.ndarray:
        calls.append(args)
        if len(calls) == 2:
            raise sqlite3.OperationalError("disk I/O error")
        return read(*args)

    monkeypatch.setattr(vector_index, "_vectors_of", fails_once)
    with pytest.raises(CorpusError, match="disk I/O error"):
        corpus.nearest(vector_of("query"), 9)
    assert len(texts_found(corpus, "query", 9)) == 6
    assert corpus.vectors._index.ntotal == 6


def test_another_process_sees_changes_at_once(corpus: Corpus, tmp_path: Path) -> None:
    put(corpus, "a", long("one"))
    assert len(corpus.chunk_index) == len(texts_found(corpus, "x", 9)) == 1
    script = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from pathlib import Path; from tests_corpus import put, long; "
        "from blendrag.corpus import Corpus\n"
        "with Corpus.open(Path(sys.argv[1])) as corpus:\n"
        "    put(corpus, 'b', long('two'))\n"
    )
    (tmp_path / "tests_corpus.py").write_bytes(Path(__file__).read_bytes())
    subprocess.run([sys.executable, "-c", script, tmp_path, tmp_path], check=True)
    assert len(corpus.chunk_index) == len(texts_found(corpus, "x", 9)) == 2


def test_threads_share_one_corpus(corpus: Corpus) -> None:
    errors: list[BaseException] = []

    def work(name: int) -> None:
        try:
            for i in range(15):
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
    assert len(corpus) == 60


def test_the_manifest_is_missing_until_set_and_guards_the_embedder(corpus: Corpus) -> None:
    assert not corpus.has_manifest
    with pytest.raises(CorpusError, match="ingest first"):
        _ = corpus.manifest
    corpus.set_manifest(MANIFEST)
    corpus.set_manifest(Manifest(**{**vars(MANIFEST), "embedder": "other/model"}))
    corpus.set_manifest(MANIFEST)
    put(corpus, "a", "one")
    with pytest.raises(CorpusError, match="embedded with 'minilm-offline', not 'other/model'"):
        corpus.set_manifest(Manifest(**{**vars(MANIFEST), "embedder": "other/model"}))
    same = "sentence-transformers/all-MiniLM-L6-v2"
    corpus.set_manifest(Manifest(**{**vars(MANIFEST), "embedder": same}))
    assert corpus.manifest.embedder == same


def test_an_absent_corpus_says_ingest_first_and_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="ingest first"):
        Corpus.open(tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_a_store_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("x")
    with pytest.raises(CorpusError, match="cannot be made"):
        Corpus.open(tmp_path / "store", create=True)


def test_what_is_not_a_corpus_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "corpus" / FILE_NAME
    path.parent.mkdir()
    path.write_bytes(b"not a database, but long enough to be looked at" * 100)
    with pytest.raises(CorpusError, match="not a corpus database"):
        Corpus.open(tmp_path)
    path.unlink()
    with sqlite3.connect(path) as foreign:
        foreign.execute("CREATE TABLE theirs (x)")
    foreign.close()
    with pytest.raises(CorpusError, match="some other program's"):
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
def test_an_error_of_sqlite_is_said_in_a_sentence(
    tmp_path: Path, code: int | None, kind: type[Exception], words: str
) -> None:
    error = sqlite3.OperationalError("as SQLite puts it")
    if code is not None:
        error.sqlite_errorcode = code
    said = mapped(error, tmp_path)
    assert isinstance(said, kind)
    assert words in str(said)
    assert str(tmp_path) in str(said)


def test_a_database_that_turns_read_only_says_so(corpus: Corpus) -> None:
    corpus._file.connection.execute("PRAGMA query_only = ON")  # SQLite then reports SQLITE_READONLY
    with pytest.raises(CorpusError, match=r"cannot be written.*permission.*--store"):
        put(corpus, "a", "one")


def test_a_newer_corpus_is_refused(tmp_path: Path) -> None:
    Corpus.open(tmp_path, create=True).close()
    with sqlite3.connect(tmp_path / "corpus" / FILE_NAME) as newer:
        newer.execute("PRAGMA user_version = 99")
    newer.close()
    with pytest.raises(CorpusError, match="newer blendrag"):
        Corpus.open(tmp_path)


def test_a_closed_corpus_says_so(tmp_path: Path) -> None:
    corpus = Corpus.open(tmp_path, create=True)
    corpus.close()
    corpus.close()
    with pytest.raises(CorpusError, match="is closed"):
        corpus.sources()


def refuses_every_change(corpus: Corpus) -> bool:
    changes = (
        lambda: put(corpus, "new", long("new")),
        lambda: corpus.set_manifest(MANIFEST),
        lambda: corpus.remove_source("a"),
        lambda: corpus.remove_path("a"),
    )
    for change in changes:
        with pytest.raises(CorpusError, match=r"is read-only.*--store"):
            change()
    return True


def as_a_reader_sees(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((root / "corpus").iterdir())}


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    root = tmp_path / "a store? 100%"
    with Corpus.open(root, create=True) as corpus:
        corpus.set_manifest(MANIFEST)
        put(corpus, "a", long("one"), long("two"))
    return root


@pytest.fixture
def unwritable(filled: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As on a file system mounted read-only: nothing may be written, not by root either."""
    real, connect = os.access, sqlite3.connect
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and real(path, mode))

    def refuse(database: object, **kwargs: object) -> sqlite3.Connection:
        assert "immutable=1" in str(database), "SQLite would want to write beside the file"
        return connect(database, **kwargs)

    monkeypatch.setattr(sqlite3, "connect", refuse)
    return filled


def test_a_corpus_opened_read_only_is_searched_and_never_changed(filled: Path) -> None:
    before = as_a_reader_sees(filled)
    with Corpus.open(filled, read_only=True) as corpus:
        assert corpus.read_only
        assert corpus.manifest == MANIFEST
        assert texts_found(corpus, long("two"), 1) == [long("two")]
        assert len(list(corpus.chunk_index.rows())) == 2
        assert refuses_every_change(corpus)
    after = as_a_reader_sees(filled)
    assert after[FILE_NAME] == before[FILE_NAME]
    assert "vectors.faiss" not in after  # closing writes no cache


def test_a_reader_sees_what_a_writer_commits_meanwhile(filled: Path) -> None:
    with Corpus.open(filled, read_only=True) as reader, Corpus.open(filled) as writer:
        put(writer, "b", long("three"))
        assert reader.sources() == ["a", "b"]
        assert texts_found(reader, long("three"), 1) == [long("three")]


@pytest.mark.parametrize("options", [{}, {"create": True}, {"read_only": True}])
def test_a_corpus_that_cannot_be_written_is_opened_for_reading(
    unwritable: Path, options: dict[str, bool]
) -> None:
    before = as_a_reader_sees(unwritable)
    with Corpus.open(unwritable, **options) as corpus:
        assert corpus.read_only
        assert texts_found(corpus, long("one"), 1) == [long("one")]
        assert refuses_every_change(corpus)
    assert as_a_reader_sees(unwritable) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_permissions_alone_make_a_corpus_read_only(filled: Path) -> None:
    (filled / "corpus").chmod(0o500)
    try:
        with Corpus.open(filled) as corpus:
            assert texts_found(corpus, long("one"), 1) == [long("one")]
            assert refuses_every_change(corpus)
    finally:
        (filled / "corpus").chmod(0o700)


def test_reading_where_no_corpus_is_makes_none(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="ingest first"):
        Corpus.open(tmp_path / "store", create=True, read_only=True)
    assert not (tmp_path / "store").exists()
    path = tmp_path / "corpus" / FILE_NAME
    path.parent.mkdir()
    path.touch()
    with pytest.raises(CorpusError, match="is empty"):
        Corpus.open(tmp_path, read_only=True)
    assert path.stat().st_size == 0


def test_an_unknown_chunk_is_a_key_error(corpus: Corpus) -> None:
    with pytest.raises(KeyError):
        corpus.text("unknown")
    with pytest.raises(KeyError):
        corpus.chunk("unknown")


def test_a_killed_writer_leaves_the_last_whole_document(tmp_path: Path) -> None:
    corpus = Corpus.open(tmp_path, create=True)
    put(corpus, "a", "one")
    corpus._file.connection.execute("BEGIN IMMEDIATE")
    corpus._file.connection.execute("DELETE FROM document")
    corpus._file.connection.close()  # as a killed process would: no commit
    with Corpus.open(tmp_path) as again:
        assert again.sources() == ["a"]
        assert texts_found(again, "one", 1) == ["one"]
