"""``BlendVectorStore``: KV is added and deleted with the documents; searches and refusals."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.indexing import InMemoryRecordManager, aindex, index
from langchain_core.vectorstores import VectorStore
from langchain_tests.integration_tests import VectorStoreIntegrationTests
from samples import CATS, CHANGED, FOXES, SHIPS, documents

import tiny
from blendrag.engine import BlendEngine, Filter
from blendrag.errors import CorpusError, InvalidInputError
from blendrag.store.identity import chunk_key
from langchain_blendrag import BlendRetriever, BlendVectorStore
from loops import BLOCKED_S


@pytest.fixture
def engine(empty: BlendEngine) -> BlendEngine:
    return empty


@pytest.fixture
def store(engine: BlendEngine) -> BlendVectorStore:
    return BlendVectorStore(engine=engine)


def has_kv(engine: BlendEngine, text: str) -> bool:
    """Whether the KV of ``text`` is in the store."""
    kv = engine.kv_namespace
    namespace = kv.name()
    key = chunk_key(namespace, kv.corpus.prefix_ids, kv.model.text_ids(text))
    return bool(kv.store.where(namespace, [key]))


def test_kv_is_added_with_a_document_and_deleted_with_the_last_of_its_text(
    store: BlendVectorStore, engine: BlendEngine
) -> None:
    store.add_documents(documents(CATS, SHIPS, CATS), ids=["1", "2", "3"])
    assert has_kv(engine, CATS)
    assert has_kv(engine, SHIPS)
    store.delete(["1", "2"])
    assert (has_kv(engine, CATS), has_kv(engine, SHIPS)) == (True, False)
    store.delete(["3"])
    assert not has_kv(engine, CATS)
    store.add_documents(documents(FOXES), precompute=False)
    assert not has_kv(engine, FOXES)


class Gate(DeterministicFakeEmbedding):
    """Waits before it embeds, and fails where ``texts`` hold a word."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        assert GATE.wait(BLOCKED_S)
        if any("fails" in text for text in texts):
            raise ConnectionError("the embedder is gone")
        return super().embed_documents(texts)


GATE = threading.Event()


@pytest.fixture
def gated(engine: BlendEngine) -> Iterator[BlendVectorStore]:
    GATE.clear()
    yield BlendVectorStore(Gate(size=8), engine=engine)
    GATE.set()


def test_documents_are_added_while_the_caller_goes_on(
    gated: BlendVectorStore, engine: BlendEngine
) -> None:
    given = documents(CATS, SHIPS, FOXES)
    ids = gated.add_documents(given, batch_size=1, wait=False)
    assert gated.indexing == (0, 3)
    assert not gated.wait(0)
    assert gated.get_by_ids(ids) == []
    GATE.set()
    assert gated.wait(BLOCKED_S)
    assert gated.indexing == (3, 3)
    assert [found.page_content for found in gated.get_by_ids(ids)] == [CATS, SHIPS, FOXES]
    assert has_kv(engine, SHIPS)


@pytest.mark.parametrize("wait", [True, False])
def test_batches_of_less_than_one_document_are_refused(engine: BlendEngine, wait: bool) -> None:
    with pytest.raises(InvalidInputError, match="batch_size is -1, expected 1 or more"):
        BlendVectorStore(engine=engine).add_documents(documents(CATS), batch_size=-1, wait=wait)


@pytest.mark.parametrize("by", ["wait", "delete", "add"])
def test_what_went_wrong_in_the_background_is_raised_once_by_the_next_call(
    gated: BlendVectorStore, by: str
) -> None:
    GATE.set()
    ids = gated.add_documents(documents(CATS, "It fails.", FOXES), batch_size=1, wait=False)
    while any(each.name == "blendrag-additions" for each in threading.enumerate()):
        time.sleep(0.01)
    calls = {
        "wait": gated.wait,
        "delete": lambda: gated.delete(ids),
        "add": lambda: gated.add_documents(documents(SHIPS)),
    }
    with pytest.raises(ConnectionError) as caught:
        calls[by]()
    assert caught.value.__notes__ == ["2 entries were not added in the background; add them again"]
    assert [found.page_content for found in gated.get_by_ids(ids)] == [CATS]
    calls[by]()


def test_a_wrong_document_is_refused_at_once_also_without_waiting(gated: BlendVectorStore) -> None:
    before = gated.indexing
    with pytest.raises(InvalidInputError):
        gated.add_documents([Document("A text.", metadata={"at": object()})], wait=False)
    assert gated.indexing == before


def test_documents_without_ids_are_added_once(store: BlendVectorStore) -> None:
    given = [*documents(CATS, SHIPS), *documents(CATS, source="other")]
    first, again = store.add_documents(given), store.add_documents(given)
    assert first == again
    assert len(set(first)) == 3
    assert len(store.similarity_search("harbour", k=9)) == 3


