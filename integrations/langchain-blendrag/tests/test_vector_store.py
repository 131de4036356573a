"""``BlendVectorStore``: KV comes and goes with the documents."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.indexing import InMemoryRecordManager, index
from texts import CATS, CHANGED, FOXES, SHIPS, documents

import tiny
from blendrag.engine import BlendEngine
from blendrag.errors import CorpusError, InvalidInputError
from blendrag.store.identity import chunk_key
from langchain_blendrag import (
    BlendVectorStore,
    ChatBlend,
    close_shared_engines,
)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[BlendEngine]:
    with tiny.engine(tiny.llama(), tmp_path / "store") as made:
        yield made


@pytest.fixture
def store(engine: BlendEngine) -> BlendVectorStore:
    return BlendVectorStore(engine=engine)


def has_kv(engine: BlendEngine, text: str) -> bool:
    """Whether the KV of ``text`` is in the store, whoever holds it."""
    resources = engine.resources
    namespace = resources.namespace()
    key = chunk_key(namespace, resources.prefix_ids, resources.text_ids(text))
    return bool(resources.store.contains(namespace, key))


# -- KV in step -------------------------------------------------------------------------------------


def test_kv_is_there_once_documents_are_and_goes_with_the_last_of_them(
    store: BlendVectorStore, engine: BlendEngine
) -> None:
    store.add_documents(documents(CATS, SHIPS, CATS), ids=["1", "2", "3"])
    assert has_kv(engine, CATS)
    assert has_kv(engine, SHIPS)
    store.delete(["1", "2"])
    assert (has_kv(engine, CATS), has_kv(engine, SHIPS)) == (True, False)
    store.delete(["3"])
    assert not has_kv(engine, CATS)


def test_a_changed_document_has_new_kv_and_loses_the_old(
    store: BlendVectorStore, engine: BlendEngine
) -> None:
    store.add_documents(documents(SHIPS), ids=["1"])
    store.add_documents(documents(CHANGED), ids=["1"])
    assert (has_kv(engine, SHIPS), has_kv(engine, CHANGED)) == (False, True)
    assert [d.page_content for d in store.get_by_ids(["1"])] == [CHANGED]


def test_documents_without_ids_are_added_once_however_often(store: BlendVectorStore) -> None:
    given = [*documents(CATS, SHIPS), *documents(CATS, source="other")]
    first, again = store.add_documents(given), store.add_documents(given)
    assert first == again
    assert len(set(first)) == 3
    assert len(store.similarity_search("harbour", k=9)) == 3


def test_without_precompute_kv_comes_after_a_prompt_missed_it(
    store: BlendVectorStore, engine: BlendEngine
) -> None:
    store.add_documents(documents(CATS), ids=["1"], precompute=False)
    assert not has_kv(engine, CATS)
    ChatBlend(engine=engine).invoke(f"{CATS}\n\nWhere?")
    engine.drain()
    assert has_kv(engine, CATS)


@pytest.mark.parametrize("cleanup", [None, "incremental", "full", "scoped_full"])
def test_langchains_index_keeps_kv_in_step(
    store: BlendVectorStore, engine: BlendEngine, cleanup: Any
) -> None:
    records = InMemoryRecordManager(namespace="x")
    records.create_schema()

    def indexed(*given: Document) -> dict[str, int]:
        how: dict[str, Any] = {"cleanup": cleanup, "source_id_key": "source"}
        return dict(index(list(given), records, store, key_encoder="sha256", **how))

    cats = documents(CATS, source="a")
    ships = documents(SHIPS, source="b")
    assert indexed(*cats, *ships)["num_added"] == 2
    assert indexed(*cats, *ships)["num_skipped"] == 2

    # 1) a document of source b changes, that of source a is left out
    change = indexed(*documents(CHANGED, source="b"))
    assert change["num_added"] == 1
    keeps_changed, keeps_left_out = cleanup is None, cleanup != "full"
    assert change["num_deleted"] == (not keeps_changed) + (not keeps_left_out)
    assert has_kv(engine, CHANGED)
    assert has_kv(engine, SHIPS) == keeps_changed
    assert has_kv(engine, CATS) == keeps_left_out

    # 2) nothing is left
    indexed()
    assert has_kv(engine, CHANGED) == (cleanup != "full")
    if cleanup == "full":
        assert store.similarity_search("ships") == []


async def test_the_async_index_keeps_kv_in_step(
    store: BlendVectorStore, engine: BlendEngine
) -> None:
    from langchain_core.indexing import aindex

    records = InMemoryRecordManager(namespace="x")
    how: dict[str, Any] = {"cleanup": "full", "key_encoder": "sha256"}
    await aindex(documents(CATS, SHIPS), records, store, **how)
    await aindex(documents(SHIPS), records, store, **how)
    assert (has_kv(engine, CATS), has_kv(engine, SHIPS)) == (False, True)


def test_a_prompt_over_found_documents_loads_their_kv(
    store: BlendVectorStore, engine: BlendEngine
) -> None:
    store.add_documents(documents(CATS, SHIPS, FOXES))
    found = store.as_retriever(search_kwargs={"k": 2}).invoke("harbour")
    context = "\n\n".join(d.page_content for d in found)
    told = ChatBlend(engine=engine).invoke(f"{context}\n\nWhere?").response_metadata["blendrag"]
    assert len(told["chunks"]) == 2
    wanted = sum(len(engine.resources.text_ids(d.page_content)) for d in found)
    assert told["reused_tokens"] >= wanted


# -- finding ----------------------------------------------------------------------------------------


def test_scores_are_distances_and_relevance_is_likeness(store: BlendVectorStore) -> None:
    store.add_documents(documents(CATS, SHIPS, FOXES))
    hits = store.similarity_search_with_score(FOXES, k=3)
    assert hits[0][0].page_content == FOXES
    assert hits[0][1] == pytest.approx(0, abs=1e-3)
    assert [score for _, score in hits] == sorted(score for _, score in hits)
    relevance = store.similarity_search_with_relevance_scores(FOXES, k=3)
    assert relevance[0][1] == pytest.approx(1, abs=1e-3)
    assert all(0 <= score <= 1 for _, score in relevance)
    near = store.as_retriever(
        search_type="similarity_score_threshold", search_kwargs={"score_threshold": 0.9}
    )
    assert [d.page_content for d in near.invoke(FOXES)] == [FOXES]


def test_a_filter_is_metadata_or_a_function(store: BlendVectorStore) -> None:
    store.add_documents(documents(CATS, source="a") + documents(SHIPS, FOXES, source="b"))

    def texts(filter: Any) -> set[str]:
        return {d.page_content for d in store.similarity_search("the", k=3, filter=filter)}

    assert texts({"source": "a"}) == {CATS}
    assert texts({"source": ["a", "b"]}) == {CATS, SHIPS, FOXES}
    assert texts(lambda d: "fox" in d.page_content) == {FOXES}
    with pytest.raises(InvalidInputError, match="filter is a str, expected metadata"):
        store.similarity_search("the", filter="a")  # type: ignore[arg-type]


def test_marginal_relevance_prefers_what_is_new(store: BlendVectorStore) -> None:
    alike = CATS.replace("sleep", "doze")
    store.add_documents(documents(CATS, alike, FOXES))
    near = [d.page_content for d in store.similarity_search(CATS, k=2)]
    spread = [d.page_content for d in store.max_marginal_relevance_search(CATS, 2, lambda_mult=0.1)]
    assert set(near) == {CATS, alike}
    assert FOXES in spread
    vector = store.embeddings.embed_query(CATS)
    assert store.similarity_search_by_vector(vector, k=1)[0].page_content == CATS


def test_an_empty_store_finds_nothing(store: BlendVectorStore) -> None:
    assert store.similarity_search("x") == []
    assert store.max_marginal_relevance_search("x") == []
    assert store.get_by_ids(["1"]) == []
    assert store.delete(["1"]) is True
    assert store.delete() is True


# -- making -----------------------------------------------------------------------------------------


def test_from_texts_and_from_documents_make_a_filled_store(engine: BlendEngine) -> None:
    made = BlendVectorStore.from_texts([CATS], metadatas=[{"n": 1}], ids=["1"], engine=engine)
    assert made.get_by_ids(["1"])[0].metadata == {"n": 1}
    given = [Document(SHIPS, id="2"), Document(FOXES)]
    other = BlendVectorStore.from_documents(given, engine=engine)
    assert [d.page_content for d in other.get_by_ids(["2"])] == [SHIPS]
    assert len(other.similarity_search("the", k=9)) == 3


def test_vectors_of_langchains_embeddings_are_remembered_by_name(engine: BlendEngine) -> None:
    made = BlendVectorStore.from_texts([CATS], DeterministicFakeEmbedding(size=8), engine=engine)
    assert made.similarity_search(CATS)[0].page_content == CATS
    with pytest.raises((CorpusError, InvalidInputError)):
        BlendVectorStore(engine=engine).add_texts([SHIPS])


def test_copies_share_the_engine_and_a_wrapper_is_pickled_by_names_only(
    store: BlendVectorStore,
) -> None:
    assert copy.deepcopy(store).engine is store.engine
    with pytest.raises(InvalidInputError, match="made with engine= cannot be pickled"):
        pickle.dumps(store)


def test_a_wrapper_is_pickled_by_its_names_or_not_at_all(tmp_path: Path) -> None:
    try:
        with BlendVectorStore(model="demo", store=tmp_path / "a") as named:
            assert pickle.loads(pickle.dumps(named)).engine is named.engine
            engine = named.engine
        assert engine.closed
    finally:
        close_shared_engines()


@pytest.mark.parametrize("embedder", [None, "minilm-offline"])
def test_vectors_of_langchains_embeddings_are_added_again_and_again(
    tmp_path: Path, embedder: str | None
) -> None:
    names: dict[str, Any] = {"model": "demo", "store": tmp_path, "embedder": embedder}
    try:
        for text in (CATS, SHIPS, FOXES):
            made = BlendVectorStore(DeterministicFakeEmbedding(size=8), **names)
            made.add_documents(documents(text), precompute=False)
        assert len(made.similarity_search("cats", k=5)) == 3
        with pytest.raises(InvalidInputError, match="9 numbers in a corpus of 8"):
            BlendVectorStore(DeterministicFakeEmbedding(size=9), **names).add_documents(
                documents(CHANGED)
            )
    finally:
        close_shared_engines()
