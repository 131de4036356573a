"""Nearest neighbours over the passages' vectors: a FAISS index in memory and a copy on disk.

Owns the index and its file. The file is a cache: it is used when its bytes are those that were
written, for this database and not for a later state of it than the one at hand (a backup brought
back gives passage ids again). Then it is brought up to date by the difference of passage ids (a
passage's vector never changes and its id is never given twice); else it is made anew from the
database. Does not know texts.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

FILE_NAME = "vectors.faiss"
_MAGIC = b"BLRGVEC2"
#: Magic, generation of the database that the index was made of, digest.
_HEADER = struct.Struct("<8sQ16s")
#: Vectors read from the database at a time.
_BATCH = 4096


class VectorIndex:
    """``IndexFlatL2`` in an ``IndexIDMap2``, by passage id. The caller holds the corpus's lock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._index: Any = None
        self._ids = np.zeros(0, np.int64)  # sorted
        self._corpus_id: str | None = None
        self._generation = -1
        self._saved_ids = np.zeros(0, np.int64)

    def refresh(
        self,
        connection: sqlite3.Connection,
        corpus_id: str | None,
        generation: int,
        dim: int,
        has_unsearchable: bool = False,
    ) -> None:
        """Makes the index hold exactly the database's passages, of which all vectors have ``dim``.

        Caller is in one transaction since it read the other arguments. A database without
        ``corpus_id`` has no cache. With ``has_unsearchable``, some passages have no vector.
        """
        try:
            self._refresh(connection, corpus_id, generation, dim, has_unsearchable)
        except BaseException:
            self._index = None  # left halfway, it might be given a vector twice
            raise

    def _refresh(
        self,
        connection: sqlite3.Connection,
        corpus_id: str | None,
        generation: int,
        dim: int,
        has_unsearchable: bool,
    ) -> None:
        if self._index is None or self._index.d != dim:
            self._index = self._read(corpus_id, generation, dim)
            self._ids = np.sort(_ids_of(self._index))
            self._saved_ids = self._ids
        elif self._generation == generation:
            return
        self._corpus_id = corpus_id
        wanted = _passages(connection, "")
        if has_unsearchable:  # two reads of indexes, where one filter would read every vector
            unsearchable = _passages(connection, "WHERE length(vector) = 0")
            wanted = np.setdiff1d(wanted, unsearchable, assume_unique=True)
        gone = np.setdiff1d(self._ids, wanted, assume_unique=True)
        new = np.setdiff1d(wanted, self._ids, assume_unique=True)
        if len(gone):
            self._index.remove_ids(gone)
        for at in range(0, len(new), _BATCH):
            ids = new[at : at + _BATCH]
            self._index.add_with_ids(_vectors_of(connection, ids, dim), ids)
        self._ids, self._generation = wanted, generation

    def search(self, vector: np.ndarray, k: int) -> list[tuple[int, float]]:
        """``(passage id, L2 distance)`` of the k nearest, nearest first. After :meth:`refresh`."""
        k = min(k, len(self._ids))
        if k == 0:
            return []
        query = np.ascontiguousarray(vector, np.float32).reshape(1, -1)
        squared, ids = self._index.search(query, k)
        distances = np.sqrt(np.maximum(squared[0], 0.0))
        return list(zip(ids[0].tolist(), distances.tolist(), strict=True))

    def save(self) -> None:
        """Writes the file if the index changed since it was read or written. Best effort."""
        if self._index is None or self._corpus_id is None:
            return
        if np.array_equal(self._saved_ids, self._ids):
            return
        import faiss

        payload = faiss.serialize_index(self._index).tobytes()
        digest = _digest(self._corpus_id, self._generation, payload)
        temporary = None
        try:
            handle, temporary = tempfile.mkstemp(dir=self._path.parent, prefix=".vectors-")
            with os.fdopen(handle, "wb") as file:
                file.write(_HEADER.pack(_MAGIC, self._generation, digest) + payload)
            os.replace(temporary, self._path)
            self._saved_ids = self._ids
        except OSError:  # a full disk costs the next process a rebuild, nothing else
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)

    def saved_generation(self) -> int:
        """What the file says it was made of; -1 where there is none."""
        try:
            with self._path.open("rb") as file:
                magic, generation, _ = _HEADER.unpack(file.read(_HEADER.size))
        except (OSError, struct.error):
            return -1
        return int(generation) if magic == _MAGIC else -1

    def drop(self) -> None:
        """Removes the file. Best effort."""
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _read(self, corpus_id: str | None, generation: int, dim: int) -> Any:
        """The index from its file, or an empty one when there is none that fits."""
        import faiss

        try:
            data = self._path.read_bytes()
        except OSError:
            data = b""
        if corpus_id is not None and _fits(data, corpus_id, generation):
            payload = memoryview(data)[_HEADER.size :]
            index = faiss.deserialize_index(np.frombuffer(payload, np.uint8))
            if isinstance(index, faiss.IndexIDMap2) and index.d == dim:
                return index
        return faiss.IndexIDMap2(faiss.IndexFlatL2(dim))


def _fits(data: bytes, corpus_id: str, generation: int) -> bool:
    """Whether the file's bytes are as written, for this corpus, and not from its future."""
    if len(data) <= _HEADER.size:
        return False
    magic, saved, digest = _HEADER.unpack_from(data)
    payload = memoryview(data)[_HEADER.size :]
    return magic == _MAGIC and saved <= generation and digest == _digest(corpus_id, saved, payload)


def _digest(corpus_id: str, generation: int, payload: bytes | memoryview) -> bytes:
    """xxh3-128 over the index and over what it was made of."""
    hashed = xxhash.xxh3_128(f"{corpus_id} {generation} ".encode())
    hashed.update(payload)
    return hashed.digest()


def _passages(connection: sqlite3.Connection, which: str) -> np.ndarray:
    """Ids of passages, ascending.  int64"""
    rows = connection.execute(f"SELECT id FROM passage {which} ORDER BY id")
    return np.fromiter((row[0] for row in rows), np.int64)


def _ids_of(index: Any) -> np.ndarray:
    import faiss

    return np.asarray(faiss.vector_to_array(index.id_map), np.int64)


def _vectors_of(connection: sqlite3.Connection, ids: np.ndarray, dim: int) -> np.ndarray:
    """Vectors of these passages, in their order.  float32 [n, dim]"""
    # ids ascend; a range and a filter spare SQLite a list of thousands of parameters.
    rows = connection.execute(
        "SELECT id, vector FROM passage WHERE id BETWEEN ? AND ? ORDER BY id",
        (int(ids[0]), int(ids[-1])),
    )
    wanted = set(ids.tolist())
    data = b"".join(vector for passage, vector in rows if passage in wanted)
    return np.frombuffer(data, np.float32).reshape(len(ids), dim)