@pytest.mark.parametrize(
    ("cleanup", "is_async"),
    [(None, False), ("incremental", True), ("full", False), ("full", True), ("scoped_full", False)],
)
async def test_langchains_index_keeps_kv_up_to_date(
    store: BlendVectorStore, engine: BlendEngine, cleanup: Any, is_async: bool
) -> None:
    records = InMemoryRecordManager(namespace="x")
    records.create_schema()

    async def indexed(*given: Document) -> Any:
        how: Any = {"cleanup": cleanup, "source_id_key": "source", "key_encoder": "sha256"}
        if is_async:
            return await aindex(list(given), records, store, **how)
        return index(list(given), records, store, **how)

    cats = documents(CATS, source="a")
    ships = documents(SHIPS, source="b")
    assert (await indexed(*cats, *ships))["num_added"] == 2
    assert (await indexed(*cats, *ships))["num_skipped"] == 2

    # the document of source b changes, that of source a is left out
    change = await indexed(*documents(CHANGED, source="b"))
    assert change["num_added"] == 1
    keeps_changed, keeps_left_out = cleanup is None, cleanup != "full"
    assert change["num_deleted"] == (not keeps_changed) + (not keeps_left_out)
    assert has_kv(engine, CHANGED)
    assert has_kv(engine, SHIPS) == keeps_changed
    assert has_kv(engine, CATS) == keeps_left_out

    # all documents are removed
    await indexed()
    assert has_kv(engine, CHANGED) == (cleanup != "full")
    if cleanup == "full":
        assert store.similarity_search("ships") == []


def test_scores_are_distances_and_relevance_is_similarity(store: BlendVectorStore) -> None:
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
    assert texts({"source": {"$ne": "a"}}) == {SHIPS, FOXES}
    assert texts(Filter.where("source=a")) == {CATS}
    assert texts({}) == {CATS, SHIPS, FOXES}
    assert texts(lambda d: "fox" in d.page_content) == {FOXES}
    with pytest.raises(InvalidInputError, match="filter is a str, expected metadata"):
        store.similarity_search("the", filter="a")  # type: ignore[arg-type]


def test_filters_have_the_operators_of_other_vector_stores(store: BlendVectorStore) -> None:
    years = {CATS: 2023, SHIPS: 2024, FOXES: 2025}
    given = [Document(text, metadata={"year": year}) for text, year in years.items()]
    given[0].metadata |= {"tags": ["pets", "Home"], "by": None}
    given[1].metadata |= {"by": "Kim"}
    store.add_documents(given)

    def texts(filter: Any) -> set[str]:
        return {d.page_content for d in store.similarity_search("the", k=3, filter=filter)}

    assert texts({"year": {"$gte": 2024, "$lt": 2025}}) == {SHIPS}
    assert texts({"year": {"$in": [2023, 2025]}}) == {CATS, FOXES}
    assert texts({"$or": [{"year": 2023}, {"by": "Kim"}]}) == {CATS, SHIPS}
    assert texts({"$and": [{"year": {"$gt": 2023}}, {"by": None}]}) == {FOXES}
    assert texts({"$not": {"year": {"$neq": 2024}}}) == {SHIPS}
    assert texts({"type": "eq", "key": "year", "value": 2025}) == {FOXES}, "as blendrag writes it"
    assert texts({"$or": [{"type": "is_empty", "key": "by"}, {"by": "Kim"}]}) == {
        CATS,
        SHIPS,
        FOXES,
    }
    assert texts({"tags": "pets"}) == {CATS}
    assert texts({"by": {"$ilike": "KI"}}) == {SHIPS}
    marginal = store.max_marginal_relevance_search("the", 3, filter={"year": {"$gt": 2023}})
    assert {d.page_content for d in marginal} == {SHIPS, FOXES}
    retriever = store.as_retriever(search_kwargs={"k": 3, "filter": {"year": 2025}})
    assert [d.page_content for d in retriever.invoke("the")] == [FOXES]
    corpus = BlendRetriever(engine=store.engine, filter={"year": {"$lt": 2025}})
    assert {d.page_content for d in corpus.invoke("the")} == {CATS, SHIPS}
    assert [d.page_content for d in corpus.invoke("the", filter={"year": 2025})] == [FOXES]


def test_marginal_relevance_prefers_diverse_documents(store: BlendVectorStore) -> None:
    alike = CATS.replace("sleep", "doze")
    store.add_documents(documents(CATS, alike, FOXES))
    near = [d.page_content for d in store.similarity_search(CATS, k=2)]
    spread = [d.page_content for d in store.max_marginal_relevance_search(CATS, 2, lambda_mult=0.1)]
    assert set(near) == {CATS, alike}
    assert FOXES in spread
    vector = store.embeddings.embed_query(CATS)
    assert store.similarity_search_by_vector(vector, k=1)[0].page_content == CATS


