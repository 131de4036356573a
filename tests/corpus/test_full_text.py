"""The full-text index has the passages of the corpus, whatever happens to either."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from blendrag.corpus import full_text
from blendrag.corpus.corpus import Corpus, check_corpus
from blendrag.corpus.database import FILE_NAME
from blendrag.corpus.search import SearchQuery
from blendrag.errors import CorpusError
from blendrag.store import databases
from blendrag.text.readers import Document
from corpus.small_corpus import change, chunk_of, make_corpus, put, text_of, vector_of

#: Makes a corpus one that has lost its index.
LOST = ("DROP TABLE full_text", "DELETE FROM meta WHERE key = 'full_text'")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_corpus(tmp_path / "store")
    return tmp_path / "store"


def execute(root: Path, *statements: str) -> list[tuple]:
    rows: list[tuple] = []
    with closing(sqlite3.connect(root / "corpus" / FILE_NAME, isolation_level=None)) as connection:
        for statement in statements:
            rows = connection.execute(statement).fetchall()
    return rows


def lexical(corpus: Corpus, text: str, k: int = 3, allowed: np.ndarray | None = None) -> list[str]:
    """Texts that are found by words, after the index was prepared."""
    mode = corpus.searches.available("lexical")
    (hits,) = corpus.searches.find([SearchQuery(text, None, mode)], k, lambda: allowed)
    return [found.chunk.text for found in hits]


def indexed(corpus: Corpus) -> list[tuple]:
    """The rows of the index, which must be those of the passages that search finds."""
    searchable = "SELECT id FROM passage WHERE length(vector) > 0 ORDER BY id"
    ids = corpus.file.rows("SELECT rowid FROM full_text ORDER BY rowid")
    assert ids == corpus.file.rows(searchable)
    assert corpus.searches.full_text.faults() == []
    return ids


def test_identifiers_are_found_whole_and_by_parts(tmp_path: Path) -> None:
    texts = ["After ERR_42-7 wait.", "After ERR_42-8 wait.", "def getUserName(self)", "In Zürich"]
    with Corpus.open(tmp_path, create=True) as corpus:
        chunks = [chunk_of(text) for text in texts]
        vectors = np.stack([vector_of(text) for text in texts])
        corpus.put_document(Document("a.md", "", "Manual"), "d", chunks, vectors)
        assert lexical(corpus, "What is ERR_42-7?")[0] == texts[0]
        assert lexical(corpus, "err42-8")[0] == texts[1]
        assert lexical(corpus, "get_user_name") == [texts[2]]
        assert lexical(corpus, "user") == [texts[2]]
        assert lexical(corpus, "ZURICH") == [texts[3]]
        assert len(lexical(corpus, "manual", 9)) == 4, "the title is searched"
        assert lexical(corpus, "After wait", allowed=np.array([2])) == [texts[1]]


def test_changes_of_documents_change_the_index(root: Path) -> None:
    with Corpus.open(root) as corpus:
        before = indexed(corpus)
        assert lexical(corpus, "document 0 lamp 2")[0] == text_of(0, 2)
    change(root)
    with Corpus.open(root) as corpus:
        assert len(indexed(corpus)) == len(before) - 3
        assert text_of(0, 2) not in lexical(corpus, "document 0 lamp 2", 99)
        corpus.entries.remove(["id1"])
        assert len(indexed(corpus)) == len(before) - 4
        assert text_of(9, 3) not in lexical(corpus, "lamp", 99), "an entry without a vector"


def test_a_change_that_fails_changes_no_row_of_the_index(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    with Corpus.open(root) as corpus:
        before = indexed(corpus)
        monkeypatch.setattr("blendrag.corpus.documents.end_change", killed)
        with pytest.raises(KeyboardInterrupt):
            put(corpus, 1)
        assert indexed(corpus) == before


# -- building -------------------------------------------------------------------------------------


def test_an_index_that_was_lost_is_built_at_the_first_search(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    execute(root, *LOST)
    change(root)  # it can be changed before it is searched
    with Corpus.open(root) as corpus:
        assert lexical(corpus, "document 1 lamp 8")[0] == text_of(1, 1)
        indexed(corpus)
    assert "building the full-text index" in caplog.text
    assert check_corpus(root).is_good
    caplog.clear()
    with Corpus.open(root) as corpus:
        assert lexical(corpus, "document 1 lamp 8")[0] == text_of(1, 1)
    assert caplog.text == ""


def test_a_read_only_corpus_without_an_index_is_searched_by_vectors_with_a_note(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    execute(root, *LOST)
    with Corpus.open(root, read_only=True) as corpus:
        for mode in ("hybrid", "lexical"):
            assert corpus.searches.available(mode) == "dense"
        assert corpus.searches.available("dense") == "dense"
    assert "has no full-text index and cannot be written" in caplog.text


def test_an_interrupted_build_goes_on_and_follows_changes(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute(root, *LOST)
    monkeypatch.setattr(full_text, "BATCH_PASSAGES", 4)
    with Corpus.open(root) as corpus:
        batches = iter(range(2))
        after = corpus.searches.full_text.build_after

        def killed(last: int) -> int | None:
            if next(batches, None) is None:
                raise KeyboardInterrupt
            return after(last)

        monkeypatch.setattr(corpus.searches.full_text, "build_after", killed)
        with pytest.raises(KeyboardInterrupt):
            corpus.searches.available("hybrid")
    change(root)
    with Corpus.open(root) as corpus:
        assert lexical(corpus, "document 1 lamp 8")[0] == text_of(1, 1)
        indexed(corpus)


def test_damage_during_a_build_costs_no_search(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    execute(root, *LOST)
    monkeypatch.setattr(full_text, "BATCH_PASSAGES", 4)
    with Corpus.open(root) as corpus:
        index = corpus.searches.full_text
        after, damages = index.build_after, iter(["DROP TABLE full_text_data"])

        def damaged(last: int) -> int | None:
            if last and (damage := next(damages, "")):
                corpus.file.connection.execute(damage)
            return after(last)

        monkeypatch.setattr(index, "build_after", damaged)
        assert lexical(corpus, "document 1 lamp 8")[0] == text_of(1, 1)
        indexed(corpus)


def test_an_index_of_other_terms_is_built_again(root: Path) -> None:
    with Corpus.open(root) as corpus, corpus.file.writing():
        corpus.file.set_meta("full_text", "0")
    change(root)
    with Corpus.open(root) as corpus:
        assert lexical(corpus, "document 1 lamp 8")[0] == text_of(1, 1)
        indexed(corpus)


# -- damage ---------------------------------------------------------------------------------------

DAMAGE = [
    "UPDATE full_text_data SET block = x'00'",
    "DELETE FROM full_text_data",
    "DROP TABLE full_text_data",
    "DROP TABLE full_text_config",
    "DROP TABLE full_text_docsize",
    "DROP TABLE full_text",
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_index_is_built_again_and_said(
    root: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    execute(root, damage)
    with Corpus.open(root) as corpus:
        assert lexical(corpus, "document 1 lamp 8")[0] == text_of(1, 1)
        indexed(corpus)
    assert "full-text index" in caplog.text
    assert check_corpus(root).is_good


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_index_does_not_keep_documents_from_being_changed(
    root: Path, damage: str
) -> None:
    execute(root, damage)
    change(root)
    with Corpus.open(root) as corpus:
        assert lexical(corpus, "document 1 lamp 8")[0] == text_of(1, 1)
        indexed(corpus)


def test_a_damaged_index_that_cannot_be_written_is_passed_over(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    execute(root, "UPDATE full_text_data SET block = x'00' WHERE id > 10")
    query = SearchQuery("document 1 lamp 8", vector_of(text_of(1, 1)), "hybrid")
    with Corpus.open(root, read_only=True) as corpus:
        assert corpus.search([query], 1)[0][0].chunk.text == text_of(1, 1)
    assert "is damaged; it cannot be written" in caplog.text


@pytest.mark.parametrize(
    "damage", ["UPDATE full_text_data SET block = x'00'", "DELETE FROM full_text WHERE rowid = 2"]
)
def test_store_check_finds_a_damaged_index_and_repairs_it(root: Path, damage: str) -> None:
    execute(root, damage)
    found = check_corpus(root)
    assert [fault.partition(":")[0] for fault in found.faults] == ["full-text index"]
    check_corpus(root, repair=True)
    with Corpus.open(root) as corpus:
        assert lexical(corpus, "document 1 lamp 8")[0] == text_of(1, 1)
        indexed(corpus)
    assert check_corpus(root).is_good


# -- questions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "question",
    [
        '"',
        "lamp OR",
        "NEAR(lamp, 2)",
        "text: lamp*",
        "^lamp -",
        "lamp\0",
        "';",
        "🙂",
        "(((",
        "{a b}: c",
    ],
)
def test_no_question_is_a_syntax_error(root: Path, question: str) -> None:
    with Corpus.open(root) as corpus:
        lexical(corpus, question)


def test_of_a_long_message_the_rarest_terms_are_searched_for(root: Path) -> None:
    message = "lamp keeper log wrote " * 300 + " ".join(
        "abcdefghij"[i % 9 :] + "xyz" * (i // 9) for i in range(800)
    )
    message = f"{message} KX-77 {message}"
    with Corpus.open(root) as corpus:
        corpus.put_document(
            Document("k.md", "", "K"), "d", [chunk_of("KX-77")], vector_of("KX-77")[None]
        )
        asked: list[str] = []
        corpus.file.connection.set_trace_callback(asked.append)
        assert lexical(corpus, message)[0] == "KX-77"
        ranked = [statement for statement in asked if "bm25" in statement]
        assert ranked[0].count(" OR ") < full_text.MAX_TERMS


def test_terms_in_most_passages_are_left_out_of_a_large_corpus(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full_text, "MAX_ROWS", 6)
    with Corpus.open(root) as corpus, corpus.file.reading():
        index = corpus.searches.full_text
        assert index.ranked("lamp keeper").passages == []
        assert len(index.ranked("lamp keeper", rare_only=False).passages) > 6
        assert len(index.ranked("lamp 8 Paragraph").passages) <= 6
        assert index.ranked("lamp").information < 0.1, (
            "it is in every passage, though few are counted"
        )


def test_one_thread_builds_while_others_search_by_vectors(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    execute(root, *LOST)
    with Corpus.open(root) as corpus:
        with corpus.searches.full_text.building:
            assert corpus.searches.available("hybrid") == "dense"
        assert corpus.searches.available("hybrid") == "hybrid"
    assert "its full-text index is being built" in caplog.text


def test_a_damaged_index_that_another_thread_builds_again_is_not_emptied(root: Path) -> None:
    with Corpus.open(root) as corpus:
        index = corpus.searches.full_text
        with corpus.file.writing():
            index.reset()
            corpus.file.set_meta("full_text", full_text._BUILDING)
        index.build_after(0)
        built = corpus.file.rows("SELECT rowid FROM full_text")
        with index.building:  # the other thread
            assert index.rebuild_damaged() == "its full-text index is being built"
        assert corpus.file.rows("SELECT rowid FROM full_text") == built != []


def test_a_python_without_fts5_is_refused_in_one_sentence(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks(schema: str) -> None:
        raise sqlite3.OperationalError("no such module: fts5")

    monkeypatch.setattr(databases, "objects_made_by", lacks)
    with pytest.raises(CorpusError, match="lacks FTS5, expected one that has it"):
        Corpus.open(root)
