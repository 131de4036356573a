"""What came by an id is added, changed and removed with its vectors and its KV."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from blendrag.corpus.database import FILE_NAME
from blendrag.engine import BlendEngine, Options, kv_writer
from blendrag.engine import library as libraries
from blendrag.engine.kv_writer import KVWriter
from blendrag.engine.library import Added, Entry
from blendrag.errors import CorpusError, InvalidInputError, StoreFullError


def entry(number: int, **changes: Any) -> Entry:
    return replace(Entry(f"id{number}", tiny.sentence(number), {"number": number}), **changes)


def counts(added: Added) -> tuple[int, int, int, int]:
    return added.added, added.changed, added.unchanged, added.computed


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.llama()


@pytest.fixture
def engine(model: Any, tmp_path: Path) -> Iterator[BlendEngine]:
    with tiny.engine(model, tmp_path / "s") as made:
        yield made


def reused(engine: BlendEngine, text: str) -> int:
    metrics = engine.generate(f"Read this: {text} Done?", Options(mode="reuse")).metrics
    return metrics.reused_tokens


def stored(engine: BlendEngine) -> int:
    """Chunks with KV; the probe is none."""
    return max(engine.stats().entries - 1, 0)


def test_what_is_added_is_found_recognised_and_its_kv_is_there(engine: BlendEngine) -> None:
    library = engine.library
    assert counts(library.add([entry(i) for i in range(4)])) == (4, 0, 0, 4)
    assert library.ids() == ["id0", "id1", "id2", "id3"]
    assert library.has_kv(["id2", "unknown"]) == {"id2": True}
    hits = library.search(tiny.sentence(2), 2)
    assert hits[0].entry == entry(2)
    assert hits[0].similarity == pytest.approx(1.0, abs=1e-5)
    assert hits[0].distance <= hits[1].distance
    assert reused(engine, tiny.sentence(2)) > 20
    assert engine.retrieve(tiny.sentence(3), 1)[0].text == tiny.sentence(3)


def test_entries_come_back_exactly_as_they_were_given(engine: BlendEngine) -> None:
    given = [
        Entry("a", f"\n  {tiny.sentence(1)} \t", {"deep": {"list": [1, None, "ü"]}}, "p", "T", 7),
        Entry("ünï/ id\n2", "foo", {}),
        Entry("empty", "", {"source": "x.md"}),
    ]
    engine.library.add(given)
    assert engine.library.get(["empty", "a", "unknown", "ünï/ id\n2"]) == [
        given[2],
        given[0],
        given[1],
    ]
    assert list(engine.library.entries()) == given
    assert list(engine.library.entries(lambda e: e.text == "foo")) == [given[1]]
    assert [e.id for e in engine.library.entries(parent="p")] == ["a"]


def test_an_unchanged_entry_costs_no_work_on_model_or_embedder(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.library.add([entry(1), entry(2)])

    def refuse(*args: Any) -> None:
        raise AssertionError("asked to work")

    monkeypatch.setattr(engine.adapter, "encode", refuse)
    monkeypatch.setattr(engine.resources.embedder, "embed", refuse)
    assert counts(engine.library.add([entry(2), entry(1)])) == (0, 0, 2, 0)
    moved = engine.library.add([entry(1, metadata={"new": True}), entry(3, text=tiny.sentence(2))])
    assert counts(moved) == (1, 1, 0, 0), "the same texts need neither KV nor vectors anew"
    assert engine.library.get(["id1"])[0].metadata == {"new": True}


def test_a_changed_entry_takes_its_old_kv_along_and_has_new_kv(engine: BlendEngine) -> None:
    engine.library.add([entry(1)])
    assert counts(engine.library.add([entry(1, text=tiny.sentence(9))])) == (0, 1, 0, 1)
    assert engine.library.has_kv(["id1"]) == {"id1": True}
    assert stored(engine) == 1
    assert reused(engine, tiny.sentence(1)) == 0
    assert reused(engine, tiny.sentence(9)) > 20
    assert [hit.entry.text for hit in engine.library.search(tiny.sentence(1), 9)] == [
        tiny.sentence(9)
    ]


def test_deleting_takes_rows_vectors_and_kv(engine: BlendEngine) -> None:
    engine.library.add([entry(i) for i in range(3)])
    assert engine.library.delete(["id1", "id1", "unknown"]) == ["id1"]
    assert engine.library.ids() == ["id0", "id2"]
    assert stored(engine) == 2
    assert reused(engine, tiny.sentence(1)) == 0
    engine.drain()
    assert stored(engine) == 2, "what is not known any more is not computed again"
    assert "id1" not in [hit.entry.id for hit in engine.library.search(tiny.sentence(1), 9)]
    assert engine.library.clear() == 2
    assert (len(engine.library), stored(engine)) == (0, 0)
    assert engine.library.search("anything", 3) == []


def test_a_text_under_two_ids_is_stored_once_and_kept_for_the_last(engine: BlendEngine) -> None:
    twice = [entry(1), entry(2, text=f" {tiny.sentence(1)}\n")]
    assert counts(engine.library.add(twice)) == (2, 0, 0, 1)
    assert stored(engine) == 1
    assert {hit.entry.id for hit in engine.library.search(tiny.sentence(1), 9)} == {"id1", "id2"}
    engine.library.delete(["id1"])
    assert engine.library.has_kv(["id2"]) == {"id2": True}
    engine.library.delete(["id2"])
    assert stored(engine) == 0


def test_documents_and_entries_share_texts_and_are_removed_apart(engine: BlendEngine) -> None:
    engine.ingest([tiny.document(0, paragraphs=1)])
    (text,) = tiny.chunk_texts(engine, 0)
    assert counts(engine.library.add([entry(5, text=text), entry(6)])) == (2, 0, 0, 1)
    with pytest.raises(InvalidInputError, match="is not in the corpus"):
        engine.remove(["id6"])
    assert engine.remove(["."]) == 1
    assert engine.library.has_kv(["id5", "id6"]) == {"id5": True, "id6": True}
    engine.ingest([tiny.document(0, paragraphs=1)])
    assert engine.library.clear() == 2
    assert tiny.chunk_texts(engine, 0) == [text]
    assert reused(engine, text) > 20


def test_ingested_chunks_are_hits_under_their_chunk_id(engine: BlendEngine) -> None:
    engine.ingest([tiny.document(0, paragraphs=1)])
    engine.library.add([entry(1)])
    (text,) = tiny.chunk_texts(engine, 0)
    found = engine.library.search(text, 1)[0].entry
    assert (found.text, found.parent, found.title) == (text, "doc0.txt", "doc0")
    assert found.metadata["chunk_id"] == found.id
    assert len(engine.library) == 1, "though it is none of the entries"


def test_a_search_filters_and_goes_on_until_k_are_found(engine: BlendEngine) -> None:
    engine.library.add([entry(i) for i in range(40)])
    hits = engine.library.search(tiny.sentence(3), 2, lambda e: e.metadata["number"] > 36)
    assert len(hits) == 2
    assert all(hit.entry.metadata["number"] > 36 for hit in hits)
    assert engine.library.search(tiny.sentence(3), 5, lambda e: False) == []
    assert engine.library.search(tiny.sentence(3), 0) == []


def test_entries_of_one_parent_are_removed_and_read_together(engine: BlendEngine) -> None:
    first = [entry(i, parent="one.md", start=100 - i) for i in range(2)]
    engine.library.add([*first, entry(2, parent="two.md")])
    chunks = engine.retrieve(tiny.sentence(0), 3)
    assert [c.source for c in chunks] == ["one.md", "one.md", "two.md"]
    assert [c.start for c in chunks[:2]] == [99, 100], "in the order of their document"
    assert engine.library.delete_parents(["one.md", "unknown"]) == ["id0", "id1"]
    assert engine.library.ids() == ["id2"]


def test_of_an_id_given_twice_the_last_counts(engine: BlendEngine) -> None:
    added = engine.library.add([entry(1), entry(2), entry(1, text=tiny.sentence(7))])
    assert counts(added) == (2, 0, 0, 2)
    assert engine.library.get(["id1"])[0].text == tiny.sentence(7)


# -- the application's own vectors ------------------------------------------------------------------


def test_given_vectors_are_searched_by_vector_at_unit_length(engine: BlendEngine) -> None:
    vectors = np.eye(3) * 5
    engine.library.add([entry(i) for i in range(3)], vectors, embedder="mine")
    hits = engine.library.search([0.0, 7.0, 0.1], 3)
    assert hits[0].entry.id == "id1"
    assert hits[0].similarity > 0.99
    assert np.linalg.norm(hits[0].vector) == pytest.approx(1.0)
    for asking in (lambda: engine.library.search("a text", 2), lambda: engine.retrieve("text", 2)):
        with pytest.raises(InvalidInputError, match=r"given by the application.*mine"):
            asking()
    with pytest.raises(CorpusError, match="given:mine"):
        engine.library.add([entry(5)], [[1.0, 0.0, 0.0]], embedder="another")
    with pytest.raises(InvalidInputError, match="given by the application"):
        engine.library.add([entry(5)])
    changed = engine.library.add([entry(0)], [[0.0, 0.0, 1.0]], embedder="mine")
    assert counts(changed) == (0, 1, 0, 0)


def test_vectors_of_another_length_are_refused_and_nothing_is_left(engine: BlendEngine) -> None:
    engine.library.add([entry(0)], [[1.0, 0.0]], embedder="mine")
    for bad in ([[1.0, 0.0, 0.0]], [[1.0, 0.0]] * 2, [1.0], [[np.nan, 1.0]]):
        with pytest.raises(InvalidInputError, match="vector"):
            engine.library.add([entry(1)], bad, embedder="mine")
        assert engine.library.ids() == ["id0"]
        assert stored(engine) == 1


def test_without_vectors_entries_are_recognised_and_never_found(engine: BlendEngine) -> None:
    engine.library.add([entry(i) for i in range(3)], embed=False)
    assert engine.library.search(tiny.sentence(1), 3) == []
    assert reused(engine, tiny.sentence(1)) > 20
    engine.library.add([entry(9)], [[0.0, 1.0]], embedder="mine")
    assert [hit.entry.id for hit in engine.library.search([1.0, 1.0], 9)] == ["id9"]
    engine.library.add([entry(1)], [[1.0, 0.0]], embedder="mine")
    assert {hit.entry.id for hit in engine.library.search([1.0, 1.0], 9)} == {"id1", "id9"}
    engine.library.delete(["id9", "id1"])
    assert engine.library.search([1.0, 1.0], 9) == []


def test_kv_left_for_later_is_computed_once_a_prompt_missed_it(engine: BlendEngine) -> None:
    assert counts(engine.library.add([entry(1)], precompute=False)) == (1, 0, 0, 0)
    assert engine.library.has_kv(["id1"]) == {"id1": False}
    assert reused(engine, tiny.sentence(1)) == 0
    engine.drain()
    assert engine.library.has_kv(["id1"]) == {"id1": True}


def test_texts_too_short_to_be_recognised_get_no_kv(engine: BlendEngine) -> None:
    assert counts(engine.library.add([Entry("a", "foo"), Entry("b", "")])) == (2, 0, 0, 0)
    assert stored(engine) == 0
    assert len(engine.library.search("foo", 5)) == 2


# -- crashes and errors -----------------------------------------------------------------------------


class Killed(BaseException):
    """As if the process ended here."""


def killed(*args: Any, **kwargs: Any) -> Any:
    raise Killed


def test_a_crash_after_rows_were_removed_is_repaired_by_the_next_change(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny.engine(model, tmp_path / "s") as engine:
        engine.library.add([entry(i) for i in range(3)])
        with monkeypatch.context() as patch:
            patch.setattr(libraries, "drop_orphaned_kv", killed)
            with pytest.raises(Killed):
                engine.library.delete(["id0", "id1"])
        assert stored(engine) == 3
    with tiny.engine(model, tmp_path / "s") as engine:
        engine.library.add([entry(1)])  # its KV is still there, and now is wanted again
        assert stored(engine) == 2
        assert engine.library.has_kv(["id1", "id2"]) == {"id1": True, "id2": True}
        assert engine.library.repair() == 0


def test_a_crash_before_rows_were_written_is_resumed_or_repaired(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny.engine(model, tmp_path / "s") as engine:
        engine.library.add([entry(9)])
        with monkeypatch.context() as patch:
            patch.setattr("blendrag.corpus.documents.EntryTable.put", killed)
            with pytest.raises(Killed):
                engine.library.add([entry(i) for i in range(3)])
        assert stored(engine) == 4
        assert engine.library.ids() == ["id9"]
    with tiny.engine(model, tmp_path / "s") as engine:
        assert counts(engine.library.add([entry(0)])) == (1, 0, 0, 0), "its KV was kept"
        assert stored(engine) == 4, "the others may be another process's, just now"
        monkeypatch.setattr(kv_writer, "ABANDONED_S", 0.0)
        corpus = engine.resources.require_corpus()
        assert kv_writer.drop_orphaned_kv(engine.resources, corpus, within_s=0.0) == 2
        assert stored(engine) == 2
        assert engine.library.has_kv(["id0", "id9"]) == {"id0": True, "id9": True}


def test_a_crash_within_the_rows_leaves_the_state_before(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.library.add([entry(0), entry(1)])
    before = list(engine.library.entries())
    with monkeypatch.context() as patch:
        patch.setattr("blendrag.corpus.documents.drop_orphans", killed)
        with pytest.raises(Killed):
            engine.library.add([entry(0, text=tiny.sentence(5)), entry(7)])
        with pytest.raises(Killed):
            engine.library.delete(["id0"])
    assert list(engine.library.entries()) == before
    assert engine.library.has_kv(["id0", "id1"]) == {"id0": True, "id1": True}


@pytest.mark.parametrize("failure", [StoreFullError("full"), RuntimeError("foreign")])
def test_an_error_halfway_adds_nothing_and_leaves_no_kv(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    engine.library.add([entry(0)])
    compute, calls = KVWriter.write, []

    def fails_third(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise failure
        compute(*args)

    monkeypatch.setattr(KVWriter, "write", fails_third)
    with pytest.raises(type(failure)):
        engine.library.add([entry(i) for i in range(5)])
    assert engine.library.ids() == ["id0"]
    assert stored(engine) == 1
    assert engine.library.has_kv(["id0"]) == {"id0": True}


def test_a_disk_too_full_to_take_kv_back_does_not_hide_that_the_store_is_full(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.library.add([entry(0)])
    corpus = engine.resources.require_corpus()
    note, compute = corpus.dropped.note, KVWriter.write

    def until_full(chunks: Any, now: float) -> None:
        if now == 0.0:
            raise CorpusError("no space left")
        note(chunks, now)

    def fails_second(*args: Any) -> None:
        if stored(engine) == 2:
            raise StoreFullError("full")
        compute(*args)

    with monkeypatch.context() as patch:
        patch.setattr(corpus.dropped, "note", until_full)
        patch.setattr(KVWriter, "write", fails_second)
        with pytest.raises(StoreFullError):
            engine.library.add([entry(i) for i in range(4)])
    assert stored(engine) == 2
    kv_writer.drop_orphaned_kv(engine.resources, corpus, within_s=0.0)
    assert stored(engine) == 1


def test_kv_that_the_store_lost_is_computed_again(engine: BlendEngine) -> None:
    engine.library.add([entry(0), entry(1)])
    corpus = engine.resources.require_corpus()
    (key,) = kv_writer.kv_keys(engine.resources, corpus, tiny.sentence(1))
    engine.resources.store.delete(*key)
    assert engine.library.has_kv(["id0", "id1"]) == {"id0": True, "id1": False}
    assert counts(engine.library.add([entry(0), entry(1)])) == (0, 0, 2, 1)
    assert engine.library.has_kv(["id1"]) == {"id1": True}


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (Entry("", "text"), "id ''"),
        (Entry("a", "x\ud800"), "at character 1"),
        (Entry("a", "x", {"when": object()}), "metadata 'when' of entry 'a' is a object"),
        (Entry("a", "word " * 5000), "exceeds the"),
    ],
)
def test_what_cannot_be_stored_is_said_in_a_sentence(
    engine: BlendEngine, bad: Entry, says: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        engine.library.add([entry(1), bad])
    assert says in str(caught.value)
    assert tiny.one_sentence(str(caught.value))
    assert engine.library.ids() == []
    assert stored(engine) == 0


def test_an_empty_store_answers_without_a_model_and_stays_empty(tmp_path: Path) -> None:
    with BlendEngine("no/such-model", tmp_path / "s") as engine:
        library = engine.library
        assert (library.ids(), library.get(["a"]), library.delete(["a"])) == ([], [], [])
        assert (library.search("text", 3), library.search([1.0], 3)) == ([], [])
        assert (library.clear(), len(library), library.repair()) == (0, 0, 0)
        assert library.add([]) == Added()
        assert (library.has_kv(["a"]), list(library.entries())) == ({}, [])
        assert library, "an empty library is a library"
    assert not (tmp_path / "s").exists()


def test_a_corpus_that_is_only_read_is_read(model: Any, tmp_path: Path) -> None:
    with tiny.engine(model, tmp_path / "s") as engine:
        engine.library.add([entry(1)])
    with tiny.engine(model, tmp_path / "s", read_only=True) as engine:
        assert engine.library.get(["id1"]) == [entry(1)]
        assert engine.library.search(tiny.sentence(1), 1)[0].entry == entry(1)
        for change in (
            lambda: engine.library.delete(["id1"]),
            lambda: engine.library.add([entry(2)]),
        ):
            with pytest.raises(CorpusError, match="read-only"):
                change()


def test_threads_add_delete_and_search_at_once(engine: BlendEngine) -> None:
    errors: list[BaseException] = []

    def work(name: int) -> None:
        try:
            for i in range(4):
                number = 10 * name + i
                engine.library.add([entry(number), entry(name)])
                assert engine.library.search(tiny.sentence(number), 1)
                if i % 2:
                    engine.library.delete([f"id{number}"])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    ids = engine.library.ids()
    assert sorted(ids) == sorted(
        ["id1", "id2", "id3"] + [f"id{n}{i}" for n in (1, 2, 3) for i in (0, 2)]
    )
    assert all(engine.library.has_kv(ids).values())
    assert stored(engine) == len(ids)


def test_another_engine_sees_each_change_at_once(model: Any, tmp_path: Path) -> None:
    with (
        tiny.engine(model, tmp_path / "s") as one,
        tiny.engine(model, tmp_path / "s") as other,
    ):
        one.library.add([entry(1)])
        assert reused(other, tiny.sentence(1)) > 20
        assert other.library.delete(["id1"]) == ["id1"]
        assert one.library.search(tiny.sentence(1), 1) == []
        assert reused(one, tiny.sentence(1)) == 0


def test_a_corpus_of_an_earlier_format_is_refused_in_a_sentence(model: Any, tmp_path: Path) -> None:
    with tiny.engine(model, tmp_path / "s") as engine:
        engine.ingest([tiny.document(0)])
    with sqlite3.connect(tmp_path / "s" / "corpus" / FILE_NAME) as older:
        older.execute("PRAGMA user_version = 2")
    older.close()
    for read_only in (True, False):
        with (
            tiny.engine(model, tmp_path / "s", read_only=read_only) as engine,
            pytest.raises(CorpusError, match=r"has format 2, expected 3; .* ingest again"),
        ):
            engine.library.search(tiny.sentence(0), 2)
