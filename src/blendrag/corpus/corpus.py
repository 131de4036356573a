"""The documents of a KV store, with their chunks' texts, hashes and vectors, in ``<store root>/corpus/``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from blendrag.config import of_variable
from blendrag.corpus import database, documents
from blendrag.corpus.database import CorpusFile
from blendrag.corpus.documents import StoredChunk
from blendrag.corpus.embedder import same_embedder
from blendrag.corpus.filters import Filter, FilterLike
from blendrag.corpus.full_text import FullTextIndex
from blendrag.corpus.manifest import Manifest
from blendrag.corpus.search import CorpusSearch, FoundChunk, SearchQuery
from blendrag.corpus.selection import Selections
from blendrag.corpus.vectors import VectorIndex, vector_of
from blendrag.errors import CorpusError, InvalidInputError
from blendrag.text.chunking import Chunk, scope_of
from blendrag.text.readers import Document
from blendrag.text.recognition import HASHES_BYTES, ChunkIndex, chunk_hashes
from blendrag.wording import quoted


@dataclass(frozen=True)
class StoredDocument:
    source: str
    title: str
    chunks: int
    tokens: int


def resolved(source: str) -> str:
    """A source with its file's path absolute and without links."""
    path, mark, record = source.partition("#")
    return os.path.realpath(path) + mark + record


def files_of(source: str) -> list[str]:
    """The paths that a source may have been read from: all of it, or what precedes a ``#``."""
    return [source, *(source[:at] for at, sign in enumerate(source) if sign == "#")]


def is_at(source: str, path: str) -> bool:
    """Whether a document comes from that file, or from a file below that directory."""
    return source == path or source.startswith((f"{path}#", f"{path.rstrip('/')}/"))


T = TypeVar("T")

#: Reads without a lock before one that others wait for (:meth:`Corpus.in_one_state`).
_UNLOCKED_READS = 3
_BY_SOURCE = "SELECT id FROM document WHERE source = ?"


