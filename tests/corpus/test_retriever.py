"""A question returns the nearest chunks in reading order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from blendrag.corpus.corpus import Corpus
from blendrag.corpus.embedder import Embedder
from blendrag.corpus.retriever import Retriever
from blendrag.errors import InvalidInputError
from blendrag.text.readers import Document, digest_of
from corpus.corpus_fuzz import chunk_of

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
    [("  ", 3, "question is empty"), ("what?", 0, "top_k is 0"), ("what?", 3, "ingest first")],
)
def test_an_impossible_question_says_why(
    tmp_path: Path, embedder: Embedder, question: str, top_k: int, reason: str
) -> None:
    with (
        Corpus.open(tmp_path / "empty", create=True) as empty,
        pytest.raises(InvalidInputError, match=reason),
    ):
        Retriever(empty, embedder).retrieve(question, top_k)
