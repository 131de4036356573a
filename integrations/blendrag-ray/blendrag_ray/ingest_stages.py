"""What the workers of an ingest on Ray do: read files, split and embed documents, encode chunks.

Each stage takes and returns rows of a Ray dataset, which are dictionaries. After the rows of a file's
documents comes a row without a source, which ends the file. Errors travel as rows, so that the driver
reports them in the order of the documents:

=============  ==============================================================================
``failure``    the document, or the rest of the file, cannot be ingested; others go on
``refused``    the model's KV cannot be reused; texts are stored without KV
``full``       the store is full; the run ends
``fatal``      this worker cannot work at all; the run ends
=============  ==============================================================================
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from blendrag.config import Settings
from blendrag.corpus.embedder import Embedder
from blendrag.engine.ingest import damage_of, documents_in, named_failure
from blendrag.engine.kv_namespace import KVNamespace
from blendrag.engine.kv_writer import KVWriter, Written
from blendrag.engine.neighbours import Neighbours, beside
from blendrag.errors import (
    BlendragError,
    InvalidInputError,
    StoreFullError,
    UnreadableDocumentError,
    UnsupportedModelError,
)
from blendrag.serving.scheduler import Scheduler
from blendrag.store.durable import readable_size
from blendrag.store.encodings import stored_chunk_bytes
from blendrag.text.chunking import Chunk, chunk_id_of
from blendrag.text.readers import digest_of

Row = dict[str, Any]
#: Inode and time of a store's format file: equal wherever that file is seen.
Place = tuple[int, int]
#: Limit of the store that a worker fills on its way to the remote.
PASSING_BYTES = 8 << 30

#: The fields of a document's row, and those that each stage adds.
DOCUMENT: Row = {
    "file": "", "source": "", "title": "", "metadata": "", "digest": "", "bytes": 0.0, "characters": 0,
    "text": "", "places": "", "warnings": "[]", "failure": "", "fatal": "",
}  # fmt: skip
CHUNK: Row = {"number": 0, "of": 0, "start": 0, "end": 0, "tokens": 0, "vector": b""}
KV: Row = {
    "computed": False, "kv_tokens": 0, "context_tokens": 0, "kv_bytes": 0, "seconds": 0.0,
    "namespace": "", "signature": "", "refused": "", "full": "", "keys": "",
}  # fmt: skip


@dataclass(frozen=True)
class IngestPlan:
    """What every worker of a run is given."""

    reopen_in: Callable[..., KVNamespace]
    embedder: Embedder
    root: Path
    place: Place | None
    model: str
    settings: Settings
    encode_after: int = 0

    @property
    def remote(self) -> str:
        return self.settings.remote or ""

    @classmethod
    def of(cls, kv: KVNamespace) -> IngestPlan:
        root = kv.root.resolve()
        where = root, place_of(root), kv.model.name, kv.settings, kv.recipe.encode_after
        return cls(kv.reopen_in(), kv.corpus.embedder, *where)

    def open(self) -> KVNamespace:
        """The model, over the driver's store or over a store of this machine on the way to the remote."""
        if place_of(self.root) == self.place:  # on the same machine or a shared file system
            return self.reopen_in(self.root)
        if not self.remote:
            raise InvalidInputError(
                f"there is no store {self.root} here and no remote, expected one of them; share the "
                "directory or name a --remote"
            )
        name = hashlib.sha256(f"{self.remote} {self.root}".encode()).hexdigest()[:16]
        folder = Path(tempfile.gettempdir()) / f"blendrag-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if found.st_uid != os.getuid() or found.st_mode & 0o077 or not stat.S_ISDIR(found.st_mode):
            raise InvalidInputError(
                f"{folder} can be changed by other users, expected a directory of this user only; remove it"
            )
        settings = replace(self.settings, disk_bytes=PASSING_BYTES, ram_bytes=0)
        return self.reopen_in(folder / name, settings=settings)


def place_of(root: Path) -> Place | None:
    try:
        found = os.stat(root / "format")
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def fatal(exc: BlendragError) -> str:
    return f"worker on {platform.node()}: {exc}"


