"""Entries that an application adds by id are changed and removed with their vectors and their KV."""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from blendrag.corpus.documents import REMOVED
from blendrag.engine import BlendEngine, Options
from blendrag.engine.kv_namespace import KVNamespace
from blendrag.engine.kv_writer import KVWriter
from blendrag.engine.library import Added, Entry, Library
from blendrag.errors import CorpusError, InvalidInputError, StoreFullError
from blendrag.text.chunking import chunk_id_of
from loops import BLOCKED_S


def entry(number: int, **changes: Any) -> Entry:
    return replace(Entry(f"id{number}", tiny.sentence(number), {"number": number}), **changes)


def entries(count: int) -> list[Entry]:
    return [entry(i) for i in range(count)]


def counts(added: Added) -> tuple[int, int, int, int]:
    return added.added, added.changed, added.unchanged, added.computed


def found(library: Library, query: Any, count: int = 9) -> list[str]:
    return [hit.entry.id for hit in library.search(query, count)]


def opened(root: Path, **changes: Any) -> BlendEngine:
    return tiny.engine(tiny.shared_llama(), root / "s", **changes)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[BlendEngine]:
    with opened(tmp_path) as made:
        yield made


@pytest.fixture
def library(engine: BlendEngine) -> Library:
    return engine.library


def reused(engine: BlendEngine, text: str) -> int:
    return engine.generate(f"Read this: {text} Done?", Options(mode="reuse")).metrics.reused_tokens


def stored(engine: BlendEngine) -> int:
    """Chunks with KV, without the probe."""
    return max(engine.stats().entries - 1, 0)


# -- add, change, delete ------------------------------------------------------------------------


def test_an_added_entry_is_found_and_recognised(engine):
    assert counts(engine.library.add(entries(4))) == (4, 0, 0, 4)
    assert engine.library.ids() == ["id0", "id1", "id2", "id3"]
    assert engine.library.has_kv(["id2", "unknown"]) == {"id2": True}
    hits = engine.library.search(tiny.sentence(2), 2)
    assert hits[0].entry == entry(2)
    assert hits[0].similarity == pytest.approx(1.0, abs=1e-5)
    assert hits[0].distance <= hits[1].distance
    assert reused(engine, tiny.sentence(2)) > 20
    assert engine.retrieve(tiny.sentence(3), 1)[0].text == tiny.sentence(3)
    added = engine.library.add([entry(8), entry(9), entry(8, text=tiny.sentence(7))])
    assert counts(added) == (2, 0, 0, 2), "of an id given twice the last is kept"
    assert engine.library.get(["id8"])[0].text == tiny.sentence(7)


def test_entries_are_returned_exactly_as_they_were_given(library):
    given = [
        Entry("a", f"\n  {tiny.sentence(1)} \t", {"deep": {"list": [1, None, "ü"]}}, "p", "T", 7),
        Entry("ünï/ id\n2", "foo", {}),
        Entry("empty", "", {"source": "x.md"}),
    ]
    added = library.add(given)
    assert added.computed == 1, "texts too short to be recognised get no KV"
    assert library.get(["empty", "a", "unknown", given[1].id]) == [given[2], given[0], given[1]]
    assert list(library.entries()) == given
    assert list(library.entries(lambda e: e.text == "foo")) == [given[1]]
    assert [e.id for e in library.entries(parent="p")] == ["a"]
    assert len(found(library, "foo")) == 3


def test_unchanged_texts_are_neither_encoded_nor_embedded_again(engine, monkeypatch):
    engine.library.add([entry(1), entry(2)])

    def refuse(*args: Any) -> None:
        raise AssertionError("model or embedder was used")

    monkeypatch.setattr(engine.adapter, "encode", refuse)
    monkeypatch.setattr(engine.kv_namespace.corpus.embedder, "embed", refuse)
    assert counts(engine.library.add([entry(2), entry(1)])) == (0, 0, 2, 0)
    moved = engine.library.add([entry(1, metadata={"new": True}), entry(3, text=tiny.sentence(2))])
    assert counts(moved) == (1, 1, 0, 0)
    assert engine.library.get(["id1"])[0].metadata == {"new": True}


