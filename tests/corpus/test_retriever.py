"""A question returns the nearest chunks in reading order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from blendrag.config import SearchMode
from blendrag.corpus.corpus import Corpus
from blendrag.corpus.embedder import Embedder
from blendrag.corpus.filters import Filter
from blendrag.corpus.retriever import Retriever
from blendrag.corpus.search import SearchQuery
from blendrag.demo import demo_corpus_path, demo_questions
from blendrag.errors import InvalidInputError
from blendrag.text.readers import Document, digest_of
from corpus.small_corpus import chunk_of, make_corpus, vector_of

DOCUMENTS = {
    "Maria Silva": [
        "Maria Silva was born in the harbour town of Porto Velho.",
        "She studied bridges and rivers at the school of engineering.",
        "Later she became mayor and ordered a new bridge for the town.",
    ],
    "Potato farming": [
        "Potatoes grow best in loose soil with plenty of water.",
        "Seed potatoes are planted in rows in early spring.",
    ],
    "Lighthouses": ["A lighthouse warns ships of rocks by a lamp that turns at night."],
}


@pytest.fixture(scope="module")
def retriever(tmp_path_factory: pytest.TempPathFactory, embedder: Embedder) -> Iterator[Retriever]:
    with Corpus.open(tmp_path_factory.mktemp("corpus"), create=True) as corpus:
        for title, sentences in DOCUMENTS.items():
            text = "\n\n".join(sentences)
            document = Document(f"{title}.txt", text, title, {"lang": "en"})
            chunks = [chunk_of(sentence, text.index(sentence)) for sentence in sentences]
            vectors = embedder.embed(sentences, titles=[title] * len(sentences))
            corpus.put_document(document, digest_of(document), chunks, vectors)
        yield Retriever(corpus, embedder)


OLD_BRIDGE = "The old bridge of the town was ordered by its first mayor."
NEW_BRIDGE = "The new bridge of the town is made of stone and of steel."


def test_chunks_come_in_document_order_nearest_document_first(retriever: Retriever) -> None:
    found = retriever.retrieve("Which bridge did the mayor order?", 4)
    assert [chunk.text for chunk in found[:3]] == DOCUMENTS["Maria Silva"]
    assert found[0].distance > found[2].distance, "the order is not that of the distances"
    assert found[3].title != "Maria Silva"
    assert found[1].metadata == {"lang": "en"}
    assert all(0 <= chunk.distance <= 2 for chunk in found)
    assert len(retriever.retrieve("anything", 100)) == 6


@pytest.mark.parametrize(
    ("question", "top_k", "reason"),
    [("  ", 3, "question is empty"), ("what?", 0, "top_k 0 must be"), ("what?", 3, "ingest first")],
)
def test_an_impossible_question_says_why(
    tmp_path: Path, embedder: Embedder, question: str, top_k: int, reason: str
) -> None:
    with (
        Corpus.open(tmp_path / "empty", create=True) as empty,
        pytest.raises(InvalidInputError, match=reason),
    ):
        Retriever(empty, embedder).retrieve(question, top_k)


@pytest.mark.parametrize("mode", ["dense", "lexical", "hybrid"])
def test_a_filter_leaves_as_many_chunks_as_it_passes_however_far_they_are(
    retriever: Retriever, mode: SearchMode
) -> None:
    potatoes = {"type": "glob", "key": "source", "value": "Potato*"}
    question = "Which bridge did the mayor of the town in the potato soil order in spring?"
    found = retriever.retrieve(question, 2, search=mode, filter=potatoes)
    assert [chunk.text for chunk in found] == DOCUMENTS["Potato farming"]
    others = {"type": "not", "filters": [potatoes]}
    assert len(retriever.retrieve(question, 4, search="dense", filter=others)) == 4
    none = Filter.only("*.pdf")
    assert retriever.retrieve(question, 2, search=mode, filter=none) == []
    follow_up = retriever.retrieve("And when?", 3, earlier=question, filter=potatoes)
    assert {chunk.title for chunk in follow_up} == {"Potato farming"}


def test_a_chunk_of_many_documents_is_found_at_the_one_that_passes(tmp_path: Path) -> None:
    with Corpus.open(tmp_path, create=True) as corpus:
        for name in "abc":
            chunk = chunk_of("the same text")
            document = Document(f"{name}.md", chunk.text, name, {"name": name})
            corpus.put_document(document, "d", [chunk], vector_of(chunk.text)[None])
        query = SearchQuery("same", vector_of("the same text"), "hybrid")
        ((found,),) = corpus.search([query], 3, Filter.where("name=b"))
        assert found.chunk.source == "b.md"


def test_passages_that_pass_but_have_no_vector_end_a_search(tmp_path: Path) -> None:
    make_corpus(tmp_path)
    with Corpus.open(tmp_path) as corpus:
        allowed = corpus.allowed(Filter.where("n>=2"))
        assert allowed is not None
        assert len(allowed) == 2
        query = SearchQuery("", vector_of("anything"), "dense")
        ((found,),) = corpus.search([query], 5, Filter.where("n>=2"))
        assert found.chunk.entry_id == "id2"


def test_a_search_uses_one_thread_and_leaves_their_number(
    retriever: Retriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    import faiss

    used: list[int] = []
    search = faiss.IndexIDMap2.search

    def watched(*args: Any, **kwargs: Any) -> Any:
        used.append(faiss.omp_get_max_threads())
        return search(*args, **kwargs)

    monkeypatch.setattr(faiss.IndexIDMap2, "search", watched)
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(2)
    try:
        retriever.retrieve("Where?", 2)
        assert faiss.omp_get_max_threads() == 2
    finally:
        faiss.omp_set_num_threads(before)
    assert set(used) == {1}


# -- conversations --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo_corpus(
    tmp_path_factory: pytest.TempPathFactory, embedder: Embedder
) -> Iterator[Retriever]:
    with Corpus.open(tmp_path_factory.mktemp("demo"), create=True) as corpus:
        for path in sorted(demo_corpus_path().iterdir()):
            text = path.read_text(encoding="utf-8")
            document = Document(path.name, text, path.stem)
            paragraphs = text.split("\n\n")
            chunks = [chunk_of(each, text.index(each)) for each in paragraphs]
            vectors = embedder.embed(paragraphs, titles=[path.stem] * len(paragraphs))
            corpus.put_document(document, digest_of(document), chunks, vectors)
        yield Retriever(corpus, embedder)


def found(retriever: Retriever, question: str, top_k: int, earlier: str = "") -> set[str]:
    chunks = retriever.retrieve(question, top_k, earlier=earlier)
    assert len(chunks) == top_k
    return {chunk.source.removesuffix(".txt") for chunk in chunks}


@pytest.mark.parametrize("top_k", [2, 6])
def test_a_change_of_topic_finds_what_the_question_finds_alone(
    demo_corpus: Retriever, top_k: int
) -> None:
    for before, asked in pairwise(demo_questions()):
        assert asked.document_id in found(demo_corpus, asked.text, top_k)
        assert asked.document_id in found(demo_corpus, asked.text, top_k, before.text), asked


FOLLOW_UPS = [
    ("Which dance ends Apple Festival?", "And who leads it?", "apple-festival"),
    ("Which company does Nina Hobbs work for?", "What does she collect?", "nina-hobbs"),
    ("In which town does Albert Lange live?", "And what is his job?", "albert-lange"),
    ("Which company makes Astra toaster?", "What is it made of?", "astra-toaster"),
    ("Who is the host of Poppy Market?", "When was it first held?", "poppy-market"),
    ("Which animal is the emblem of Ocean Union?", "And its director?", "ocean-union"),
]


@pytest.mark.parametrize("top_k", [1, 2, 6])
@pytest.mark.parametrize(("before", "question", "document"), FOLLOW_UPS)
def test_a_question_that_goes_on_finds_the_subject_of_the_one_before(
    demo_corpus: Retriever, before: str, question: str, document: str, top_k: int
) -> None:
    assert document in found(demo_corpus, question, top_k, before)


def test_a_question_of_a_conversation_is_embedded_in_one_batch(
    demo_corpus: Retriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    model = demo_corpus.embedder._loaded()
    encode = type(model).encode_query
    monkeypatch.setattr(
        type(model), "encode_query", lambda *of, **how: calls.append(of[1]) or encode(*of, **how)
    )
    demo_corpus.retrieve("And when?", 2, earlier="Who is the director of Beacon Partners?")
    (texts,) = calls
    assert len(texts) == 2


def test_both_searches_of_a_conversation_see_one_state_of_the_corpus(
    tmp_path: Path, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A document that another process replaces between them is not found in two versions."""

    def put(corpus: Corpus, sentence: str) -> None:
        document = Document("bridge.txt", sentence, "bridge", {})
        vectors = embedder.embed([sentence], titles=["bridge"])
        corpus.put_document(document, digest_of(document), [chunk_of(sentence)], vectors)

    with Corpus.open(tmp_path, create=True) as corpus, Corpus.open(tmp_path) as other:
        put(corpus, OLD_BRIDGE)
        index, retriever, calls = corpus.searches.full_text, Retriever(corpus, embedder), []
        ranked = index.ranked

        def changed_before_the_second(*given: Any, **how: Any) -> Any:
            if len(calls) == 1:
                put(other, NEW_BRIDGE)
            calls.append(given)
            return ranked(*given, **how)

        monkeypatch.setattr(index, "ranked", changed_before_the_second)
        for expected in OLD_BRIDGE, NEW_BRIDGE:
            found = retriever.retrieve("Is it new?", 4, earlier="Who ordered the old bridge?")
            assert [chunk.text for chunk in found] == [expected]