# -- read -----------------------------------------------------------------------------------------


def read_file(row: Row) -> list[Row]:
    """The documents of a file ``{file, path, bytes, known}``, and the row that ends it.

    ``known``: of stored documents, the digest and the places of the chunks. One that is unchanged keeps them.
    """
    documents, failure = documents_in(Path(row["path"]), row["file"], row["bytes"])
    known, rows = json.loads(row["known"]), []
    for document, size_bytes in documents:
        digest = digest_of(document)
        stored_digest, places = known.get(document.source, ("", ()))
        fields = {
            "file": row["file"],
            "source": document.source,
            "title": document.title,
            "metadata": json.dumps(dict(document.metadata)),
            "digest": digest,
            "bytes": size_bytes,
            "text": document.text,
            "characters": len(document.text),
            "places": json.dumps(places) if digest == stored_digest else "",
        }
        rows.append(DOCUMENT | fields)
    end = {"failure": failure, "warnings": json.dumps(damage_of(documents))}
    return [*rows, DOCUMENT | {"file": row["file"]} | end]


# -- split and embed ------------------------------------------------------------------------------


class EmbedChunks:
    """A document's row becomes rows of its chunks, with vectors unless the document is unchanged."""

    def __init__(self, plan: IngestPlan) -> None:
        self._plan = plan

    @cached_property
    def _split(self) -> Callable[[str, str], list[Chunk]]:
        return self._plan.reopen_in(self._plan.root).corpus.chunker().split

    def __call__(self, row: Row) -> list[Row]:
        blank = row | CHUNK
        if not row["source"]:
            return [blank]
        try:
            chunks, vectors = self._chunks(row)
        except UnreadableDocumentError as bad:
            return [blank | {"text": "", "failure": named_failure(row["source"], bad)}]
        except BlendragError as exc:
            return [blank | {"text": "", "fatal": fatal(exc)}]
        return [
            blank
            | {"number": number, "of": len(chunks), "vector": vector.tobytes(), "text": chunk.text}
            | {"start": chunk.start, "end": chunk.end, "tokens": chunk.tokens}
            for number, (chunk, vector) in enumerate(zip(chunks, vectors, strict=True))
        ]

    def _chunks(self, row: Row) -> tuple[list[Chunk], Sequence[np.ndarray]]:
        text = row["text"]
        if row["places"]:
            places = [
                (header + text[start:end], start, end, tokens)
                for start, end, tokens, header in json.loads(row["places"])
            ]
            chunks = [Chunk(*place, chunk_id_of(place[0])) for place in places]
            return chunks, [np.zeros(0, np.float32)] * len(chunks)
        chunks = self._split(text, row["source"])
        if not chunks:
            raise UnreadableDocumentError(row["source"], "holds no text")
        texts = {chunk.chunk_id: chunk.text for chunk in chunks}
        vectors = self._plan.embedder.embed([*texts.values()], [row["title"]] * len(texts))
        by_id = dict(zip(texts, vectors, strict=True))
        return chunks, [by_id[chunk.chunk_id] for chunk in chunks]


# -- encode ---------------------------------------------------------------------------------------