def test_a_changed_text_replaces_vector_and_kv(engine):
    engine.library.add([entry(1)])
    assert counts(engine.library.add([entry(1, text=tiny.sentence(9))])) == (0, 1, 0, 1)
    assert engine.library.has_kv(["id1"]) == {"id1": True}
    assert stored(engine) == 1
    assert reused(engine, tiny.sentence(1)) == 0
    assert reused(engine, tiny.sentence(9)) > 20
    assert [h.entry.text for h in engine.library.search(tiny.sentence(1), 9)] == [tiny.sentence(9)]


def test_deleting_removes_rows_vectors_and_kv(engine):
    engine.library.add(entries(3))
    assert engine.library.delete(["id1", "id1", "unknown"]) == ["id1"]
    assert engine.library.ids() == ["id0", "id2"]
    assert reused(engine, tiny.sentence(1)) == 0
    engine.drain()
    assert stored(engine) == 2, "a query does not compute it again"
    assert "id1" not in found(engine.library, tiny.sentence(1))
    assert engine.library.clear() == 2
    assert (len(engine.library), stored(engine)) == (0, 0)
    assert engine.library.search("anything", 3) == []


def test_a_text_under_two_ids_is_stored_until_both_are_deleted(engine):
    twice = [entry(1), entry(2, text=f" {tiny.sentence(1)}\n")]
    assert counts(engine.library.add(twice)) == (2, 0, 0, 1)
    assert stored(engine) == 1
    assert sorted(found(engine.library, tiny.sentence(1))) == ["id1", "id2"]
    engine.library.delete(["id1"])
    assert engine.library.has_kv(["id2"]) == {"id2": True}
    engine.library.delete(["id2"])
    assert stored(engine) == 0


def test_documents_and_entries_share_texts_and_are_removed_apart(engine):
    engine.ingest([tiny.document(0, paragraphs=1)])
    (text,) = tiny.chunk_texts(engine, 0)
    chunk = engine.library.search(text, 1)[0].entry
    assert (chunk.text, chunk.parent, chunk.title) == (text, "doc0.txt", "doc0")
    assert chunk.metadata["chunk_id"] == chunk.id
    assert len(engine.library) == 0, "a chunk of a document is found but is not an entry"
    assert counts(engine.library.add([entry(5, text=text), entry(6)])) == (2, 0, 0, 1)
    with pytest.raises(InvalidInputError, match="is not in the corpus"):
        engine.remove(["id6"])
    assert engine.remove(["doc0.txt"]) == 1
    assert engine.library.has_kv(["id5", "id6"]) == {"id5": True, "id6": True}
    engine.ingest([tiny.document(0, paragraphs=1)])
    assert engine.library.clear() == 2
    assert tiny.chunk_texts(engine, 0) == [text]
    assert reused(engine, text) > 20


def test_a_filtered_search_goes_on_until_k_are_found(library):
    library.add([entry(i, text=f"ship {i}") for i in range(40)])
    hits = library.search("ship 3", 2, lambda e: e.metadata["number"] > 36)
    assert len(hits) == 2
    assert all(hit.entry.metadata["number"] > 36 for hit in hits)
    assert library.search("ship 3", 5, lambda e: False) == []
    assert library.search("ship 3", 0) == []


def test_entries_of_one_parent_are_read_in_order_and_deleted_together(engine):
    first = [entry(i, parent="one.md", start=100 - i) for i in range(2)]
    engine.library.add([*first, entry(2, parent="two.md")])
    chunks = engine.retrieve(tiny.sentence(0), 3)
    assert [c.source for c in chunks] == ["one.md", "one.md", "two.md"]
    assert [c.start for c in chunks[:2]] == [99, 100]
    assert engine.library.delete_parents(["one.md", "unknown"]) == ["id0", "id1"]
    assert engine.library.ids() == ["id2"]


def test_kv_left_for_later_is_computed_after_a_query_missed_it(engine):
    assert counts(engine.library.add([entry(1)], precompute=False)) == (1, 0, 0, 0)
    assert engine.library.has_kv(["id1"]) == {"id1": False}
    assert reused(engine, tiny.sentence(1)) == 0
    engine.drain()
    assert engine.library.has_kv(["id1"]) == {"id1": True}
    text = tiny.sentence(1)
    (((key,),),) = [engine.kv_namespace.places_of(chunk_id_of(text), text).values()]
    tiny.lose_kv(engine, key)
    assert counts(engine.library.add([entry(1)])) == (0, 0, 1, 1), "or by the next add"


# -- the application's own vectors --------------------------------------------------------------


