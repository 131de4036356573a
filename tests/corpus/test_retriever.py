"""A question brings the nearest chunks, in the order in which they should be read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from blendrag.corpus.corpus import Corpus
from blendrag.corpus.embedder import Embedder
from blendrag.corpus.retriever import Retriever
from blendrag.errors import InvalidInputError
from blendrag.text.chunking import Chunk, chunk_id_of
from blendrag.text.readers import Document, digest_of

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
def embedder() -> Embedder:
    return Embedder("minilm-offline")


@pytest.fixture
def corpus(tmp_path: Path, embedder: Embedder) -> Iterator[Corpus]:
    with Corpus.open(tmp_path, create=True) as opened:
        for title, sentences in DOCUMENTS.items():
            text = "\n\n".join(sentences)
            document = Document(f"{title}.txt", text, title, {"lang": "en"})
            chunks = [
                Chunk(s, text.index(s), text.index(s) + len(s), len(s.split()), chunk_id_of(s))
                for s in sentences
            ]
            vectors = embedder.embed(sentences, titles=[title] * len(sentences))
            opened.put_document(document, digest_of(document), chunks, vectors)
        yield opened


def test_chunks_of_one_document_come_in_its_order_and_the_nearest_document_first(
    corpus: Corpus, embedder: Embedder
) -> None:
    found = Retriever(corpus, embedder).retrieve("Which bridge did the mayor order?", 4)
    assert [chunk.text for chunk in found[:3]] == DOCUMENTS["Maria Silva"]
    assert found[0].distance > found[2].distance, "the order is not that of the distances"
    assert found[3].title != "Maria Silva"
    assert found[1].metadata == {"lang": "en"}
    assert all(0 <= chunk.distance <= 2 for chunk in found)


def test_a_chunk_that_only_says_she_is_found_by_its_title(
    corpus: Corpus, embedder: Embedder
) -> None:
    (chunk,) = Retriever(corpus, embedder).retrieve("What did Maria Silva study?", 1)
    assert chunk.text == DOCUMENTS["Maria Silva"][1]


def test_asking_for_more_than_there_is_returns_all(corpus: Corpus, embedder: Embedder) -> None:
    assert len(Retriever(corpus, embedder).retrieve("anything", 100)) == 6


@pytest.mark.parametrize(
    ("question", "top_k", "reason"),
    [("  ", 3, "question is empty"), ("what?", 0, "top_k is 0"), ("what?", 3, "ingest first")],
)
def test_what_cannot_be_answered_says_why(
    tmp_path: Path, embedder: Embedder, question: str, top_k: int, reason: str
) -> None:
    with (
        Corpus.open(tmp_path / "empty", create=True) as empty,
        pytest.raises(InvalidInputError, match=reason),
    ):
        Retriever(empty, embedder).retrieve(question, top_k)
