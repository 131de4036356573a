"""Entries on their way into the corpus: what is asked of them, what changed, and their vectors.

Owns which of the given entries need a row written anew. Does not know KV.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from blendrag.corpus.corpus import Corpus
from blendrag.corpus.documents import Entry, NewEntry
from blendrag.corpus.embedder import refuse_given
from blendrag.engine.resources import Resources
from blendrag.errors import InvalidInputError
from blendrag.store.identity import digest_fields
from blendrag.text.chunking import Chunk, canonical, chunk_id_of


def check_entries(entries: Sequence[Entry]) -> None:
    """Raise :class:`InvalidInputError` for what cannot be stored or given back as it is."""
    for entry in entries:
        if not isinstance(entry.id, str) or not entry.id:
            raise InvalidInputError(
                f"id {entry.id!r} of an entry, expected a text that is not empty; give each its own"
            )
        for name, text in (("id", entry.id), ("text", entry.text), ("parent", entry.parent)):
            _check_unicode(entry, name, text)
        for key, value in entry.metadata.items():
            _check_json(entry, key, value)


def _check_unicode(entry: Entry, name: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise InvalidInputError(
            f"{name} of entry {entry.id!r} holds a lone surrogate at character {exc.start}, expected "
            "valid Unicode; replace that character"
        ) from exc


def _check_json(entry: Entry, key: Any, value: Any) -> None:
    try:
        json.dumps({key: value}, ensure_ascii=False).encode("utf-8")
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidInputError(
            f"metadata {key!r} of entry {entry.id!r} is a {type(value).__name__} that JSON cannot "
            "hold; expected text, numbers, lists or objects of them: convert it or leave it out"
        ) from exc


def given_vectors(
    vectors: np.ndarray | Sequence[Sequence[float]] | None, entries: int
) -> np.ndarray | None:
    """The caller's vectors at unit length, float32 [entries, dim]."""
    if vectors is None:
        return None
    rows = np.asarray(vectors, np.float32)
    if not entries and not rows.size:
        return None
    if rows.ndim != 2 or len(rows) != entries or not rows.shape[1]:
        raise InvalidInputError(
            f"vectors of shape {rows.shape} for {entries} entries, expected ({entries}, dim)"
        )
    if not np.isfinite(rows).all():
        raise InvalidInputError(
            "a vector holds NaN or infinity, expected numbers; look at the embedding model's output"
        )
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.ascontiguousarray(rows / np.maximum(norms, 1e-12), np.float32)


def unit_vector(vector: np.ndarray | Sequence[float]) -> np.ndarray:
    """One vector at unit length, float32 [dim]."""
    rows = given_vectors(np.asarray(vector, np.float32)[None], 1)
    assert rows is not None
    return rows[0]


def digest_of_entry(entry: Entry, embed: bool, vector: np.ndarray | None) -> str:
    """Equal digests need no row written anew."""
    fields = ["entry", entry.id, entry.text, entry.parent, entry.title, str(entry.start)]
    fields += [json.dumps(dict(entry.metadata), sort_keys=False), str(embed)]
    given = b"" if vector is None else vector.tobytes()
    return digest_fields([*(field.encode("utf-8", "surrogatepass") for field in fields), given])


class Adding:
    """The entries of one call, the last of each id."""

    def __init__(
        self,
        resources: Resources,
        corpus: Corpus,
        entries: Sequence[Entry],
        vectors: np.ndarray | None,
        embed: bool,
    ) -> None:
        """``vectors``: as :func:`given_vectors` makes them."""
        last = list({entry.id: i for i, entry in enumerate(entries)}.values())
        self._resources = resources
        self._corpus = corpus
        self._entries = [entries[i] for i in last]
        self._given = None if vectors is None else vectors[last]
        self._embed = embed
        self._before = corpus.entries.digests([entry.id for entry in self._entries])
        self._digests = [
            digest_of_entry(entry, embed, None if self._given is None else self._given[i])
            for i, entry in enumerate(self._entries)
        ]
        self._changed = [
            i for i, e in enumerate(self._entries) if self._before.get(e.id) != self._digests[i]
        ]

    @property
    def counts(self) -> tuple[int, int, int]:
        """Entries added, changed and unchanged."""
        added = sum(entry.id not in self._before for entry in self._entries)
        return added, len(self._changed) - added, len(self._entries) - len(self._changed)

    @cached_property
    def chunks(self) -> list[Chunk]:
        """One for each entry."""
        return [self._chunk(entry) for entry in self._entries]

    def new_entries(self) -> list[NewEntry]:
        """Those that were added or changed, with their vectors."""
        vectors = self._vectors()
        return [
            NewEntry(self._entries[i], self.chunks[i], self._digests[i], vector)
            for i, vector in zip(self._changed, vectors, strict=True)
        ]

    def _chunk(self, entry: Entry) -> Chunk:
        text = canonical(entry.text)
        tokens = len(self._resources.text_ids(text))
        return Chunk(text, entry.start, entry.start + len(text), tokens, chunk_id_of(text))

    def _vectors(self) -> list[np.ndarray]:
        """Vectors of the entries that changed, in their order."""
        if self._given is not None:
            return list(self._given[self._changed])
        if not self._embed:
            return [np.zeros(0, np.float32)] * len(self._changed)
        refuse_given(self._corpus.manifest.embedder)
        places = [(self._entries[i].title, self.chunks[i].chunk_id) for i in self._changed]
        texts = {place: self.chunks[i].text for place, i in zip(places, self._changed, strict=True)}
        known = self._known(places)
        new = [place for place in texts if place not in known]
        if new:  # else the embedder need not even be loaded
            titles = [title for title, _ in new]
            vectors = self._resources.embedder.embed([texts[place] for place in new], titles)
            known |= dict(zip(new, vectors, strict=True))
        return [known[place] for place in places]

    def _known(self, places: Sequence[tuple[str, str]]) -> dict[tuple[str, str], np.ndarray]:
        """Vectors of the same texts under the same titles, by title and chunk id."""
        chunk_ids: dict[str, list[str]] = {}
        for title, chunk_id in places:
            chunk_ids.setdefault(title, []).append(chunk_id)
        return {
            (title, chunk_id): vector
            for title, ids in chunk_ids.items()
            for chunk_id, vector in self._corpus.known_vectors(title, ids).items()
        }