class Corpus:
    """Made by :meth:`open`. Every change is one transaction. Safe for use from several threads."""

    def __init__(self, file: CorpusFile) -> None:
        self.file = file
        self._begun: Manifest | None = None
        self._chunk_index = _CurrentChunkIndex(file, self.text)
        self.vectors = VectorIndex(file)
        self.searches = CorpusSearch(file, self.vectors)
        self.selections = Selections(file)
        self.dropped = documents.DroppedTexts(file)
        self.entries = documents.EntryTable(file, self.vectors, self.require_begun)

    @classmethod
    def open(cls, root: Path, create: bool = False, read_only: bool = False) -> Corpus:
        """The corpus of the store at ``root``; with ``create``, a new one if there is none.

        With ``read_only``, or without write permission, nothing is created or changed, and every method that
        would change the corpus raises :class:`CorpusError`. Raises :class:`CorpusError` if the corpus does
        not exist, is not a corpus, or has another format.
        """
        directory = Path(root) / database.DIRECTORY
        exists = os.path.lexists(directory / database.FILE_NAME)
        if not exists and (read_only or not create):
            named = of_variable("store", root)
            if Path(root).is_file():
                raise CorpusError(
                    f"store {root}{named} is a file, expected a directory; choose another store"
                )
            raise CorpusError(
                f"there is no corpus at {directory}{named}; check the spelling, or ingest first "
                f"(blendrag ingest PATH… --model MODEL --store {root}), or blendrag store follow"
            )
        if read_only or (exists and not database.can_write(directory)):
            return cls(CorpusFile(directory, read_only=True))
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as exc:
            raise CorpusError(
                f"{directory} cannot be made ({exc.strerror}); choose a store that can be written"
            ) from exc
        return cls(CorpusFile(directory, create=create))

    def close(self) -> None:
        """Close the file. Idempotent."""
        self.file.close()

    def __enter__(self) -> Corpus:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def directory(self) -> Path:
        return self.file.directory

    @property
    def read_only(self) -> bool:
        return self.file.read_only

    # -- manifest -----------------------------------------------------------------------------

    @property
    def manifest(self) -> Manifest:
        """Raises :class:`CorpusError` before one was set."""
        if (found := self.manifest_or_none) is None:
            raise CorpusError(
                f"the corpus at {self.directory} has no manifest, as nothing was ingested; "
                "ingest first (blendrag ingest PATH…)"
            )
        return found

    @property
    def manifest_or_none(self) -> Manifest | None:
        """``None`` before one was set."""
        if (value := self.file.meta("manifest")) is None:
            return None
        try:
            return Manifest.from_json(value)
        except (ValueError, RecursionError) as exc:
            raise database.damaged_settings("it is not a valid manifest", self.file.path) from exc

    def state(self) -> tuple[Manifest | None, bool]:
        """The manifest, and whether there are documents."""
        return self.file.known("state", lambda: (self.manifest_or_none, self.has_documents))

    def require_documents(self) -> Manifest | None:
        """The manifest. Raises :class:`InvalidInputError` if there are no documents."""
        manifest, has_documents = self.state()
        if not has_documents:
            raise InvalidInputError(
                f"the corpus at {self.directory} holds no chunks; ingest first (blendrag ingest PATH…)"
            )
        return manifest

    def begin(self, manifest: Manifest) -> None:
        """Set the manifest, unless there are documents already, and remember the one that holds now.

        If two processes begin one corpus at once, the later one's manifest holds, and the other must not add
        its own chunks (see :meth:`require_begun`).
        """
        with self.file.writing():
            if self.manifest_or_none is None or not self.has_documents:
                self.file.set_meta("manifest", manifest.to_json())
            self._begun = self.manifest

    def require_begun(self) -> None:
        """Raise :class:`CorpusError` if another process has replaced the manifest since :meth:`begin`."""
        differences = self.manifest.differences(self._begun) if self._begun is not None else {}
        if differences:
            changes = ", ".join(
                f"{name} {now!r:.40} instead of {before!r:.40}"
                for name, (now, before) in differences.items()
            )
            raise CorpusError(
                f"the corpus at {self.directory} was begun by another process at the same time, "
                f"with {changes}; repeat the command to go on with that, or choose another store"
            )

    def set_manifest(self, manifest: Manifest) -> None:
        """Replace the manifest. Raises :class:`CorpusError` if there are vectors of another embedder."""
        with self.file.writing():
            kept = self.manifest_or_none
            if kept is not None and self.vectors.dim() is not None:
                present, embedder = kept.embedder, manifest.embedder
                if not same_embedder(present, embedder):
                    raise CorpusError(
                        f"the corpus at {self.directory} was embedded with {present!r}, not "
                        f"{embedder!r}; use embedder {present} or ingest into another store"
                    )
            self.file.set_meta("manifest", manifest.to_json())

    # -- documents ----------------------------------------------------------------------------

    def sources(self) -> list[str]:
        """Sources of all documents and entries, sorted, without passages that were learned from prompts."""
        condition = f"NOT INDEXED WHERE {documents.NOT_LEARNED}"
        rows = self.file.sound_rows((database.DOCUMENT,), condition, documents.LEARNED)
        return sorted(row[1] for (row,) in rows)

    def file_sources(self) -> list[str]:
        """Sources of the documents that are no entries, sorted."""
        return [source for source in self.sources() if not source.startswith(database.ENTRY_SOURCE)]

    def sources_of(self, path: Path | str) -> list[str]:
        """Sources of the documents read from a file, or from the files below a directory, in any spelling.

        If there are none, those of texts and uploads that were given such a name.
        """
        spelled, name = Path(path).as_posix(), os.path.realpath(path)
        sources = self.file_sources()
        files = filter(os.path.isabs, sources)  # relative sources are names
        found = [source for source in files if is_at(resolved(source), name)]
        return found or [source for source in sources if is_at(source, spelled)]

    def documents(self) -> list[StoredDocument]:
        """All documents that are no entries, by source."""
        tokens = dict(
            self.file.rows(
                "SELECT document, sum(tokens) FROM passage JOIN chunk ON chunk.id = passage.chunk "
                "GROUP BY document"
            )
        )
        rows = (row for (row,) in self.file.sound_rows((database.DOCUMENT,), "ORDER BY source"))
        return [
            StoredDocument(source, title, chunks, tokens.get(number, 0))
            for number, source, title, *_, chunks in rows
            if not source.startswith(database.ENTRY_SOURCE)
        ]

    def put_document(
        self, document: Document, digest: str, chunks: Sequence[Chunk], vectors: np.ndarray
    ) -> list[str]:
        """Store a document in place of its earlier version, in one transaction.

        ``vectors``: float32 [len(chunks), dim], unit length. Returns the ids of chunks that are no longer
        used. Raises :class:`InvalidInputError` for vectors of another shape, and :class:`CorpusError` if
        another process began this corpus (see :meth:`begin`).
        """
        if document.source.startswith(database.ENTRY_SOURCE):
            raise InvalidInputError(
                f"source {quoted(document.source)} begins with {database.ENTRY_SOURCE!r}, which is reserved "
                "for texts added by id; expected another path"
            )
        vectors = np.ascontiguousarray(vectors, np.float32)
        with self.file.writing():
            self.require_begun()
            self.vectors.check(vectors, len(chunks))
            suspects = documents.delete_documents(self.file, _BY_SOURCE, document.source)
            documents.insert_document(self.file, document, digest, chunks, vectors)
            return documents.end_change(self.file, suspects)

    def remove_source(self, source: str) -> list[str]:
        """Remove one document; ids of chunks that are no longer used."""
        with self.file.writing():
            return documents.end_change(
                self.file, documents.delete_documents(self.file, _BY_SOURCE, source)
            )

    # -- chunks -------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of different chunks."""
        return int(self.file.rows("SELECT count(*) FROM chunk")[0][0])

    def searchable_ids(self, most: int, without: Sequence[str] = ()) -> set[str]:
        """Ids of up to ``most`` chunks with vectors, in documents of other sources than ``without``."""
        query = (
            "SELECT DISTINCT chunk_id FROM passage JOIN chunk ON chunk.id = passage.chunk "
            "WHERE length(vector) > 0 AND document NOT IN "
            "(SELECT id FROM document WHERE source IN (SELECT value FROM json_each(?))) LIMIT ?"
        )
        return {chunk_id for (chunk_id,) in self.file.rows(query, json.dumps([*without]), most)}

    @property
    def has_documents(self) -> bool:
        """Whether it holds more than passages that were learned from prompts.

        Those do not bind the manifest: they are encoded again as it says.
        """
        query = f"SELECT 1 FROM document WHERE {documents.NOT_LEARNED} LIMIT 1"
        return self.file.known(query, lambda: bool(self.file.rows(query, documents.LEARNED)))

    def __bool__(self) -> bool:
        """True: an empty corpus is a corpus, too."""
        return True

    def chunks_of(self, source: str) -> list[Chunk]:
        """Chunks of one document, in its order; empty if it does not exist."""
        found = documents.stored_chunks(self.file, "WHERE source = ? ORDER BY start", source)
        return [each.chunk for each in found if each.document == source]

    def unchanged(self, source: str, digest: str) -> list[Chunk] | None:
        """The chunks of a document, if it is stored with that digest and none of its rows is damaged."""
        stored, chunks = self._whole(source)
        return chunks if stored == digest else None

    def places(self, source: str) -> tuple[str, list[tuple[int, int, int, str]]]:
        """Digest of a document, and start, end, tokens and header of its chunks; empty if it is not whole."""
        digest, chunks = self._whole(source)
        headers = [each.text[: each.start - each.end + len(each.text)] for each in chunks]
        return digest, [
            (each.start, each.end, each.tokens, header)
            for each, header in zip(chunks, headers, strict=True)
        ]

    def _whole(self, source: str) -> tuple[str, list[Chunk]]:
        """Digest and chunks of a document; empty if it does not exist or any of its rows is damaged."""
        chunks = self.chunks_of(source)
        for (found,) in self.file.sound_rows((database.DOCUMENT,), "WHERE source = ?", source):
            if (found[1], found[5]) == (source, len(chunks)):
                return found[3], chunks
        return "", []

    def text(self, chunk_id: str) -> str:
        """Canonical text of a chunk. Raises :class:`KeyError` if it does not exist."""
        for ((_, found, text, _),) in self.file.sound_rows(
            (database.CHUNK,), "WHERE chunk_id = ?", chunk_id
        ):
            if found == chunk_id:
                return str(text)
        raise KeyError(chunk_id)

    def chunk(self, chunk_id: str) -> StoredChunk:
        """A chunk at the first place it was stored for. Raises :class:`KeyError`."""
        condition = "WHERE chunk_id = ? ORDER BY passage.id LIMIT 16"
        for found in documents.stored_chunks(self.file, condition, chunk_id):
            if found.chunk_id == chunk_id:
                return found
        raise KeyError(chunk_id)

    def chunks(self, chunk_ids: Sequence[str]) -> dict[str, StoredChunk]:
        """Those of these chunks that it has, as :meth:`chunk`."""
        first = "SELECT min(passage.id) FROM passage WHERE passage.chunk = chunk.id"
        condition = f"WHERE chunk_id IN (SELECT value FROM json_each(?)) AND passage.id = ({first})"
        named = json.dumps([*chunk_ids])
        rows = documents.stored_chunks(self.file, condition, named)
        first_of = {each.chunk_id: each for each in rows}
        found: dict[str, StoredChunk] = {}
        for chunk_id in chunk_ids:
            with suppress(KeyError):  # it was removed, or only its first place is damaged
                found[chunk_id] = first_of.get(chunk_id) or self.chunk(chunk_id)
        return found

    def known_vectors(self, title: str, chunk_ids: Sequence[str]) -> dict[str, np.ndarray]:
        """Vectors stored for these chunks under this title, which need no embedding."""
        known = {}
        condition = "WHERE chunk_id = ? AND title = ? AND length(vector) > 0 LIMIT 1"
        for chunk_id in dict.fromkeys(chunk_ids):
            for found in documents.stored_chunks(self.file, condition, chunk_id, title):
                vector = vector_of(found.vector, self.file.number("dim") or 0)
                if (found.chunk_id, found.title) == (chunk_id, title) and vector is not None:
                    known[chunk_id] = vector
        return known

    # -- finding ------------------------------------------------------------------------------

    @property
    def chunk_index(self) -> ChunkIndex:
        """Index of the documents' chunks by content, current with changes of any process."""
        return self._chunk_index.current(None)

    def known_to(self, scope: str | None) -> ChunkIndex:
        """:attr:`chunk_index` and the passages that were learned in ``scope``."""
        return self._chunk_index.current(scope)

    def allowed(self, chosen: FilterLike | None) -> np.ndarray | None:
        """Ids of the passages that a filter selects, int64, ascending; ``None`` without a filter.

        Raises :class:`InvalidOptionError`.
        """
        return None if chosen is None else self.selections.passages(Filter.parse(chosen))

    def search(
        self, queries: Sequence[SearchQuery], k: int, chosen: FilterLike | None = None
    ) -> list[list[FoundChunk]]:
        """For each query the k best different chunks of the documents that a filter selects, the best first;
        see :meth:`CorpusSearch.find`. Raises :class:`InvalidOptionError`."""
        return self.searches.find(queries, k, lambda: self.allowed(chosen))

    def in_one_state(self, read: Callable[[], T]) -> T:
        """What ``read()`` returns if nothing changes the corpus meanwhile; otherwise it is called again.

        The last time it is called in one transaction, for which other threads wait.
        """
        for _ in range(_UNLOCKED_READS):
            generation = self.file.generation()
            found = read()
            if self.file.generation() == generation:
                return found
        with self.file.reading():
            return read()

    def nearest(self, vector: np.ndarray, k: int) -> list[tuple[StoredChunk, float]]:
        """The k nearest different chunks with their L2 distance, nearest first.

        ``vector``: float32 [dim]. Each chunk is returned at the place whose vector is nearest.
        """
        (found,) = self.search([SearchQuery("", vector, "dense")], k)
        return [(each.chunk, each.distance or 0.0) for each in found]