def test_from_texts_and_from_documents_make_a_filled_store(engine: BlendEngine) -> None:
    made = BlendVectorStore.from_texts([CATS], metadatas=[{"n": 1}], ids=["1"], engine=engine)
    assert made.get_by_ids(["1"])[0].metadata == {"n": 1}
    given = [Document(SHIPS, id="2"), Document(FOXES)]
    other = BlendVectorStore.from_documents(given, engine=engine)
    assert [d.page_content for d in other.get_by_ids(["2"])] == [SHIPS]
    assert len(other.similarity_search("the", k=9)) == 3


def test_vectors_of_langchains_embeddings_are_remembered(own: BlendEngine) -> None:
    for text in (CATS, SHIPS):
        made = BlendVectorStore(DeterministicFakeEmbedding(size=8), engine=own)
        made.add_documents(documents(text), precompute=False)
    assert made.similarity_search(CATS, k=1)[0].page_content == CATS
    assert len(made.similarity_search("cats", k=5)) == 2
    other = BlendVectorStore(DeterministicFakeEmbedding(size=9), engine=own)
    with pytest.raises(InvalidInputError, match="9 numbers in a corpus of 8"):
        other.add_documents(documents(CHANGED))
    with pytest.raises((CorpusError, InvalidInputError)):
        BlendVectorStore(engine=own).add_texts([SHIPS])


def test_wrong_arguments_are_refused_and_change_nothing(store: BlendVectorStore) -> None:
    store.add_documents(documents(CATS), ids=["a"])
    kept: Any = store
    unknown_metadata = Document(CATS, metadata={"x": object()})
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: kept.add_texts("hello"), "a list of texts"),
        (lambda: kept.delete("ab"), "a list of texts"),
        (lambda: kept.get_by_ids("ab"), "a list of texts"),
        (lambda: kept.add_documents(["x"]), "use add_texts"),
        (lambda: kept.add_documents(Document("x")), "a list of Document"),
        (lambda: kept.add_documents(documents(CATS, SHIPS), ids=["1"]), "1 ids for 2 documents"),
        (lambda: kept.add_documents([], batchsize=3), "batchsize: not an option of add_documents"),
        (lambda: kept.add_documents([unknown_metadata], ids=["1"]), "metadata"),
        (lambda: kept.similarity_search(None), "expected a text"),
        (lambda: kept.similarity_search("x", k="2"), "whole number"),
        (lambda: kept.similarity_search("x", k=-1), "0 or more"),
        (lambda: kept.similarity_search("x", top_k=2), "top_k: not an option"),
        (
            lambda: kept.similarity_search("x", filter={"a": {"$in": [1]}}),
            "'a', which no document has",
        ),
        (
            lambda: kept.similarity_search("x", filter={"source": {"$is": 1}}),
            "that compares; expected",
        ),
        (
            lambda: kept.similarity_search("x", filter={"source": {}}),
            "'source' has no operators",
        ),
        (
            lambda: kept.similarity_search("x", filter={"$xor": []}),
            "that joins filters; did you mean",
        ),
        (lambda: kept.similarity_search("x", filter={"$or": {"a": 1}}), "a list of filters"),
        (lambda: kept.similarity_search("x", filter={"$and": ["a"]}), "in place of metadata"),
        (lambda: kept.similarity_search("x", filter={"source": 1}), "but it holds texts"),
        (lambda: kept.max_marginal_relevance_search("x", lambda_=1), "lambda_mult"),
        (lambda: BlendVectorStore(stor="kv"), "did you mean store"),  # type: ignore[call-arg]
        (lambda: BlendVectorStore("demo"), "model="),  # type: ignore[arg-type]
    ]
    for call, says in calls:
        with pytest.raises(InvalidInputError, match=says) as raised:
            call()
        assert tiny.one_sentence(str(raised.value))
    with pytest.raises(ValueError, match=r"\$is: not an operator that compares"):
        BlendRetriever(engine=store.engine, filter={"a": {"$is": 1}})
    with pytest.raises(InvalidInputError, match="similarity_score_threshold"):
        store.as_retriever(search_kwargs={"score_threshold": 0.5}).invoke("x")
    assert [doc.id for doc in store.similarity_search("cats", k=9)] == ["a"]


class TestOwnVectors(VectorStoreIntegrationTests):
    """With vectors of the corpus's embedding model."""

    @pytest.fixture
    def vectorstore(self, store: BlendVectorStore) -> VectorStore:
        return store


@pytest.mark.slow
class TestGivenVectors(VectorStoreIntegrationTests):
    """With vectors of LangChain's embeddings."""

    @pytest.fixture
    def vectorstore(self, own: BlendEngine) -> VectorStore:
        return BlendVectorStore(self.get_embeddings(), engine=own)
