"""A corpus that several machines share: one publishes it as snapshots, others follow.

A document belongs to a part of a snapshot by the hash of its source, so that a small change makes few new
parts. A machine that follows makes its own corpus equal to the snapshot, in one transaction and by the
difference: other threads and processes read on meanwhile. Passages that were learned from prompts are neither
published nor replaced. What is in the object store is described in :mod:`blendrag.corpus.shared.snapshots`.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from blendrag.corpus.corpus import Corpus
from blendrag.corpus.database import DIRECTORY, DOCUMENT, EmptyDatabase
from blendrag.corpus.documents import (
    LEARNED,
    NOT_LEARNED,
    Record,
    delete_documents,
    end_change,
    insert_record,
    published_texts,
    record_of,
)
from blendrag.corpus.manifest import Manifest
from blendrag.corpus.shared.snapshots import (
    MANIFESTS,
    PARTS,
    POINTER,
    VERSION,
    Pointer,
    Snapshot,
    SnapshotPart,
    read_blob,
    read_manifest,
    read_pointer,
)
from blendrag.errors import (
    BlendragError,
    CorpusError,
    InvalidInputError,
    ModelLoadError,
    StoreUnavailableError,
)
from blendrag.store import writer_files
from blendrag.store.identity import digest_fields
from blendrag.store.remote.claims import require_no_collection
from blendrag.store.remote.root import RemoteRoot
from blendrag.wording import first_line

#: Bytes of a part, about, before compression; and the most that is read of one.
PART_BYTES, MAX_PART_BYTES = 4 << 20, 1 << 30
#: Parts that are read at a time.
AT_A_TIME = 4
#: Snapshots that are begun to be followed until one of them stays.
FOLLOW_TRIES = 5
#: Setting of a corpus: what it has published or followed last.
SHARED = "shared"


@dataclass(frozen=True)
class Shared:
    """What a store remembers of the snapshot that it has published or followed last."""

    corpus: str
    serial: int
    state: str
    intended: str = ""
    """Snapshot that the pointer was about to be set to."""
    writer: str = ""
    """SHA-256 of the snapshot's writer; empty if there is none."""


@dataclass(frozen=True)
class Published:
    """What :func:`publish` did."""

    serial: int
    documents: int
    chunks: int
    named: int
    """Entries of KV that the snapshot names, all of them durable."""
    missing: int
    """Chunks without KV in the remote; it is computed when they are asked for."""
    uploaded_bytes: int
    changed: bool
    """``False`` if this snapshot was current already."""


@dataclass(frozen=True)
class Followed:
    """What :func:`follow` did."""

    serial: int
    documents: int
    chunks: int
    added: int = 0
    """Documents that are new or have changed."""
    removed: int = 0
    read_bytes: int = 0

    @property
    def changed(self) -> bool:
        return bool(self.added or self.removed)


class Keys(NamedTuple):
    """Entries of KV that belong to a corpus."""

    namespace: str
    keys: frozenset[str]


#: Which KV a corpus with these settings and texts of chunks has.
KeysOf = Callable[[Manifest, Iterable[str]], Keys]
#: Copies what only this machine has, and returns the keys that are durable in the remote.
Durable = Callable[[Keys], frozenset[str]]

# -- publishing -------------------------------------------------------------------------------------