def test_given_vectors_are_searched_by_vector_at_unit_length(engine):
    engine.library.add(entries(3), np.eye(3) * 5, embedder="mine")
    hits = engine.library.search([0.0, 7.0, 0.1], 3)
    assert hits[0].entry.id == "id1"
    assert hits[0].similarity > 0.99
    assert np.linalg.norm(hits[0].vector) == pytest.approx(1.0)
    for by_text in (lambda: engine.library.search("a text", 2), lambda: engine.retrieve("text", 2)):
        with pytest.raises(InvalidInputError, match=r"given by the application.*mine"):
            by_text()
    with pytest.raises(CorpusError, match="given:mine"):
        engine.library.add([entry(5)], [[1.0, 0.0, 0.0]], embedder="another")
    with pytest.raises(InvalidInputError, match="given by the application"):
        engine.library.add([entry(5)])
    for bad in ([[1.0, 0.0]], [[1.0, 0.0, 0.0]] * 2, [1.0], [[np.nan, 1.0, 0.0]]):
        with pytest.raises(InvalidInputError, match="vector"):
            engine.library.add([entry(5)], bad, embedder="mine")
        assert (engine.library.ids(), stored(engine)) == (["id0", "id1", "id2"], 3)
    changed = engine.library.add([entry(0)], [[0.0, 0.0, 1.0]], embedder="mine")
    assert counts(changed) == (0, 1, 0, 0)


def test_entries_without_vectors_are_recognised_and_never_found(engine):
    engine.library.add(entries(3), embed=False)
    assert engine.library.search(tiny.sentence(1), 3) == []
    assert reused(engine, tiny.sentence(1)) > 20
    engine.library.add([entry(9)], [[0.0, 1.0]], embedder="mine")
    assert found(engine.library, [1.0, 1.0]) == ["id9"]
    engine.library.add([entry(1)], [[1.0, 0.0]], embedder="mine")
    assert sorted(found(engine.library, [1.0, 1.0])) == ["id1", "id9"]
    engine.library.delete(["id9", "id1"])
    assert engine.library.search([1.0, 1.0], 9) == []


# -- crashes and errors -------------------------------------------------------------------------


class Killed(BaseException):
    """As if the process ended here."""


def killed(*args: Any, **kwargs: Any) -> Any:
    raise Killed


def test_a_crash_after_rows_were_removed_is_repaired_by_the_next_change(tmp_path, monkeypatch):
    with opened(tmp_path) as engine, monkeypatch.context() as patch:
        engine.library.add(entries(3))
        patch.setattr(KVNamespace, "drop_orphaned", killed)
        with pytest.raises(Killed):
            engine.library.delete(["id0", "id1"])
        assert stored(engine) == 3
    with opened(tmp_path) as engine:
        engine.library.add([entry(1)])  # its KV is still there, and now is wanted again
        assert stored(engine) == 2
        assert engine.library.has_kv(["id1", "id2"]) == {"id1": True, "id2": True}
        assert engine.library.repair() == 0


def test_a_crash_before_rows_were_written_is_resumed_or_repaired(tmp_path, monkeypatch):
    with opened(tmp_path) as engine, monkeypatch.context() as patch:
        engine.library.add([entry(9)])
        patch.setattr("blendrag.corpus.documents.EntryTable.put", killed)
        with pytest.raises(Killed):
            engine.library.add(entries(3))
        assert stored(engine) == 4
        assert engine.library.ids() == ["id9"]
    with opened(tmp_path) as engine:
        with engine.require_corpus().dropped.adding():  # by another process
            assert counts(engine.library.add([entry(0)])) == (1, 0, 0, 0), "its KV was kept"
            assert stored(engine) == 4, "the others may be that one's"
        assert engine.library.repair() == 2
        assert stored(engine) == 2
        assert engine.library.has_kv(["id0", "id9"]) == {"id0": True, "id9": True}


@pytest.mark.parametrize("clock", [0.0, 4e9])
def test_kv_of_a_running_addition_is_kept_whatever_the_clock_says(
    tmp_path, engine, monkeypatch, clock
):
    write = KVWriter.write

    def after_another_has_cleaned(*args: Any) -> None:
        write(*args)
        monkeypatch.setattr(time, "time", lambda: clock)
        with opened(tmp_path) as other:
            other.library.repair()

    engine.library.add([entry(9)])
    monkeypatch.setattr(KVWriter, "write", after_another_has_cleaned)
    engine.library.add(entries(2))
    assert stored(engine) == 3