class EncodeChunks:
    """Stores the KV of chunks that have none. What it returns is durable, in the remote if there is one.

    The model is loaded when the first chunk is missing. A chunk is encoded after others of its batch
    (``encode_after``), because a worker knows no more of the corpus.
    """

    def __init__(self, plan: IngestPlan) -> None:
        self._plan = plan
        self._open = ExitStack()
        self._scheduler = Scheduler()
        self._refused = ""
        self._is_admitted = False
        self._batch: list[Row] = []
        self._before = Written()

    def __del__(self) -> None:
        self._open.close()

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        rows = [
            dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)
        ]
        done = [row | KV for row in rows]
        self._batch = [row for row in done if row["of"] and not row["fatal"]]
        try:
            for row in done:
                if row["of"] and not row["fatal"]:
                    row |= self._stored(row)
                    self._writer.stored.clear()  # which the driver claims
                    if row["full"]:
                        break
            self._kv.store.flush()
        except BlendragError as exc:
            done[0]["fatal"] = done[0]["fatal"] or fatal(exc)
        return {name: [row[name] for row in done] for name in done[0]}

    def _stored(self, row: Row) -> Row:
        chunk = _chunk(row)
        found: Row = {"kv_tokens": len(self._kv.model.text_ids(chunk.text))}
        try:
            if self._refused:
                raise UnsupportedModelError(self._refused)
            if self._writer.missing([chunk]):
                found |= self._write(chunk, row)
        except UnsupportedModelError as refused:
            self._refused = found["refused"] = str(refused)
        except StoreFullError as full:
            found["full"] = str(full)
        except InvalidInputError as bad:
            found["failure"] = str(bad)
        else:
            found |= {"namespace": self._writer.namespace, "signature": self._kv.model.signature()}
            found["keys"] = " ".join(self._writer.keys_of(chunk))
        return found

    def _write(self, chunk: Chunk, row: Row) -> Row:
        """Encode and store a chunk, unless another worker did so meanwhile."""
        _ = self._kv.model.adapter
        # One worker at a time runs the gate and renews KV that is no longer valid.
        with nullcontext() if self._is_admitted else FileLock(self._kv.root / "ingest.lock"):
            if not self._is_admitted:
                self._writer = self._open.enter_context(_pinned(self._kv, self._scheduler))
                self._before = Written()
                if not self._writer.missing([chunk]):
                    return {}
            self._require_room(chunk.tokens)
            name = f"{row['source']}, characters {chunk.start} to {chunk.end}"
            self._writer.write(chunk, name, self._others(chunk, row))
            self._is_admitted = True
        written, before = replace(self._writer.written), self._before
        self._before = written
        return {
            "computed": True,
            "kv_bytes": written.size_bytes - before.size_bytes,
            "seconds": written.seconds - before.seconds,
            "context_tokens": written.context_tokens - before.context_tokens,
        }

    def _others(self, chunk: Chunk, row: Row) -> list[str]:
        """Texts that a chunk may be encoded after: similar ones of its batch. Those of unchanged documents
        come without vectors and are encoded after the chunks before them."""
        if not self._plan.encode_after:
            return []
        near = Neighbours(None, self._plan.encode_after)
        for each in self._batch:
            vector = np.frombuffer(each["vector"], np.float32)
            near.add([(each["title"], _chunk(each))], [vector], replaces=each["source"])
        texts = [*dict.fromkeys(str(each["text"]) for each in self._batch)]
        return near.texts(row["title"], chunk) or beside(texts, texts.index(chunk.text))

    def _require_room(self, tokens: int) -> None:
        """Other workers' new KV is not pinned here, so nothing may be evicted for this chunk."""
        if self._plan.remote:
            return
        (disk,) = (tier for tier in self._kv.store.stats().tiers if tier.tier == "disk")
        needed = self._kv.recipe.variants * stored_chunk_bytes(self._kv.layout, tokens)
        if disk.size_bytes + needed > disk.limit_bytes:
            holds, most = readable_size(disk.size_bytes), readable_size(disk.limit_bytes)
            raise StoreFullError(
                f"the store holds {holds} of at most {most}, and an ingest on Ray evicts nothing; allow more "
                "with --disk-bytes, or free some with blendrag store gc"
            )

    @cached_property
    def _kv(self) -> KVNamespace:
        kv = self._plan.open()
        self._open.callback(kv.close)
        return kv

    @cached_property
    def _writer(self) -> KVWriter:
        return self._open.enter_context(_pinned(self._kv, self._scheduler))


def _chunk(row: Row) -> Chunk:
    text = str(row["text"])
    return Chunk(text, int(row["start"]), int(row["end"]), int(row["tokens"]), chunk_id_of(text))


@contextmanager
def _pinned(kv: KVNamespace, scheduler: Scheduler) -> Iterator[KVWriter]:
    writer = KVWriter(kv, scheduler)
    with writer.pinned():
        yield writer