def publish(
    root: Path, remote: RemoteRoot, keys_of: KeysOf, durable: Durable, again: bool = False
) -> Published:
    """Publish the corpus of the store at ``root``.

    ``again``: write also parts that the remote should have. The manifest is written first, so that no
    collection removes the KV that is looked for next; the pointer is replaced last, and names only what
    :data:`Durable` has found. Raises :class:`InvalidInputError` if the
    remote has another corpus or a snapshot that this store has not seen, :class:`CorpusError`, and
    :class:`StoreUnavailableError`.
    """
    remote.make()
    before = remote.objects.get(POINTER)
    current = read_pointer(remote, before) if before is not None else None
    with Corpus.open(root) as corpus:  # a connection of its own: others read on
        shared = _shared(corpus)
        published = None
        if current is not None:
            _require_ours(corpus, remote, shared, current)
            if not again:
                published = read_manifest(remote, current.snapshot)
        writing = _Writing(remote, published)
        with corpus.file.reading():
            settings = corpus.manifest
            state = _State.of(corpus, _parts_for(corpus, published))
            corpus_id = current.corpus if current else secrets.token_hex(16)
            parts = tuple(writing.part(corpus, *each) for each in state.parts())
            keys = keys_of(settings, published_texts(corpus.file))
            chunks = len(corpus)
            writer = writing.writer(root, settings.writer)

        def snapshot(named: frozenset[str]) -> tuple[str, Snapshot]:
            listed = writing.blob(b"".join(bytes.fromhex(key) for key in sorted(named)))
            written = Snapshot(
                corpus_id, settings, len(state.digests), chunks, state.digest(settings), parts,
                keys.namespace, listed, writer,
            )  # fmt: skip
            return writing.manifest(written), written

        name, written = snapshot(keys.keys)
        require_no_collection(remote)
        durable_keys = durable(keys)
        if durable_keys != keys.keys:
            name, written = snapshot(durable_keys)
        # a collection that began earlier may have removed an old manifest of this name
        require_no_collection(remote)
        _require_whole(remote, name, written)
        serial = current.serial if current else 0
        is_new = current is None or current.snapshot != name
        if is_new:
            _remember(corpus, Shared(corpus_id, serial, shared.state if shared else "", name))
            serial += 1
            after = Pointer(VERSION, corpus_id, serial, name)
            if not remote.objects.replace(POINTER, _signed(remote, after), before):
                raise _overtaken(remote, current)
        _remember(corpus, Shared(corpus_id, serial, written.state, writer=written.writer))
    missing = len(keys.keys) - len(durable_keys)
    return Published(
        serial,
        written.documents,
        chunks,
        len(durable_keys),
        missing,
        writing.uploaded_bytes,
        is_new,
    )


def _require_ours(
    corpus: Corpus, remote: RemoteRoot, shared: Shared | None, current: Pointer
) -> None:
    """Raise :class:`InvalidInputError` unless the store has seen the current snapshot."""
    root = corpus.directory.parent
    if shared is None or shared.corpus != current.corpus:
        raise InvalidInputError(
            f"remote {remote.url} holds the corpus of another store than {root}, expected its own or "
            "none; to change that one, follow it into a new store and ingest there (blendrag store follow), "
            "else choose another prefix"
        )
    if current.serial != shared.serial and current.snapshot != shared.intended:
        raise InvalidInputError(
            f"remote {remote.url} has snapshot {current.serial}, and store {root} knows {shared.serial}: "
            "another machine has published since; follow it into a new store and ingest there, which finds "
            "the KV"
        )


def _overtaken(remote: RemoteRoot, before: Pointer | None) -> BlendragError:
    """Why the pointer was not replaced."""
    found = remote.objects.get(POINTER)
    if found is not None and read_pointer(remote, found) == before:
        return StoreUnavailableError(
            f"remote {remote.url} was collected while this published; repeat the command"
        )
    return InvalidInputError(
        f"another machine published to remote {remote.url} at the same time, expected one that publishes at "
        "a time; repeat the command"
    )


def _require_whole(remote: RemoteRoot, name: str, snapshot: Snapshot) -> None:
    """Raise :class:`StoreUnavailableError` unless all objects of a snapshot are there."""
    parts = {PARTS + name for name in snapshot.part_names}
    names = {each.name for each in remote.objects.listing("corpus/")}
    if MANIFESTS + name not in names:
        raise StoreUnavailableError(
            f"remote {remote.url} was collected while this published; repeat the command"
        )
    if lost := parts - names:
        raise StoreUnavailableError(
            f"{len(lost)} of {len(parts)} parts of the snapshot are no longer in remote {remote.url}; "
            "publish everything again (blendrag store publish --again)"
        )


