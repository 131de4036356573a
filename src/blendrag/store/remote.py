"""The remote tier: payloads of chunks in an object store that several machines share.

Layout below the URL::

    format                                see :mod:`blendrag.store.remote_root`
    corpus/…                              published corpora, see :mod:`blendrag.corpus.snapshots`
    kv/<namespace>/<ab>/<key>.kv          one object per chunk: seals, then the payload file as it is on disk

With a secret (``BLENDRAG_REMOTE_KEY``) each layer has a seal, an HMAC-SHA256 over key, layer and bytes under
a key derived for the namespace: KV of somebody who can write to the bucket but has no secret is not used.
Checksums are verified as on disk. A layer is one range read; several are under way at a time.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress

import numpy as np

from blendrag.errors import CorruptKVError, InvalidInputError, StoreUnavailableError
from blendrag.store.base import Counters, ProcessBound, TierStats
from blendrag.store.identity import is_name, require_name
from blendrag.store.kv import KVLayout
from blendrag.store.objects import IN_FLIGHT, Piece, RemoteRefusedError
from blendrag.store.payload import (
    Frame,
    PayloadHeader,
    Read,
    frame,
    layer_checksum,
    verified_pieces,
)
from blendrag.store.reader import LayerReader
from blendrag.store.remote_root import RemoteRoot

logger = logging.getLogger("blendrag.store")

#: Layers of a chunk that are requested ahead of the one that is read.
AHEAD = 8
#: After a failure the remote is not asked for this long, twice as long after each further one.
PAUSE_S, LONGEST_PAUSE_S = 30.0, 600.0
#: Objects in a row whose bytes are wrong until the remote counts as failing.
MAX_WRONG = 3
#: Headers that are read before they are asked for, and how long they are of use.
MAX_EXPECTED, EXPECTED_S = 256, 2.0
#: Chunks opened within this time belong to one prompt, and share its time to wait.
TOGETHER_S = 0.5


class Waiting:
    """The seconds that one prompt may still wait for the remote."""

    def __init__(self, seconds: float) -> None:
        self.left_s = seconds
        self.last_open = time.monotonic()

    @contextmanager
    def counted(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.left_s -= time.monotonic() - began


class Pause:
    """Whether the remote is left alone for a while, and why. Thread-safe enough: a race costs a request."""

    def __init__(self) -> None:
        self._until = 0.0
        self._next_s = PAUSE_S
        self._why = ""

    def begin(self, why: str) -> None:
        if not self.why:
            self._until = time.monotonic() + self._next_s
            self._next_s = min(2 * self._next_s, LONGEST_PAUSE_S)
            self._why = why
            logger.warning("%s; KV is computed instead for %.0f s", why, self.left_s)

    def relax(self) -> None:
        """The remote works: the next pause is a short one."""
        self._next_s = PAUSE_S

    @property
    def left_s(self) -> float:
        return max(0.0, self._until - time.monotonic())

    @property
    def why(self) -> str:
        """Empty if the remote may be asked."""
        return self._why if self.left_s else ""


class RemoteReader(LayerReader):
    """Reads a chunk's layers by range requests, of which several are under way.

    Keeps verified layers until it is closed, then hands itself to ``on_close``, which may keep the chunk.
    """

    def __init__(
        self,
        tier: RemoteTier,
        namespace: str,
        key: str,
        layout: KVLayout,
        tokens: int,
        expected: Frame,
        checksums: list[int],
        seals: bytes,
        waiting: Waiting,
    ) -> None:
        super().__init__(key, layout, tokens)
        self.tier = "remote"
        self.namespace, self.checksums, self.frame = namespace, checksums, expected
        self.on_close: Callable[[RemoteReader], None] | None = None
        self._remote = tier
        self._seals = seals
        self._waiting = waiting
        self._under_way: dict[int, Future[Piece | None]] = {}
        self._verified: dict[int, memoryview] = {}
        self._lock = threading.Lock()
        self._failed = self._closed = False
        self.is_wanted = False
        """Whether the chunk is kept although no layer was read."""

    @property
    def was_read(self) -> bool:
        """Whether a layer was read, and all that were read are right."""
        return bool(self._verified) and not self._failed

    def read_stored(self, layer: int, buffers: list[memoryview]) -> None:
        with self._lock:
            if self._closed:
                raise ValueError(f"reader of {self.key[:12]}… is closed")
            stored, copied = np.frombuffer(self._take(layer), dtype=np.uint8), 0
        for buffer in buffers:
            target = np.frombuffer(buffer, dtype=np.uint8)
            target[:] = stored[copied : copied + len(target)]  # releases the GIL
            copied += len(target)

    @property
    def patience_s(self) -> float:
        """Seconds that its prompt may still wait for the remote."""
        return self._waiting.left_s

    def begin(self, layer: int) -> Future[Piece | None]:
        """Request a layer that will be read; a future that is done once it is here."""
        with self._lock:
            self._request(layer)
            return self._under_way[layer]

    def whole(self, timeout_s: float) -> list[memoryview]:
        """All layers, also those that were not read. For one thread, after :meth:`close`."""
        self._waiting = Waiting(timeout_s)
        return [self._take(layer) for layer in range(len(self.checksums))]

    def _take(self, layer: int) -> memoryview:
        """The verified bytes of a layer. Raises :class:`CorruptKVError`, :class:`StoreUnavailableError`."""
        if layer not in self._verified:
            for ahead in range(layer, min(layer + AHEAD, len(self.checksums))):
                self._request(ahead)
            try:
                self._verified[layer] = self._arrived(layer)
            except BaseException:
                self._failed = True
                raise
        return self._verified[layer]

    def _request(self, layer: int) -> None:
        if layer not in self._under_way and layer not in self._verified:
            begin, end = self.frame.offsets[layer : layer + 2]
            name = name_of(self.namespace, self.key)
            self._under_way[layer] = self._remote.objects.read_range(
                name, len(self._seals) + begin, end - begin
            )

    def _arrived(self, layer: int) -> memoryview:
        begin, end = self.frame.offsets[layer : layer + 2]
        for _ in range(2):  # what was damaged on the way is right the second time
            self._request(layer)
            piece = self._remote.finish_read(self._under_way.pop(layer), self._waiting)
            if piece is not None and len(piece.data) == end - begin:
                data, place = piece.data, (self.namespace, self.key, layer)
                is_sum = layer_checksum(self.key, layer, data) == self.checksums[layer]
                if is_sum and self._remote.seals.fits(self._seals, *place, data):
                    self._remote.note_right(len(data))
                    return data
        raise self._remote.doubt(
            self.namespace, self.key, f"layer {layer}: the bytes are not those that were put"
        )

    def is_cached(self) -> bool:
        return False

    def close(self) -> None:
        """Cancel what is under way. Idempotent; waits for a read in progress."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for request in self._under_way.values():
                request.cancel()
            self._under_way.clear()
        if self.on_close is not None and (self.was_read or self.is_wanted):
            self.on_close(self)
        else:
            self._verified.clear()

    def release(self) -> None:
        """Free the layers, once whoever got the reader is done."""
        for request in self._under_way.values():
            request.cancel()
        self._verified.clear()


