"""What ``blendrag eval`` asks: the dataset that its options name.

Owns the defaults of a dataset's size and where chunks come from: generated, out of the file, or out of
an ingested corpus. Parses nothing, runs nothing; heavy imports inside.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blendrag.lab.evaluation.cases import Dataset
    from blendrag.lab.evaluation.datasets import Retrieve
    from blendrag.model.tokens import Tokens

SYNTHETIC = "synthetic"
#: Largest chunk of a generated context, and of a file's.
GENERATED_TOKENS, FILE_TOKENS = 64, 512


@dataclass(frozen=True)
class Asked:
    """The dataset as the options name it."""

    name: str
    split: str
    seed: int
    contexts: int
    questions: int | None
    chunks: int
    chunk_tokens: int | None
    embedder: str | None
    store: Path | None
    """Whose calibrated schedules are meant, and whose documents records without texts are about."""


def make_dataset(asked: Asked, tokens: Tokens) -> Dataset:
    """Without the model's weights: what is wrong with a dataset is said before they are loaded."""
    from blendrag.config import settings
    from blendrag.corpus.embedder import Embedder
    from blendrag.lab.evaluation.datasets import read_dataset
    from blendrag.lab.evaluation.synthetic import synthetic_dataset
    from blendrag.text.chunking import Chunker

    if asked.name == SYNTHETIC:
        return synthetic_dataset(
            tokens, asked.seed, asked.split, asked.contexts, asked.chunks,
            asked.chunk_tokens or GENERATED_TOKENS, asked.questions,
        )  # fmt: skip
    with _retrieving(asked.store, asked.chunks, asked.embedder) as (retrieve, corpus_tokens):
        return read_dataset(
            Path(asked.name),
            Chunker(tokens.text, asked.chunk_tokens or corpus_tokens),
            Embedder(asked.embedder or settings().embedder),
            asked.contexts,
            asked.chunks,
            retrieve,
        )


@contextmanager
def _retrieving(
    store: Path | None, top_k: int, embedder: str | None
) -> Iterator[tuple[Retrieve | None, int]]:
    """As ``blendrag ask`` retrieves from ``store``, and the tokens of its chunks; nothing without one."""
    from blendrag.corpus.corpus import Corpus
    from blendrag.corpus.database import DIRECTORY
    from blendrag.corpus.embedder import embedder_of
    from blendrag.corpus.retriever import Retriever

    if store is None or not (store / DIRECTORY).is_dir():  # a calibration alone needs no documents
        yield None, FILE_TOKENS
        return
    with Corpus.open(store, read_only=True) as corpus:
        retriever = Retriever(corpus, embedder_of(corpus.manifest, store, embedder))

        def retrieve(question: str) -> list[str]:
            return [chunk.text for chunk in retriever.retrieve(question, top_k)]

        yield retrieve, corpus.manifest.chunk_tokens