def test_a_stopped_process_that_removes_documents_is_an_error_of_an_addition(engine, monkeypatch):
    engine.library.add([entry(0)])
    corpus = engine.require_corpus()
    monkeypatch.setattr("blendrag.corpus.documents.BUSY_TIMEOUT_S", 0.0)
    with (corpus.directory / "adding.lock").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(CorpusError, match="another process holds it"):
            engine.library.add([entry(1)])
    assert counts(engine.library.add([entry(1)])) == (1, 0, 0, 1)


def test_a_crash_within_the_rows_leaves_the_state_before(engine, monkeypatch):
    engine.library.add([entry(0), entry(1)])
    before = list(engine.library.entries())
    with monkeypatch.context() as patch:
        patch.setattr("blendrag.corpus.documents.end_change", killed)
        with pytest.raises(Killed):
            engine.library.add([entry(0, text=tiny.sentence(5)), entry(7)])
        with pytest.raises(Killed):
            engine.library.delete(["id0"])
    assert list(engine.library.entries()) == before
    assert engine.library.has_kv(["id0", "id1"]) == {"id0": True, "id1": True}


def failing_at(engine: BlendEngine, stored_chunks: int, failure: Exception) -> Any:
    """``KVWriter.write`` that raises once so many chunks are stored."""
    write = KVWriter.write

    def fails(*args: Any) -> None:
        if stored(engine) == stored_chunks:
            raise failure
        write(*args)

    return fails


@pytest.mark.parametrize("failure", [StoreFullError("full"), RuntimeError("foreign")])
def test_an_error_halfway_adds_nothing_and_leaves_no_kv(engine, monkeypatch, failure):
    engine.library.add([entry(0)])
    monkeypatch.setattr(KVWriter, "write", failing_at(engine, 3, failure))
    with pytest.raises(type(failure)):
        engine.library.add(entries(5))
    assert engine.library.ids() == ["id0"]
    assert stored(engine) == 1
    assert engine.library.has_kv(["id0"]) == {"id0": True}


def test_an_error_of_cleaning_up_does_not_hide_a_full_store(engine, monkeypatch):
    engine.library.add([entry(0)])
    corpus = engine.require_corpus()
    note = corpus.dropped.note

    def until_full(chunks: Any, since: float) -> None:
        if since == REMOVED:
            raise CorpusError("no space left")
        note(chunks, since)

    monkeypatch.setattr(corpus.dropped, "note", until_full)
    monkeypatch.setattr(KVWriter, "write", failing_at(engine, 2, StoreFullError("full")))
    with pytest.raises(StoreFullError):
        engine.library.add(entries(4))
    assert stored(engine) == 2
    engine.library.repair()
    assert stored(engine) == 1


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (Entry("", "text"), "id ''"),
        (Entry("a", "x", {"when": object()}), "metadata 'when' of entry 'a' is a object"),
        (Entry("a", "word " * 5000), "exceeds the"),
    ],
)
def test_an_entry_that_cannot_be_stored_is_refused(engine, bad, error):
    with pytest.raises(InvalidInputError) as caught:
        engine.library.add([entry(1), bad])
    assert error in str(caught.value)
    assert tiny.one_sentence(str(caught.value))
    assert (engine.library.ids(), stored(engine)) == ([], 0)


# -- stores -------------------------------------------------------------------------------------


def test_an_empty_store_answers_without_a_model_and_stays_empty(tmp_path):
    with BlendEngine("no/such-model", tmp_path / "s") as engine:
        library = engine.library
        assert library, "an empty library is true"
        assert (library.ids(), library.get(["a"]), library.delete(["a"])) == ([], [], [])
        assert (library.search("text", 3), library.search([1.0], 3)) == ([], [])
        assert (library.clear(), len(library), library.repair()) == (0, 0, 0)
        assert library.add([]) == Added()
        assert (library.has_kv(["a"]), list(library.entries())) == ({}, [])
    assert not (tmp_path / "s").exists()


