"""Nearest neighbours over the passages' vectors: a FAISS index in memory and a copy on disk.

Owns the index and its file. The file is a cache: it is used when its bytes are those that were
written, brought up to date by the difference of passage ids (a passage's vector never changes and
its id is never given twice), and made anew from the database otherwise. Does not know texts.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

FILE_NAME = "vectors.faiss"
_MAGIC = b"BLRGVEC1"
_DIGEST_BYTES = 16
#: Vectors read from the database at a time.
_BATCH = 4096


class VectorIndex:
    """``IndexFlatL2`` in an ``IndexIDMap2``, by passage id. The caller holds the corpus's lock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._index: Any = None
        self._ids = np.zeros(0, np.int64)  # sorted
        self._generation = -1
        self._saved_ids = np.zeros(0, np.int64)

    def refresh(self, connection: sqlite3.Connection, generation: int, dim: int) -> None:
        """Makes the index hold exactly the database's passages."""
        if self._index is None:
            self._index = self._read(dim)
            self._ids = np.sort(_ids_of(self._index))
            self._saved_ids = self._ids
        elif self._generation == generation:
            return
        wanted = np.fromiter(
            (row[0] for row in connection.execute("SELECT id FROM passage ORDER BY id")), np.int64
        )
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
        if self._index is None or np.array_equal(self._saved_ids, self._ids):
            return
        import faiss

        payload = faiss.serialize_index(self._index).tobytes()
        digest = xxhash.xxh3_128_digest(payload)
        temporary = None
        try:
            handle, temporary = tempfile.mkstemp(dir=self._path.parent, prefix=".vectors-")
            with os.fdopen(handle, "wb") as file:
                file.write(_MAGIC + digest + payload)
            os.replace(temporary, self._path)
            self._saved_ids = self._ids
        except OSError:  # a full disk costs the next process a rebuild, nothing else
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)

    def _read(self, dim: int) -> Any:
        """The index from its file, or an empty one when the file is absent or not as written."""
        import faiss

        try:
            data = self._path.read_bytes()
        except OSError:
            data = b""
        head = len(_MAGIC) + _DIGEST_BYTES
        payload = memoryview(data)[head:]
        if data[:head] == _MAGIC + xxhash.xxh3_128_digest(payload):
            index = faiss.deserialize_index(np.frombuffer(payload, np.uint8))
            if isinstance(index, faiss.IndexIDMap2) and index.d == dim:
                return index
        return faiss.IndexIDMap2(faiss.IndexFlatL2(dim))


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
