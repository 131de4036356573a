"""Which chunks a chunk is encoded after: those of the corpus that are most similar to it.

Chunks that are retrieved together resemble each other, so that a chunk's KV has then seen text like that
which precedes it in prompts (FusionRAG, arXiv 2601.12904). Copies are left out: behind one, a chunk is the
repetition of what was read, which it is in few prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np

from blendrag.corpus.corpus import Corpus
from blendrag.corpus.documents import StoredChunk, chunk_at
from blendrag.errors import InvalidInputError
from blendrag.text.chunking import Chunk

T = TypeVar("T")
#: Whether a text is a copy of the one that it was made for.
IsCopy = Callable[[str], bool]
#: Characters of the stretches that texts are compared by, and the share of those of the shorter text that
#: makes one a copy of the other, such as another version of a document, or a chunk that overlaps.
STRETCH_CHARS, COPIED_SHARE = 32, 0.2
#: A chunk under the title of its document, by which it is embedded.
Titled = tuple[str, Chunk]


class Neighbours:
    """Similar chunks for one run: among those that the corpus has, and those that the run is to store."""

    def __init__(self, corpus: Corpus | None, most: int) -> None:
        """``corpus``: ``None``: only the run's chunks. ``most``: chunks that a chunk is encoded after."""
        self._corpus = corpus
        self._most = most
        self._new: dict[tuple[str, str], tuple[Chunk, np.ndarray]] = {}
        """By title and chunk id."""
        self._new_ids: set[str] = set()
        self._rows: tuple[list[Chunk], np.ndarray] | None = None
        """The new chunks and their vectors.  float32 [n, dim]"""
        self._replaced: set[str] = set()
        """Sources, or ids of entries, whose stored chunks are out of date."""

    def add(self, titled: Sequence[Titled], vectors: Sequence[np.ndarray], replaces: str) -> None:
        """Note chunks that the run is to store, with unit vectors; an empty one is never found.
        ``replaces``: the source, or the id of the entry, that they replace."""
        self._replaced.add(replaces)
        for (title, chunk), vector in zip(titled, vectors, strict=True):
            if vector.size:
                self._new[title, chunk.chunk_id] = chunk, vector
                self._new_ids.add(chunk.chunk_id)
        self._rows = None

    def forget_new(self) -> None:
        """Once the new chunks are stored: from now on the corpus has them."""
        self._new, self._new_ids, self._rows = {}, set(), None
        self._replaced.clear()

    def vectors(self, titled: Sequence[Titled]) -> list[np.ndarray]:
        """The vectors of chunks that were added; none if any was not."""
        found = [self._new.get((title, chunk.chunk_id)) for title, chunk in titled]
        known = [each[1] for each in found if each is not None]
        return known if len(known) == len(found) else []

    def texts(self, title: str, chunk: Chunk) -> list[str]:
        """Texts of the most similar chunks that are no copies, the nearest first; none for a chunk without a
        vector."""
        chunk_id = chunk.chunk_id
        if added := self._new.get((title, chunk_id)):
            vector = added[1]
        elif stored := self._corpus and self._corpus.known_vectors(title, [chunk_id]):
            vector = stored[chunk_id]
        else:
            return []
        is_copy = copies_of(chunk.text)
        found = self._among_stored(vector, is_copy) + self._among_new(vector, is_copy)
        nearest = sorted((distance, chunk_id, text) for chunk_id, text, distance in found)
        texts = {chunk_id: text for _, chunk_id, text in nearest}  # each at its smaller distance
        return [*texts.values()][: self._most]

    def _among_stored(self, vector: np.ndarray, is_copy: IsCopy) -> list[tuple[str, str, float]]:
        """Ids, texts and L2 distances."""
        corpus = self._corpus
        if corpus is None:
            return []

        def accept(passage: int) -> tuple[str, StoredChunk] | None:
            found = chunk_at(corpus.file, passage)
            if found is None or is_copy(found.text):
                return None
            is_old = (found.entry_id or found.document) in self._replaced
            return (
                None if is_old and found.chunk_id not in self._new_ids else (found.chunk_id, found)
            )

        hits = corpus.vectors.nearest(vector, self._most, accept)
        return [(found.chunk_id, found.text, distance) for found, distance in hits]

    def _among_new(self, vector: np.ndarray, is_copy: IsCopy) -> list[tuple[str, str, float]]:
        if not self._new:
            return []
        if self._rows is None:
            chunks, vectors = zip(*self._new.values(), strict=True)
            self._rows = [*chunks], np.stack(vectors)
        new, rows = self._rows
        distances = np.sqrt(np.maximum(0.0, 2.0 - 2.0 * (rows @ vector)))
        found: dict[str, tuple[str, str, float]] = {}
        for i in np.argsort(distances, kind="stable"):
            near = new[i]
            if near.chunk_id not in found and not is_copy(near.text):
                found.setdefault(near.chunk_id, (near.chunk_id, near.text, float(distances[i])))
            if len(found) == self._most:
                break
        return [*found.values()]


def copies_of(text: str) -> IsCopy:
    """Whether another text is ``text``, or has much of it in the same words."""
    stretches = set(_stretches(text))

    def is_copy(other: str) -> bool:
        common = sum(each in stretches for each in _stretches(other))
        shorter = min(len(text), len(other)) - STRETCH_CHARS + 1
        return other == text or common > COPIED_SHARE * max(1, shorter)

    return is_copy


def _stretches(text: str) -> Iterable[str]:
    return (text[i : i + STRETCH_CHARS] for i in range(len(text) - STRETCH_CHARS + 1))


def context_ids(
    others: Iterable[Sequence[int]], most: int, prefix_tokens: int, tokens: int, limit: int
) -> tuple[int, ...]:
    """What a chunk of so many ``tokens`` is encoded after, behind the prefix: ``most`` of ``others``, or as
    many as fit into ``limit``. The nearest of ``others`` comes first there, and last in the context.

    Raises :class:`InvalidInputError` if there is room for none.
    """
    room = limit - prefix_tokens - tokens
    chosen, shortest = list[Sequence[int]](), 0
    for ids in others:
        shortest = min(shortest or len(ids), len(ids))
        if len(ids) <= room:
            chosen.append(ids)
            room -= len(ids)
        if len(chosen) == most:
            break  # of thousands of others, no more are tokenized
    if shortest and not chosen and room >= 0:
        raise InvalidInputError(
            f"encode_after {most}, but a chunk of {tokens} tokens has no room after another of "
            f"{shortest} in the {limit:,} tokens that this model encodes alike; take shorter chunks "
            "(chunk_tokens), or encode_after 0"
        )
    return tuple(i for ids in reversed(chosen) for i in ids)


def beside(items: Sequence[T], at: int) -> list[T]:
    """What precedes ``items[at]``, or else what follows it; the nearest first."""
    return [*reversed(items[:at])] or [*items[at + 1 :]]