class _CurrentChunkIndex:
    """The :class:`ChunkIndex` of one corpus, read from the file when it has changed.

    Passages learned from prompts have an index for each scope over that of the documents.
    """

    def __init__(self, file: CorpusFile, text_of: Callable[[str], str]) -> None:
        self._file = file
        self._text_of = text_of
        self._documents = ChunkIndex(text_of)
        self._learned: dict[str, ChunkIndex] = {}
        self._generation = -1
        self._last = 0

    def current(self, scope: str | None) -> ChunkIndex:
        with self._file.lock:
            if self._generation != self._file.generation():
                with self._file.reading():
                    generation = self._file.generation()
                    self._refresh()
                self._generation = generation
            return self._learned.get(scope or "", self._documents)

    def _refresh(self) -> None:
        rows = self._file.rows(
            f"SELECT {database.HASHES.selected} FROM {database.HASHES.name} WHERE id > ? ORDER BY id",
            self._last,
        )
        sound = [row for row in rows if _is_sound(row)]
        ((count,),) = self._file.rows(f"SELECT count(*) FROM {database.HASHES.name}")
        base = len(self._documents)
        size = base + sum(len(index) - base for index in self._learned.values())
        if self._last and count != size + len(rows):
            present = {row[0] for row in self._file.rows("SELECT chunk_id FROM chunk")}
            for index in (self._documents, *self._learned.values()):
                for chunk_id in index.ids():
                    if chunk_id not in present:
                        index.discard(chunk_id)
        self._add({row[2]: row[3] for row in sound})
        if len(sound) < len(rows):  # hashes that are damaged are computed from the text
            texts = self._file.sound_rows((database.CHUNK,), "NOT INDEXED")
            self._add({row[1]: chunk_hashes(row[2]) for (row,) in texts if not self._has(row[1])})
        self._last = rows[-1][0] if rows else self._last

    def _has(self, chunk_id: str) -> bool:
        return chunk_id in self._learned.get(scope_of(chunk_id) or "", self._documents)

    def _add(self, hashes: Mapping[str, bytes]) -> None:
        """Each chunk to the index it belongs to."""
        by_scope: dict[str | None, dict[str, bytes]] = {}
        for chunk_id, packed in hashes.items():
            by_scope.setdefault(scope_of(chunk_id), {})[chunk_id] = packed
        for scope, chunks in by_scope.items():
            index = self._documents
            if scope is not None:
                index = self._learned.setdefault(scope, ChunkIndex(self._text_of, self._documents))
            index.add(chunks)