def test_a_read_only_library_is_read_but_not_changed(tmp_path):
    with opened(tmp_path) as engine:
        engine.library.add([entry(1)])
    with opened(tmp_path, read_only=True) as engine:
        assert engine.library.get(["id1"]) == [entry(1)]
        assert found(engine.library, tiny.sentence(1)) == ["id1"]
        with pytest.raises(CorpusError, match="read-only"):
            engine.library.delete(["id1"])
        with pytest.raises(CorpusError, match="read-only"):
            engine.library.add([entry(2)])


def test_threads_add_delete_and_search_at_once(engine):
    def work(name: int) -> None:
        for i in range(2):
            number = 10 * name + i
            engine.library.add([entry(number), entry(name)])
            assert engine.library.search(tiny.sentence(number), 1)
            if i % 2:
                engine.library.delete([f"id{number}"])

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, (1, 2, 3)))
    ids = engine.library.ids()
    assert set(ids) == {f"id{n}{i}" for n in (1, 2, 3) for i in ("", 0)}
    assert all(engine.library.has_kv(ids).values())
    assert stored(engine) == len(ids)


def test_another_engine_sees_each_change_at_once(tmp_path):
    with (
        opened(tmp_path) as one,
        opened(tmp_path) as other,
    ):
        one.library.add([entry(1)])
        assert reused(other, tiny.sentence(1)) > 20
        assert other.library.delete(["id1"]) == ["id1"]
        assert one.library.search(tiny.sentence(1), 1) == []
        assert reused(one, tiny.sentence(1)) == 0


def test_closing_ends_additions_in_the_background_after_the_entries_that_are_added(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def vectors(batch: Sequence[Entry]) -> np.ndarray:
        begun.set()
        assert go_on.wait(BLOCKED_S)
        return np.eye(len(batch), 4, dtype=np.float32)

    engine = opened(tmp_path)
    engine.library.add_in_background(entries(6), vectors, precompute=False, at_a_time=2)
    assert begun.wait(BLOCKED_S)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(engine.close)
        while not engine.closed:
            time.sleep(0.001)
        go_on.set()
        closing.result(BLOCKED_S)
    assert "4 entries were not added in the background; add them again" in caplog.text
    with pytest.raises(InvalidInputError, match="closed"):
        engine.library.add_in_background(entries(1))
    with opened(tmp_path) as again:
        assert again.library.ids() == ["id0", "id1"]


def test_closing_counts_the_entries_that_were_being_added_and_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def vectors(batch: Sequence[Entry]) -> np.ndarray:
        begun.set()
        assert go_on.wait(BLOCKED_S)
        raise ConnectionError

    engine = opened(tmp_path)
    engine.library.add_in_background(entries(6), vectors, precompute=False, at_a_time=2)
    assert begun.wait(BLOCKED_S)
    engine.library.additions.stop()
    go_on.set()
    engine.close()
    assert "6 entries were not added in the background; add them again" in caplog.text


@pytest.mark.parametrize("how", ["delete", "delete_parents", "clear"])
def test_what_waits_to_be_added_is_deleted_too(library: Library, how: str) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def vectors(batch: Sequence[Entry]) -> np.ndarray:
        begun.set()
        assert go_on.wait(BLOCKED_S)
        return np.eye(len(batch), 4, dtype=np.float32)

    library.add([entry(9, parent="b")], np.eye(1, 4), precompute=False)
    given = [entry(i, parent="a" if i < 3 else "b") for i in range(5)]
    library.add_in_background(given, vectors, precompute=False, at_a_time=2)
    assert begun.wait(BLOCKED_S)
    delete = {
        "delete": lambda: library.delete(["id0", "id2", "id9", "none"]),
        "delete_parents": lambda: library.delete_parents(["a"]),
        "clear": library.clear,
    }[how]
    with ThreadPoolExecutor(1) as pool:
        deleting = pool.submit(delete)
        while library.additions.progress.total == 5:  # id0 and id1 are being added
            time.sleep(0.001)
        go_on.set()
        deleted = deleting.result(BLOCKED_S)
    assert library.additions.wait(BLOCKED_S)
    progress = library.additions.progress
    assert progress.done == progress.total
    left = {"delete": ["id1", "id3", "id4"], "delete_parents": ["id9", "id3", "id4"], "clear": []}
    assert sorted(library.ids()) == sorted(left[how])
    told = {"delete": ["id0", "id2", "id9"], "delete_parents": ["id0", "id1", "id2"], "clear": 6}
    assert deleted == told[how] if how == "clear" else sorted(deleted) == told[how]