def expected_load_s(readers: Sequence[RemoteReader], within_s: float) -> float:
    """Seconds that reading all layers of these chunks takes, going by the first two, which are requested now.

    Infinity if those are not here in ``within_s``. As many requests as run at a time are taken to have come
    as far as the first ones, which is right both where latency and where bandwidth is the limit.
    """
    began, layers = time.monotonic(), min(len(reader.checksums) for reader in readers)
    begun = [[reader.begin(layer) for reader in readers] for layer in range(min(AHEAD, layers))]
    first = [future for row in begun[:2] for future in row]
    if wait(first, within_s).not_done:
        return math.inf
    reads = sum(len(reader.checksums) for reader in readers)
    return (time.monotonic() - began) * max(1.0, reads / max(len(first), IN_FLIGHT))


class RemoteTier(ProcessBound):
    """KV of chunks in an object store. Thread-safe.

    Reading costs a prompt at most ``timeout_s`` of waiting; after a failure nothing is asked for a while.
    """

    def __init__(self, url: str, secret: str | None, timeout_s: float) -> None:
        """Raises :class:`InvalidInputError` or :class:`StoreUnavailableError` if it cannot be used.

        One that does not answer is left alone for a while, with a warning.
        """
        super().__init__()
        self._root = RemoteRoot(url, secret, timeout_s)
        self.seals = self._root.seals
        self.timeout_s = timeout_s
        self.objects = self._root.objects
        self.url = self._root.url
        self.counters = Counters()
        self._pause, self._write_pause = Pause(), Pause()
        self._expected: dict[tuple[str, str], tuple[Future[Piece | None], float]] = {}
        self._waiting = Waiting(timeout_s)
        self._doubtful: set[tuple[str, str]] = set()
        self._wrong_in_a_row = 0
        try:
            self._root.check()
        except (RemoteRefusedError, InvalidInputError):
            self.objects.close()
            raise
        except StoreUnavailableError as exc:
            self._pause.begin(str(exc))

    @property
    def trouble(self) -> str:
        """Why the remote is not asked now; empty if it is."""
        return self._pause.why

    # -- reading ---------------------------------------------------------------------------------

    def open(self, namespace: str, key: str, layout: KVLayout, tokens: int) -> RemoteReader | None:
        """Reader of that entry, or ``None`` if it is absent, in doubt, or the remote does not answer."""
        self.check_process()
        require_name(namespace)
        require_name(key)
        if self._pause.why or (namespace, key) in self._doubtful:
            return None
        expected = frame(layout, tokens)
        seal_bytes = self.seals.size_bytes(len(layout.layers))
        waiting = self._shared_waiting()
        try:
            begun, began = self._expected.pop((namespace, key), (None, 0.0))
            if begun is None or time.monotonic() - began > EXPECTED_S:
                head_bytes = seal_bytes + expected.header_bytes
                begun = self.objects.read(name_of(namespace, key), 0, head_bytes)
            piece = self.finish_read(begun, waiting)
        except StoreUnavailableError:
            return None
        finally:
            waiting.last_open = time.monotonic()
        if piece is None:
            return None
        seals, header = bytes(piece.data[:seal_bytes]), bytes(piece.data[seal_bytes:])
        checksums = None
        if piece.object_bytes == seal_bytes + expected.file_bytes:
            checksums = expected.checksums(header, namespace, key)
        if checksums is None:
            self.doubt(namespace, key, "its header or size is not what was put")
            return None
        self.counters.add("hits")
        return RemoteReader(
            self, namespace, key, layout, tokens, expected, checksums, seals, waiting
        )

    def expect(self, namespace: str, key: str, layout: KVLayout, tokens: int) -> None:
        """Begin to read the header of an entry that :meth:`open` will be called for."""
        entry = namespace, key
        if self._pause.why or entry in self._doubtful or entry in self._expected:
            return
        while len(self._expected) >= MAX_EXPECTED:  # of prompts that opened less than expected
            with suppress(KeyError, StopIteration, RuntimeError):
                self._expected.pop(next(iter(self._expected)))[0].cancel()
        head_bytes = self.seals.size_bytes(len(layout.layers)) + frame(layout, tokens).header_bytes
        begun = self.objects.read(name_of(*entry), 0, head_bytes)
        self._expected[entry] = begun, time.monotonic()

    def begin_prompt(self) -> None:
        """Chunks that are opened from now on share a new time to wait."""
        self._waiting = Waiting(self.timeout_s)

    def _shared_waiting(self) -> Waiting:
        """One for the chunks of a prompt; where none was begun, of those opened one right after another."""
        if time.monotonic() - self._waiting.last_open > TOGETHER_S:
            self.begin_prompt()
        return self._waiting

    def finish_read(self, begun: Future[Piece | None], waiting: Waiting) -> Piece | None:
        """Raises :class:`StoreUnavailableError`; the remote is then not asked for a while."""
        if self._pause.why and not begun.done():
            begun.cancel()
            raise StoreUnavailableError(self._pause.why)
        try:
            with waiting.counted():
                piece = self.objects.wait(begun, waiting.left_s)
        except StoreUnavailableError as exc:
            self.counters.add("failures")
            self._pause.begin(str(exc))
            raise
        return piece

    def note_right(self, size_bytes: int) -> None:
        """A layer was read and verified."""
        self._wrong_in_a_row = 0
        self._pause.relax()
        self.counters.add("read_bytes", size_bytes)

    def doubt(self, namespace: str, key: str, fault: str) -> CorruptKVError:
        """Never read an object again until this process has put it anew."""
        self.counters.add("failures")
        self._doubtful.add((namespace, key))
        what = f"remote {self.url}: KV {key[:12]}…: {fault}"
        logger.warning("%s; the chunk is a miss", what)
        self._wrong_in_a_row += 1
        if self._wrong_in_a_row >= MAX_WRONG:
            self._pause.begin(
                f"remote {self.url} holds wrong bytes for {MAX_WRONG} chunks in a row"
            )
        return CorruptKVError(f"{what}; the chunk counts as a miss")

    def contains(self, namespace: str, key: str) -> bool:
        """Whether there is an object. Its bytes are verified when they are read."""
        if self._pause.why or (namespace, key) in self._doubtful:
            return False
        try:
            return self.objects.head(name_of(namespace, key)) is not None
        except StoreUnavailableError as exc:
            self._pause.begin(str(exc))
            return False

    def keys(self, namespace: str) -> Iterator[str]:
        """Keys of one namespace; none if the remote does not answer."""
        if self._pause.why:
            return
        try:
            for each in self.objects.listing(f"kv/{namespace}/"):
                if key := key_of(namespace, each.name):
                    yield key
        except StoreUnavailableError as exc:
            self._pause.begin(str(exc))

    def durable(self, namespace: str, keys: frozenset[str]) -> set[str]:
        """Those of ``keys`` that are there. Raises :class:`StoreUnavailableError` if it does not answer."""
        found = {
            key_of(namespace, each.name): each.name
            for each in self.objects.listing(f"kv/{namespace}/")
            if each.size_bytes
        }
        there = keys & found.keys()
        for key in there:  # its writer may be about to sync it
            self.objects.sync(found[key])
        return set(there)

    # -- writing ---------------------------------------------------------------------------------

    def put(self, header: PayloadHeader, read: Read) -> None:
        """Write a payload whose bytes after the header ``read`` gives, unless it is there already.

        Durable when this returns. Raises :class:`StoreUnavailableError`, and :class:`CorruptKVError` if the
        bytes are not those that the header describes.
        """
        if self._write_pause.why:
            raise StoreUnavailableError(self._write_pause.why)
        entry = header.namespace, header.key
        name, is_doubtful = name_of(*entry), entry in self._doubtful
        seal_bytes = self.seals.size_bytes(len(header.checksums))
        try:
            self._root.make()
            there = self.objects.head(name)
            if there == seal_bytes + header.file_bytes and not is_doubtful:
                return
            data = self._sealed(header, read)
            self.objects.put(name, data, if_absent=there is None and not is_doubtful)
        except (StoreUnavailableError, InvalidInputError) as exc:
            self.counters.add("failures")
            self._write_pause.begin(str(exc))
            raise
        self._write_pause.relax()
        self._doubtful.discard(entry)
        self.counters.add("puts")

    def _sealed(self, header: PayloadHeader, read: Read) -> bytearray:
        """The object of a payload: seals, header, layers."""
        body = bytearray(header.encoded)
        for piece in verified_pieces(header, read):
            body += piece
        seals, view = bytearray(), memoryview(body)
        offsets = header.frame.offsets
        for layer in range(len(header.checksums)):
            sealing = self.seals.sealing(header.namespace, header.key, layer)
            if sealing is not None:
                sealing.update(view[offsets[layer] : offsets[layer + 1]])
                seals += sealing.digest()
        return seals + view

    def tier_stats(self) -> TierStats:
        """Counters; what the remote holds is not counted."""
        hits, read_bytes = self.counters["hits"], self.counters["read_bytes"]
        return TierStats("remote", 0, 0, 0, hits, read_bytes, 0)

    def close(self) -> None:
        """End all requests. Idempotent."""
        self._root.close()


def key_of(namespace: str, name: str) -> str:
    """The key of the chunk that an object holds; empty for any other object."""
    key = name.rsplit("/", 1)[-1].removesuffix(".kv")
    return key if is_name(key) and name == name_of(namespace, key) else ""


def name_of(namespace: str, key: str) -> str:
    """Of the object that holds a chunk."""
    return f"kv/{namespace}/{key[:2]}/{key}.kv"