def _is_sound(row: Sequence[Any]) -> bool:
    try:
        *_, packed = database.HASHES.checked(row)
    except database.DamagedRow:
        return False
    is_whole = len(packed) >= HASHES_BYTES and len(packed) % 8 == 0
    return is_whole and 0 <= int.from_bytes(packed[:8], "little") < 1 << 40


# -- check and repair -------------------------------------------------------------------------------

#: Faults described in words; all are counted.
MAX_FAULTS = 1000
#: Faults found by SQLite that are described.
_MAX_STRUCTURE_FAULTS = 10
#: Condition for documents that have lost passages.
_LOST_PASSAGES = "passages != (SELECT count(*) FROM passage WHERE passage.document = document.id)"


@dataclass(frozen=True)
class CorpusCheck:
    rows: int
    damaged: int
    faults: tuple[str, ...]
    """What is damaged; the first :data:`MAX_FAULTS`."""
    repaired: bool

    @property
    def is_good(self) -> bool:
        return not self.damaged


def check_corpus(root: Path, repair: bool = False) -> CorpusCheck:
    """Check every row of the corpus of the store at ``root``, and the file's pages and indexes.

    With ``repair``, damaged rows are removed together with the documents they belonged to, which the next
    ingest restores. Raises :class:`CorpusError` if the corpus cannot be opened or a setting is damaged.
    """
    with Corpus.open(root, read_only=not repair) as corpus:
        with corpus.file.reading():
            rows, damaged, faults = _scan(corpus.file)
        if repair and faults:
            with corpus.file.writing():
                corpus.file.generation()  # raises if a setting is damaged: no repair restores it
                _remove_damaged(corpus.file, damaged)
        return CorpusCheck(
            rows, len(faults), tuple(faults[:MAX_FAULTS]), repaired=repair and bool(faults)
        )