class _Writing:
    """Writes the objects of one snapshot; those of the current one are not written again."""

    def __init__(self, remote: RemoteRoot, published: Snapshot | None) -> None:
        self._remote = remote
        self._known: dict[str, SnapshotPart] = {}
        self._names: set[str] = set()
        if published is not None:
            self._names = published.part_names
            self._known = {part.state: part for part in published.parts}
            self._settings = _settings_state(published.settings)
        self.uploaded_bytes = 0

    def part(self, corpus: Corpus, state: str, sources: Sequence[str]) -> SnapshotPart:
        known = self._known.get(state)
        if known is not None and self._settings == _settings_state(corpus.manifest):
            return known
        lines = []
        for source in sources:
            record = record_of(corpus.file, source)
            if record is None:
                raise CorpusError(
                    f"the corpus at {corpus.directory} is damaged (document {source!r:.80}), expected one "
                    "that can be published; run blendrag store check --repair, then ingest again"
                )
            lines.append(_RECORD.dump_json(record))
        raw = b"\n".join(lines)
        return SnapshotPart(self.blob(zlib.compress(raw, 1)), state, len(raw))

    def blob(self, data: bytes) -> str:
        """Write a part; its name."""
        name = hashlib.sha256(data).hexdigest()
        if name not in self._names:
            self._put(PARTS + name, data)
            self._names.add(name)
        return name

    def writer(self, root: Path, fingerprint: str) -> str:
        """Write the writer of the store at ``root``; its name, empty if there is none."""
        if not fingerprint:
            return ""
        from blendrag.model.writer import Writer  # loads torch

        try:
            data = writer_files.read(root, fingerprint)
            if Writer.from_bytes(data, "the copy").fingerprint == fingerprint:
                return self.blob(data)
            why = "is damaged"
        except ModelLoadError:
            why = "is damaged"
        except OSError as exc:
            why = f"cannot be read ({exc.strerror or exc})"
        raise CorpusError(
            f"writer {fingerprint[:12]} of store {root} {why}, and who follows needs it to encode; ingest "
            "again with its directory (--writer)"
        )

    def manifest(self, snapshot: Snapshot) -> str:
        """Write a manifest, also if it is there already: what was written just now is not collected."""
        data = snapshot.to_json()
        name = hashlib.sha256(data).hexdigest()
        self._put(MANIFESTS + name, data)
        return name

    def _put(self, name: str, data: bytes) -> None:
        self._remote.objects.put(name, data, if_absent=False)
        self.uploaded_bytes += len(data)


# -- following --------------------------------------------------------------------------------------


def may_follow(root: Path) -> bool:
    """Whether the corpus of the store at ``root`` is one that follows or publishes, or there is none."""
    try:
        with Corpus.open(root, read_only=True) as corpus:
            return _shared(corpus) is not None or not corpus.has_documents
    except EmptyDatabase:  # a follower was killed when it began
        return True
    except CorpusError:
        return not (Path(root) / DIRECTORY).exists()


def holds_corpus(root: Path) -> bool:
    """Whether the store at ``root`` has a corpus, and not only the file for one that it began to follow."""
    try:
        with Corpus.open(root, read_only=True) as corpus:
            return corpus.manifest_or_none is not None
    except EmptyDatabase:
        return False
    except CorpusError:
        return (Path(root) / DIRECTORY).exists()


def follow(root: Path, remote: RemoteRoot, keep_settings: bool = False) -> Followed | None:
    """Make the corpus of the store at ``root`` equal to the published one; ``None`` if there is none.

    With ``keep_settings``, a snapshot whose embedder, tokenizer, prefix, chunks or encoding differ is
    refused. Raises :class:`InvalidInputError` for a corpus with documents of its own, :class:`CorpusError`,
    and :class:`StoreUnavailableError`; then the corpus is as it was.
    """
    remote.check()
    for _ in range(FOLLOW_TRIES):
        found = remote.objects.get(POINTER)
        if found is None:
            return None
        try:
            return _follow(root, remote, read_pointer(remote, found), keep_settings)
        except StoreUnavailableError:
            # what an old snapshot alone names may be collected once another one is published
            if remote.objects.get(POINTER) == found:
                raise
    raise StoreUnavailableError(
        f"remote {remote.url} was published to {FOLLOW_TRIES} times while this followed; repeat the command"
    )


