"""Contexts to answer from: chunks in prompt order, whole documents in a row, and what they answer.

Owns: which documents a context holds. A context is about one kind of entity, where nothing but the
name tells the candidates apart, or about a few kinds that link to one another. Documents take one to
four chunks each; each paragraph is filled up to the size of a chunk.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from blendrag.lab.training.facts import KINDS, Split
from blendrag.lab.training.generator import Document, Measure, Shape, documents
from blendrag.lab.training.questions import Question, ask

# Kinds whose documents link from the first to the second.
LINKED: tuple[tuple[str, str], ...] = tuple(
    (kind.name, attribute.to)
    for kind in KINDS.values()
    for attribute in kind.attributes
    if attribute.to
)


@dataclass(frozen=True)
class Context:
    """Chunks in prompt order, the documents they are of, and questions that they answer."""

    chunks: tuple[str, ...]
    questions: tuple[Question, ...]
    documents: tuple[Document, ...]


def measure_of(tokenizer: PreTrainedTokenizerBase) -> Measure:
    """Size of a text in tokens, special ones left out."""
    encode = tokenizer.backend_tokenizer.encode
    return lambda text: len(encode(text, add_special_tokens=False).ids)


def sizes(rng: random.Random, n_chunks: int, longest: int = 4) -> list[int]:
    """Chunks per document: two to `longest` that add up to `n_chunks`; one alone where one is left
    over.
    """
    made: list[int] = []
    while (left := n_chunks - sum(made)) > 0:
        n = left if left < 4 else rng.choice([n for n in range(2, longest + 1) if left - n != 1])
        made.append(min(n, longest))
    return rng.sample(made, len(made))


def draw_kinds(rng: random.Random, n: int, linked: bool) -> list[str]:
    """Kinds of `n` documents: one kind, or those of a link, its target at least twice if there is
    room, so that the link decides between them.
    """
    if not linked or n < 2:
        return [rng.choice(list(KINDS))] * n
    source, target = rng.choice(LINKED)
    kinds = [source, target, target][:n]
    kinds += rng.choices((source, target), k=n - len(kinds))
    rng.shuffle(kinds)
    return kinds


def write_context(
    rng: random.Random,
    split: Split,
    kinds: list[str],
    chunks: list[int],
    chunk_size: int,
    measure: Measure,
    per_kind: int | dict[str, int],
) -> Context:
    """A context of documents of `kinds` with so many `chunks` each."""
    keys = {
        kind: rng.sample([a.key for a in KINDS[kind].attributes], rng.randint(6, 8))
        for kind in sorted(set(kinds))
    }
    shapes = []
    for n in chunks:
        per_paragraph = {1: (3, 4), 2: (2, 3), 3: (2, 2), 4: (1, 2)}[n]
        shapes.append(
            Shape(tuple(rng.choice(per_paragraph) for _ in range(n)), chunk_size, measure)
        )
    written = documents(rng, split, kinds, shapes, keys, 0.9, dated=rng.random() < 0.4)
    texts = tuple(paragraph for document in written for paragraph in document.paragraphs)
    return Context(texts, tuple(ask(rng, written, per_kind)), written)


def contexts(
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    split: Split,
    n_contexts: int,
    n_chunks: int = 6,
    chunk_tokens: int = 64,
    questions: int | dict[str, int] = 2,
) -> Iterator[Context]:
    """Seeded contexts of `n_chunks` chunks filled up to `chunk_tokens` tokens (more only where the
    facts alone take more, as in 64 tokens of a tokenizer without these words); `questions` is how
    many of each kind at most. One of two is about linked documents.
    """
    measure = measure_of(tokenizer)
    for i in range(n_contexts):
        rng = random.Random(f"context/{seed}/{split}/{n_chunks}/{chunk_tokens}/{i}")
        chunks = sizes(rng, n_chunks)
        kinds = draw_kinds(rng, len(chunks), linked=i % 2 == 1)
        yield write_context(rng, split, kinds, chunks, chunk_tokens, measure, questions)
