"""A small corpus of seeded texts and vectors, and what was put into it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from blendrag.corpus.corpus import Corpus
from blendrag.corpus.documents import Entry, NewEntry
from blendrag.corpus.manifest import Manifest
from blendrag.text.chunking import Chunk, chunk_id_of
from blendrag.text.readers import Document

DIM = 8
MANIFEST = Manifest("m", "sig", "tok", "ns", 512, (1, 2), "<s>\n", "minilm-offline")


def vector_of(text: str) -> np.ndarray:
    """A unit vector that depends on the text alone."""
    rng = np.random.default_rng(int(chunk_id_of(text)[:8], 16))
    vector = rng.standard_normal(DIM).astype(np.float32)
    return vector / np.linalg.norm(vector)


def text_of(i: int, j: int) -> str:
    return f"Paragraph {j} of document {i}: " + f"the keeper of lamp {i * 7 + j} wrote a log. " * 3


def chunk_of(text: str, start: int = 0) -> Chunk:
    return Chunk(text, start, start + len(text), len(text.split()), chunk_id_of(text))


def put(corpus: Corpus, i: int) -> list[Chunk]:
    """Put document ``i`` of three chunks, as an ingest would."""
    chunks = [chunk_of(text_of(i, j), 100 * j) for j in range(3)]
    text = "".join(chunk.text for chunk in chunks)
    document = Document(f"doc{i}.md", text, f"Title {i}", {"year": 1800 + i})
    vectors = np.stack([vector_of(chunk.text) for chunk in chunks])
    corpus.put_document(document, f"digest {i}", chunks, vectors)
    return chunks


@dataclass
class Truth:
    """What was put."""

    places: set[tuple[str, str, str, int]] = field(default_factory=set)
    """Text, source, title and start of every chunk."""
    entries: dict[str, Entry] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)


def make_corpus(root: Path) -> Truth:
    """A corpus of documents and entries, closed again."""
    truth = Truth()
    with Corpus.open(root, create=True) as corpus:
        corpus.begin(MANIFEST)
        for i in range(5):
            for chunk in put(corpus, i):
                truth.texts.append(chunk.text)
                truth.places.add((chunk.text, f"doc{i}.md", f"Title {i}", chunk.start))
        for i in range(4):
            entry = Entry(f"id{i}", text_of(9, i), {"n": i}, parent="p", title=f"E{i}")
            vector = np.zeros(0, np.float32) if i == 3 else vector_of(entry.text)
            corpus.entries.put([NewEntry(entry, chunk_of(entry.text), f"e{i}", vector)])
            truth.entries[entry.id] = entry
            truth.texts.append(entry.text)
            truth.places.add((entry.text, entry.source, entry.title, 0))
    return truth


def change(root: Path) -> None:
    """Put one document again and remove another."""
    with Corpus.open(root) as corpus:
        put(corpus, 1)
        corpus.remove_source("doc0.md")
