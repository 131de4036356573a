"""Searches by vectors, by words and by both, and what a reranker makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from blendrag.corpus.corpus import Corpus
from blendrag.corpus.reranker import Reranker
from blendrag.corpus.retriever import RetrievedChunk, Retriever
from blendrag.errors import InvalidInputError, ModelLoadError
from blendrag.text.readers import Document
from corpus.small_corpus import chunk_of, vector_of

KEYS = [f"SKU-{number}" for number in range(100, 130)]
ROWS = [f"{key}: a bolt of steel, in stock" for key in KEYS]


class Vectors:
    """Embeds a question as the row that it is told, or in no direction of any row."""

    def __init__(self, nearest: dict[str, str] | None = None) -> None:
        self.nearest = nearest or {}

    def embed_queries(self, texts: Sequence[str], **_: Any) -> np.ndarray:
        return np.stack([vector_of(self.nearest.get(text, text)) for text in texts])


class NoVectors:
    def embed_queries(self, texts: Sequence[str], **_: Any) -> np.ndarray:
        raise AssertionError("lexical search embeds nothing")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Corpus]:
    with Corpus.open(tmp_path_factory.mktemp("corpus"), create=True) as corpus:
        chunks = [chunk_of(row, 100 * at) for at, row in enumerate(ROWS)]
        vectors = np.stack([vector_of(row) for row in ROWS])
        corpus.put_document(Document("stock.csv", "", "Stock"), "d", chunks, vectors)
        yield corpus


def retrieve(
    corpus: Corpus, embedder: Any, question: str, k: int = 3, **more: Any
) -> list[RetrievedChunk]:
    found = Retriever(corpus, embedder).retrieve(question, k, **more)
    assert [chunk.start for chunk in found] == sorted(chunk.start for chunk in found)
    return sorted(found, key=lambda chunk: chunk.rank)


def test_a_key_is_found_whatever_the_vectors_say(corpus: Corpus) -> None:
    for at in range(0, 30, 5):
        found = retrieve(corpus, Vectors(), f"How many pieces of {KEYS[at]} are there?")
        assert found[0].text == ROWS[at]
        assert [chunk.rank for chunk in found] == [1, 2, 3]
        assert 0 < found[1].score <= found[0].score <= 1
        assert all(chunk.distance is not None and 0 <= chunk.distance <= 2 for chunk in found)


def test_words_that_every_chunk_has_leave_the_order_to_the_vectors(corpus: Corpus) -> None:
    question = "Is a bolt of steel in stock?"
    vectors = Vectors({question: ROWS[17]})
    dense = retrieve(corpus, vectors, question, search="dense")
    assert dense[0].text == ROWS[17]
    assert dense[0].score == pytest.approx(1.0, abs=1e-3)
    assert retrieve(corpus, vectors, question)[0].text == ROWS[17]


def test_lexical_search_needs_no_embedder(corpus: Corpus) -> None:
    found = retrieve(corpus, NoVectors(), "sku 107", search="lexical")
    assert (found[0].text, found[0].distance) == (ROWS[7], None)


def test_an_unknown_way_to_search_is_refused(corpus: Corpus) -> None:
    with pytest.raises(InvalidInputError, match="search 'semantic' must be one of hybrid, dense"):
        retrieve(corpus, Vectors(), "SKU-100", search="semantic")


# -- rerankers ------------------------------------------------------------------------------------


class Favourite:
    """Scores one row above all others."""

    def __init__(self, row: str) -> None:
        self.row = row
        self.question = ""
        self.asked: list[str] = []

    def scores(self, question: str, texts: Sequence[str], check: Any) -> np.ndarray:
        self.question = question
        self.asked += texts
        return np.array([float(text == self.row) for text in texts])


def test_a_reranker_sorts_more_chunks_than_are_returned(corpus: Corpus) -> None:
    best = retrieve(corpus, Vectors(), "SKU-103 SKU-104", 20)
    favourite = Favourite(best[15].text)
    found = Retriever(corpus, Vectors(), reranker=favourite).retrieve("SKU-103 SKU-104", 2)  # type: ignore[arg-type]
    first = min(found, key=lambda chunk: chunk.rank)
    assert (first.text, first.score, len(found)) == (favourite.row, 1.0, 2)
    assert len(favourite.asked) == 20


def test_a_reranker_reads_the_question_before_only_if_the_new_one_goes_on_with_it(
    corpus: Corpus,
) -> None:
    favourite = Favourite("")
    before, question = "What is in stock?", "And where?"
    both = f"{before}\n{question}"
    for nearer, read in ((both, both), (question, question)):
        retriever = Retriever(corpus, Vectors({nearer: ROWS[3]}), reranker=favourite)  # type: ignore[arg-type]
        retriever.retrieve(question, 2, earlier=before)
        assert favourite.question == read


def save(folder: Path, kind: Any, labels: int) -> Path:
    """A tiny BERT of random weights with a tokenizer of a few words."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, num_labels=labels,
    )  # fmt: skip
    kind(config).save_pretrained(folder)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "bolt", "steel", "stock"]
    model = tokenizers.models.WordLevel({word: at for at, word in enumerate(words)}, "[UNK]")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]", mask_token="[MASK]", model_max_length=64,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def test_a_cross_encoder_scores_each_text(tmp_path: Path) -> None:
    folder = save(tmp_path / "reranker", transformers.BertForSequenceClassification, 1)
    reranker = Reranker(str(folder))
    scores = reranker.scores("bolt", ["steel bolt", "stock", *["x"] * 9])
    assert scores.shape == (11,)
    assert np.isfinite(scores).all()
    assert len({*scores.tolist()}) > 1
    assert reranker.scores("bolt", []).shape == (0,)


@pytest.mark.parametrize(
    ("kind", "labels", "named"),
    [
        (transformers.BertModel, 1, "BertModel"),
        (transformers.BertForSequenceClassification, 3, "with 3 outputs"),
    ],
)
def test_a_model_that_is_no_reranker_is_refused(
    tmp_path: Path, kind: Any, labels: int, named: str
) -> None:
    folder = save(tmp_path / "other", kind, labels)
    with pytest.raises(InvalidInputError, match=rf"reranker .*{named}.*expected a cross-encoder"):
        Reranker(str(folder)).scores("bolt", ["steel"])


def test_a_reranker_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="reranker 'nobody/nothing' cannot be loaded"):
        Reranker("nobody/nothing").scores("bolt", ["steel"])