def _follow(root: Path, remote: RemoteRoot, pointer: Pointer, keep_settings: bool) -> Followed:
    with Corpus.open(root, create=True) as corpus:
        shared = _shared(corpus)
        _require_follower(corpus, remote, shared, pointer)
        kept = corpus.manifest_or_none
        fingerprint = kept.writer if kept is not None else ""
        is_same = shared is not None and shared.serial == pointer.serial
        if shared is not None and is_same and _has_writer(root, fingerprint, shared.writer):
            ((documents,),) = corpus.file.rows("SELECT count(*) FROM document")
            return Followed(pointer.serial, documents, len(corpus))
        snapshot = read_manifest(remote, pointer.snapshot)
        settled = kept if corpus.has_documents else None
        here = _settings_state(settled) if settled is not None else b""
        same = _settings_state(snapshot.settings) == here
        if settled is not None and keep_settings and not same:
            raise InvalidInputError(
                f"the corpus of remote {remote.url} was ingested anew with other settings (embedder, "
                "tokenizer, prefix, chunk length or encoding); start the server again to follow it"
            )
        state = _State.of(corpus, len(snapshot.parts))
        if shared is not None and settled is not None and state.digest(settled) != shared.state:
            raise InvalidInputError(
                f"store {corpus.directory.parent} has changes that were not published, which following "
                f"remote {remote.url} would undo; publish them, or follow into a new store"
            )
        changed = [
            (at, part)
            for at, part in enumerate(snapshot.parts)
            if not same or part.state != state.of_part(at)
        ]
        _fetch_writer(remote, snapshot, root)
        with tempfile.TemporaryDirectory(prefix="blendrag-follow-") as scratch:
            read_bytes = _fetch(remote, [part for _, part in changed], Path(scratch))
            after = Shared(pointer.corpus, pointer.serial, snapshot.state, writer=snapshot.writer)
            added, removed = _apply(corpus, snapshot, state, same, changed, Path(scratch), after)
        _fetch_writer(remote, snapshot, root)  # it was unused until now, so gc may have removed it
        return Followed(pointer.serial, snapshot.documents, len(corpus), added, removed, read_bytes)


def _require_follower(
    corpus: Corpus, remote: RemoteRoot, shared: Shared | None, pointer: Pointer
) -> None:
    root = corpus.directory.parent
    if (shared is None or shared.corpus != pointer.corpus) and corpus.has_documents:
        raise InvalidInputError(
            f"store {root} holds documents that are not of the corpus that remote {remote.url} publishes; "
            "follow it into a new store, or choose another prefix"
        )
    is_same = shared is not None and shared.corpus == pointer.corpus
    if shared is not None and is_same and pointer.serial < shared.serial:
        raise InvalidInputError(
            f"remote {remote.url} points to snapshot {pointer.serial}, older than the {shared.serial} of "
            f"store {root}, expected that or a newer one; publish again, or follow into a new store"
        )


def _fetch(remote: RemoteRoot, parts: Sequence[SnapshotPart], scratch: Path) -> int:
    """Read and verify parts into files; bytes read."""

    def one(part: SnapshotPart) -> int:
        data = read_blob(remote, PARTS, part.name)
        (scratch / part.name).write_bytes(data)
        return len(data)

    with ThreadPoolExecutor(AT_A_TIME, "blendrag-follow") as threads:
        return sum(threads.map(one, parts))


def _fetch_writer(remote: RemoteRoot, snapshot: Snapshot, root: Path) -> None:
    """Copy the writer of a snapshot into the store at ``root``, unless it is there and whole."""
    fingerprint = snapshot.settings.writer
    if snapshot.writer and not _has_writer(root, fingerprint, snapshot.writer):
        writer_files.write(root, fingerprint, read_blob(remote, PARTS, snapshot.writer))


def _has_writer(root: Path, fingerprint: str, sha256: str) -> bool:
    """Whether the store has that writer as it was published; of no writer (empty), nothing is missing."""
    return not fingerprint or writer_files.sha256_of(root, fingerprint) == sha256


def _apply(
    corpus: Corpus,
    snapshot: Snapshot,
    state: _State,
    same: bool,
    changed: Sequence[tuple[int, SnapshotPart]],
    scratch: Path,
    after: Shared,
) -> tuple[int, int]:
    """Change the corpus, in one transaction; how many documents were added and removed."""
    file = corpus.file
    added = 0
    with file.writing():
        if _State.of(corpus, len(snapshot.parts)).digests != state.digests:
            raise CorpusError(
                f"another process changed the corpus at {corpus.directory} at the same time; repeat the "
                "command"
            )
        gone = {source for at, _ in changed for source in state.buckets[at]}
        suspects: list[int] = []
        new: list[tuple[SnapshotPart, set[str]]] = []
        for _, part in changed:
            wanted = set()
            for record in _records(scratch, part):
                if same and state.digests.get(record.source) == record.digest:
                    gone.discard(record.source)
                else:
                    wanted.add(record.source)
            new.append((part, wanted))
        by_source = "SELECT id FROM document WHERE source = ?"
        for source in sorted(gone):
            suspects += delete_documents(file, by_source, source)
        file.set_meta("manifest", snapshot.settings.to_json())
        for part, wanted in new:
            for record in _records(scratch, part) if wanted else ():
                if record.source in wanted:
                    insert_record(file, record, corpus.vectors.check)
                    added += 1
        removed = len(gone - {source for _, wanted in new for source in wanted})
        end_change(file, suspects)
        if _State.of(corpus, 1).digest(snapshot.settings) != snapshot.state:
            raise StoreUnavailableError(
                "the parts of the published corpus do not make up its snapshot; publish it again"
            )
        file.set_meta(SHARED, json.dumps(asdict(after)))
    return added, removed