def _scan(file: CorpusFile) -> tuple[int, list[tuple[database.CheckedTable, Any]], list[str]]:
    """Number of rows; table and key of damaged ones; all faults in words."""
    execute = file.connection.execute
    structure = [str(r[0]) for r in execute(f"PRAGMA integrity_check({_MAX_STRUCTURE_FAULTS})")]
    faults = [f"structure: {fault}" for fault in structure if fault != "ok"]
    rows = 0
    damaged: list[tuple[database.CheckedTable, Any]] = []
    for table in database.TABLES:
        for row in execute(f"SELECT {table.selected} FROM {table.name} NOT INDEXED"):
            rows += 1
            try:
                table.checked(row)
            except database.DamagedRow as exc:
                damaged.append((table, row[0]))
                faults.append(f"row {exc} is not what was written")
    for name, key, parent, _ in execute("PRAGMA foreign_key_check"):
        faults.append(f"row {name} {key}: its {parent} is lost")
    for (source,) in execute(f"SELECT source FROM document WHERE {_LOST_PASSAGES}"):
        faults.append(f"document {source!r:.80}: some of its passages are lost")
    return rows, damaged, faults + FullTextIndex(file).faults()


def _remove_damaged(file: CorpusFile, damaged: list[tuple[database.CheckedTable, Any]]) -> None:
    """In a transaction."""
    execute = file.connection.execute
    if file.meta(database.FULL_TEXT):
        FullTextIndex(file).reset()  # the next search builds it again
    execute("REINDEX")
    for table, key in damaged:
        if table is database.CHUNK:  # a document that lost a chunk is incomplete
            execute("DELETE FROM passage WHERE chunk = ?", (key,))
        execute(f"DELETE FROM {table.name} WHERE {table.key} = ?", (key,))
    for statement in (
        "DELETE FROM passage WHERE document NOT IN (SELECT id FROM document) "
        "OR chunk NOT IN (SELECT id FROM chunk)",
        f"DELETE FROM document WHERE {_LOST_PASSAGES}",
        "DELETE FROM entry WHERE document NOT IN (SELECT id FROM document)",
        f"DELETE FROM {database.HASHES.name} WHERE chunk NOT IN (SELECT id FROM chunk)",
    ):
        execute(statement)
    orphans = execute("SELECT id FROM chunk WHERE id NOT IN (SELECT chunk FROM passage)").fetchall()
    documents.end_change(file, [row for (row,) in orphans])