def _records(scratch: Path, part: SnapshotPart) -> Iterator[Record]:
    """The documents of a part that was read. Raises :class:`StoreUnavailableError` for anything else."""
    unpacking = zlib.decompressobj()
    try:
        raw = unpacking.decompress((scratch / part.name).read_bytes(), MAX_PART_BYTES)
        if len(raw) != part.size_bytes or not unpacking.eof:
            raise ValueError("its length is another one")
        for line in raw.split(b"\n") if raw else ():
            yield _RECORD.validate_json(line)
    except (zlib.error, ValueError, RecursionError) as exc:
        raise StoreUnavailableError(
            f"part {part.name[:12]}… of the published corpus is not what blendrag writes "
            f"({first_line(exc, 80)}); publish again with this version of blendrag"
        ) from exc


# -- what is where ----------------------------------------------------------------------------------


class _State:
    """The documents of a corpus but those that were learned, by part."""

    def __init__(self, digests: dict[str, str], parts: int) -> None:
        self.digests = digests
        """Digest of each document, by source."""
        self.buckets: list[list[str]] = [[] for _ in range(parts)]
        for source in sorted(digests):
            digest = hashlib.sha256(source.encode("utf-8", "surrogatepass")).digest()
            self.buckets[int.from_bytes(digest[:4], "big") % parts].append(source)

    @classmethod
    def of(cls, corpus: Corpus, parts: int) -> _State:
        rows = corpus.file.sound_rows((DOCUMENT,), f"WHERE {NOT_LEARNED}", LEARNED)
        return cls({row[1]: row[3] for (row,) in rows}, max(1, parts))

    def of_part(self, at: int) -> str:
        fields = (f for source in self.buckets[at] for f in (source, self.digests[source]))
        return digest_fields(field.encode("utf-8", "surrogatepass") for field in fields)

    def parts(self) -> Iterator[tuple[str, Sequence[str]]]:
        """State and sources of each."""
        for at, sources in enumerate(self.buckets):
            yield self.of_part(at), sources

    def digest(self, settings: Manifest) -> str:
        """See :attr:`Snapshot.state`. Does not depend on the parts."""
        fields = (field for pair in sorted(self.digests.items()) for field in pair)
        encoded = (field.encode("utf-8", "surrogatepass") for field in fields)
        return digest_fields([_settings_state(settings), *encoded])


def _parts_for(corpus: Corpus, published: Snapshot | None) -> int:
    """How many parts: as many as are published, unless the corpus has become far larger or smaller."""
    ((passages, tokens),) = corpus.file.rows(
        "SELECT count(*), total(tokens) FROM passage JOIN chunk ON chunk.id = passage.chunk"
    )
    size_bytes = 5 * tokens + passages * 6 * (corpus.file.number("dim") or 0)
    fits = max(1, math.ceil(size_bytes / PART_BYTES))
    now = len(published.parts) if published is not None else 0
    return now if fits / 4 <= now <= fits * 4 else fits


def _settings_state(settings: Manifest) -> bytes:
    """What documents and vectors depend on."""
    names = ("chunk_tokens", "embedder", "encoding", "prefix_ids", "tokenizer_fingerprint")
    return json.dumps([getattr(settings, name) for name in names]).encode()


def _shared(corpus: Corpus) -> Shared | None:
    value = corpus.file.meta(SHARED)
    try:
        return None if value is None else _SHARED.validate_json(value)
    except ValidationError:
        return None


def _remember(corpus: Corpus, shared: Shared) -> None:
    with corpus.file.writing():
        corpus.file.set_meta(SHARED, json.dumps(asdict(shared)))


def _signed(remote: RemoteRoot, pointer: Pointer) -> bytes:
    return json.dumps(asdict(pointer) | {"seal": pointer.signed(remote)}).encode()


_SHARED = TypeAdapter(Shared)
_RECORD = TypeAdapter(Record)
