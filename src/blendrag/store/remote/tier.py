"""The remote tier: payloads of chunks in an object store that several machines share.

Layout below the URL::

    format                                see :mod:`.root`
    corpus/…                              published corpora, see :mod:`blendrag.corpus.shared.snapshots`
    claims/…                              KV that must not be collected, see :mod:`.claims`
    kv/<namespace>/<ab>/<key>.kv          one object per chunk: seals, then the payload file as it is on disk

With a secret (``BLENDRAG_REMOTE_KEY``) each layer has a seal, an HMAC-SHA256 over key, layer and bytes under
a key derived for the namespace: KV of somebody who can write to the bucket but has no secret is not used.
Checksums are verified as on disk. The first request of a chunk reads its header and first layers, each
further one whole layers; many requests are under way at a time.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from functools import lru_cache

import numpy as np

from blendrag.errors import CorruptKVError, InvalidInputError, StoreUnavailableError
from blendrag.store import payload
from blendrag.store.base import Counters, ProcessBound, WantedKV
from blendrag.store.identity import require_name
from blendrag.store.kv import KVLayout
from blendrag.store.reader import LayerReader, copy_bytes
from blendrag.store.remote import claims
from blendrag.store.remote.objects import ObjectBytes, RemoteRefusedError
from blendrag.store.remote.root import RemoteRoot, entry_of, name_of

logger = logging.getLogger("blendrag.store")

#: Layers that a chunk's first request reads with the header. Their time tells how fast the remote is.
FIRST_LAYERS = 2
#: A further request reads one layer, or several that together are no larger than this.
REQUEST_BYTES = 1 << 20
#: Requests of a chunk that are under way, the one that is waited for included.
AHEAD = 8
#: After a failure the remote is not asked for this long, twice as long after each further one.
PAUSE_S, LONGEST_PAUSE_S = 30.0, 600.0
#: Objects in a row whose bytes are wrong until the remote counts as failing.
MAX_WRONG = 3
#: Chunks that are looked for at a time.
ASKED_TOGETHER = 256


class Waiting:
    """The seconds that one prompt may still wait for the remote."""

    def __init__(self, seconds: float) -> None:
        self.left_s = seconds
        self._first_until = math.inf

    def limit_first(self, seconds: float) -> None:
        """The prompt waits so long for the first requests of its chunks; then it goes on without them."""
        self._first_until = time.monotonic() + seconds

    @contextmanager
    def counted(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.left_s -= time.monotonic() - began

    def is_over_for(self, first: Future[ObjectBytes | None]) -> bool:
        """Whether a first request took too long; waits for it until then."""
        seconds = self._first_until - time.monotonic()
        if seconds < self.left_s:
            with self.counted():
                wait_for([first], max(0.0, seconds))
            return not first.done()
        return False


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
            logger.warning("%s; it is not asked for %.0f s", why, self.left_s)

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


@lru_cache(maxsize=1024)
def requests_of(expected: payload.Frame) -> tuple[range, ...]:
    """The layers that each request for a chunk reads; the first one also reads its header."""
    offsets, layers = expected.offsets, len(expected.offsets) - 1
    requests, begin = [range(min(FIRST_LAYERS, layers))], min(FIRST_LAYERS, layers)
    for layer in range(begin + 1, layers + 1):
        if layer == layers or offsets[layer + 1] - offsets[begin] > REQUEST_BYTES:
            requests.append(range(begin, layer))
            begin = layer
    return tuple(requests)


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
        waiting: Waiting,
    ) -> None:
        """Makes the first request."""
        super().__init__(key, layout, tokens)
        self.tier = "remote"
        self.namespace, self.frame = namespace, payload.frame(layout, tokens)
        self.checksums: list[int] = []
        """One for each layer; empty until the header is here and right."""
        self.requested_at = time.monotonic()
        self.requests = requests_of(self.frame)
        self._remote = tier
        self._seal_bytes = tier.seals.size_bytes(len(layout.layers))
        self._seals = b""
        self._waiting = waiting
        self._begun: dict[int, Future[ObjectBytes | None]] = {0: self._request_first()}
        """By number of the request."""
        self._verified: dict[int, memoryview] = {}

    @property
    def in_flight(self) -> int:
        """Requests that the remote runs at a time."""
        return self._remote.objects.in_flight

    def read_stored(self, layer: int, buffers: list[memoryview]) -> None:
        with self._lock:
            if self._closed:
                raise self.closed_error()
            stored = np.frombuffer(self._take(layer), dtype=np.uint8)
        copy_bytes(stored, buffers)

    def is_late(self) -> bool:
        """Whether the first request takes longer than its prompt waits for it; waits until then."""
        return self._waiting.is_over_for(self._begun[0])

    def allow(self, seconds: float) -> None:
        """Let its prompt wait so long for the remote, if it may not anyway."""
        self._waiting.left_s = max(self._waiting.left_s, seconds)

    def request(self, number: int) -> None:
        """Begin a request for layers that will be read, unless it was made."""
        with self._lock:
            self._request(number)

    def whole(self, timeout_s: float) -> list[memoryview]:
        """All layers, also those that were not read. For one thread, after :meth:`close`.

        Waits for the header no longer than a prompt does.
        """
        self._waiting = Waiting(min(timeout_s, self._remote.timeout_s))
        self.read_header()
        self._waiting = Waiting(timeout_s)
        return [self._take(layer) for layer in range(len(self.checksums))]

    def read_header(self) -> None:
        """Wait for the first request and verify the header, once.

        Raises :class:`CorruptKVError`, also if there is no such object, and :class:`StoreUnavailableError`.
        """
        if self.checksums:
            return
        seals, header_end = self._seal_bytes, self._seal_bytes + self.frame.header_bytes
        for is_first in (True, False):  # what was damaged on the way is right the second time
            if not is_first:
                self._begun[0] = self._request_first()
            piece = self._remote.finish_read(self._begun[0], self._waiting)
            if piece is None:
                raise CorruptKVError(
                    f"the remote has no KV {self.key[:12]}…; the chunk counts as a miss"
                )
            if piece.object_bytes == seals + self.frame.file_bytes:
                header = bytes(piece.data[seals:header_end])
                found = self.frame.checksums(header, self.namespace, self.key)
                if found is not None:
                    self._seals, self.checksums = bytes(piece.data[:seals]), found
                    self.first_piece = piece
                    return
        raise self._remote.doubt(self.namespace, self.key, "its header or size is not what was put")

    def _take(self, layer: int) -> memoryview:
        """The verified bytes of a layer. Raises :class:`CorruptKVError`, :class:`StoreUnavailableError`."""
        if layer not in self._verified:
            self.read_header()
            self._verified[layer] = self._right(layer)
        return self._verified[layer]

    def _right(self, layer: int) -> memoryview:
        """The bytes of a layer, requested and verified, twice if they are wrong."""
        number = next(at for at, layers in enumerate(self.requests) if layer in layers)
        for ahead in range(number, min(number + AHEAD, len(self.requests))):
            self._request(ahead)
        first = self.requests[number].start if number else None
        data = self._received(self._begun[number], layer, first)
        if not self._is_right(layer, data):  # perhaps damaged on the way
            data = self._received(self._read(range(layer, layer + 1)), layer, layer)
            if not self._is_right(layer, data):
                raise self._remote.doubt(
                    self.namespace,
                    self.key,
                    f"layer {layer}: the bytes are not those that were put",
                )
        self._remote.note_right(len(data))
        return data

    def _is_right(self, layer: int, data: memoryview) -> bool:
        begin, end = self.frame.offsets[layer : layer + 2]
        is_sum = (
            len(data) == end - begin
            and payload.layer_checksum(self.key, layer, data) == self.checksums[layer]
        )
        seals, place = self._remote.seals, (self.namespace, self.key, layer)
        return is_sum and seals.fits(self._seals, *place, data)

    def _request(self, number: int) -> None:
        if number not in self._begun:
            self._begun[number] = self._read(self.requests[number])

    def _request_first(self) -> Future[ObjectBytes | None]:
        end = self._seal_bytes + self.frame.offsets[self.requests[0].stop]
        return self._remote.objects.read(name_of(self.namespace, self.key), 0, end)

    def _read(self, layers: range) -> Future[ObjectBytes | None]:
        begin, end = self.frame.offsets[layers.start], self.frame.offsets[layers.stop]
        name = name_of(self.namespace, self.key)
        return self._remote.objects.read_range(name, self._seal_bytes + begin, end - begin)

    def _received(
        self, begun: Future[ObjectBytes | None], layer: int, first: int | None
    ) -> memoryview:
        """The bytes of a layer from a request that begins with ``first``, or with the object."""
        piece = self._remote.finish_read(begun, self._waiting)
        offsets = self.frame.offsets
        before = -self._seal_bytes if first is None else offsets[first]
        data = memoryview(b"") if piece is None else piece.data
        return data[offsets[layer] - before : offsets[layer + 1] - before]

    def release(self) -> None:
        """Cancel what is under way and free the layers."""
        for request in self._begun.values():
            request.cancel()
        self._begun.clear()
        self._verified.clear()


def expected_load_s(readers: Sequence[RemoteReader]) -> float:
    """Seconds until the rest of these chunks is here, going by their first requests.

    Infinity if one of those is not here. They tell the latency of a request and the time of a byte if many
    share the line; of the rest as many requests run at a time.
    """
    if not all(reader.checksums for reader in readers):
        return math.inf
    firsts = [reader.first_piece for reader in readers]
    in_flight = readers[0].in_flight
    latency_s = min(first.latency_s for first in firsts)
    arrived_at = max(first.arrived_at for first in firsts)
    seconds = arrived_at - min(reader.requested_at for reader in readers)
    bytes_s = max(0.0, seconds - latency_s * math.ceil(len(firsts) / in_flight))
    read_bytes = sum(len(first.data) for first in firsts)
    rest_bytes = sum(reader.frame.file_bytes for reader in readers) - read_bytes
    rest = sum(len(reader.requests) - 1 for reader in readers)
    turns = math.ceil(rest / min(in_flight, AHEAD * len(readers)))
    return bytes_s * max(0, rest_bytes) / read_bytes + latency_s * turns


def request_ahead(readers: Iterable[RemoteReader]) -> None:
    """Request the layers that are read next, those of all chunks together."""
    given = list(readers)
    for number in range(AHEAD):
        for reader in given:
            if number < len(reader.requests):
                reader.request(number)


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
        self._doubtful: set[tuple[str, str]] = set()
        self._wrong_in_a_row = 0
        self._is_checked = False
        try:
            self._root.check()
            self._is_checked = True
        except (RemoteRefusedError, InvalidInputError):
            self.objects.close()
            raise
        except StoreUnavailableError as exc:
            self._pause.begin(str(exc))

    def check(self) -> None:
        """Look once whether it is a remote of this kind; again if it did not answer.

        Raises as :meth:`RemoteRoot.check`; one that does not answer is then left alone for a while.
        """
        if not self._is_checked:
            try:
                self._root.check()
            except StoreUnavailableError as exc:
                self._pause.begin(str(exc))
                raise
            self._is_checked = True

    @property
    def trouble(self) -> str:
        """Why the remote is not asked now; empty if it is."""
        return self._pause.why

    # -- reading ---------------------------------------------------------------------------------

    def open_all(
        self,
        wanted: Sequence[WantedKV],
        layout: KVLayout,
        first_s: Callable[[], float] | None = None,
    ) -> list[RemoteReader | None]:
        """Readers of the chunks of one prompt, which are requested at once and share its time to wait.

        ``None`` for what is absent or in doubt, and if the remote does not answer. ``first_s()`` are the
        seconds that the prompt waits for the first requests. A reader whose first request takes longer has no
        checksums yet, and its object may turn out to be absent or wrong.
        """
        readers = self._opened(wanted, layout, first_s)
        self.counters.add("hits", sum(bool(reader and reader.checksums) for reader in readers))
        return readers

    def open(self, namespace: str, key: str, layout: KVLayout, tokens: int) -> RemoteReader | None:
        """:meth:`open_all` of one entry."""
        return self.open_all([WantedKV(namespace, key, tokens)], layout)[0]

    def peek(self, namespace: str, key: str, layout: KVLayout, tokens: int) -> RemoteReader | None:
        """:meth:`open`, not counted as a hit."""
        return self._opened([WantedKV(namespace, key, tokens)], layout)[0]

    def _opened(
        self,
        wanted: Sequence[WantedKV],
        layout: KVLayout,
        first_s: Callable[[], float] | None = None,
    ) -> list[RemoteReader | None]:
        self.check_process()
        waiting = Waiting(self.timeout_s)
        readers: list[RemoteReader | None] = []
        try:
            for namespace, key, tokens in wanted:
                require_name(namespace)
                require_name(key)
                is_asked = not (self._pause.why or self.is_doubtful(namespace, key))
                entry = namespace, key, layout, tokens
                readers.append(RemoteReader(self, *entry, waiting) if is_asked else None)
            if first_s is not None and any(readers):
                waiting.limit_first(first_s())
            for at, reader in enumerate(readers):
                if reader is not None and not reader.is_late():
                    try:
                        reader.read_header()
                    except (StoreUnavailableError, CorruptKVError):
                        readers[at] = None
        except BaseException:
            for reader in readers:
                if reader is not None:
                    reader.release()
            raise
        return readers

    def finish_read(
        self, begun: Future[ObjectBytes | None], waiting: Waiting
    ) -> ObjectBytes | None:
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

    def is_doubtful(self, namespace: str, key: str) -> bool:
        """Whether its object turned out to be wrong and was not put anew."""
        return (namespace, key) in self._doubtful

    def forget_doubt(self, namespace: str, key: str) -> None:
        """Read an object again that was wrong."""
        self._doubtful.discard((namespace, key))

    def found(self, namespace: str, keys: Iterable[str], durable: bool = False) -> set[str]:
        """Those of ``keys`` that have an object, asked for many at once; fewer if it does not answer.

        Their bytes are verified when they are read. ``durable``: they survive a power cut now.
        """
        wanted = [key for key in keys if not self.is_doubtful(namespace, key)]
        found: set[str] = set()
        for at in range(0, len(wanted), ASKED_TOGETHER):
            if self._pause.why:
                break
            found |= self._found_together(namespace, wanted[at : at + ASKED_TOGETHER])
        try:
            for key in found if durable else ():  # another machine may just have written it
                self.objects.sync(name_of(namespace, key))
        except StoreUnavailableError as exc:
            self._pause.begin(str(exc))
            return set()
        return found

    def _found_together(self, namespace: str, keys: Sequence[str]) -> set[str]:
        begun = {key: self.objects.read(name_of(namespace, key), 0, 1) for key in keys}
        found, waiting = set(), Waiting(self.timeout_s)
        try:
            for key, request in begun.items():
                piece = self.finish_read(request, waiting)
                if piece is not None and piece.object_bytes:
                    found.add(key)
        except StoreUnavailableError:
            for request in begun.values():
                request.cancel()
        return found

    def keys(self, namespace: str) -> Iterator[str]:
        """Keys of one namespace; none if the remote does not answer."""
        if self._pause.why:
            return
        try:
            for each in self.objects.listing(f"kv/{namespace}/"):
                if key := entry_of(each.name)[1]:
                    yield key
        except StoreUnavailableError as exc:
            self._pause.begin(str(exc))

    def durable(self, namespace: str, keys: frozenset[str]) -> set[str]:
        """Those of ``keys`` that are there. Raises :class:`StoreUnavailableError` if it does not answer."""
        names = {
            entry_of(each.name)[1]: each.name
            for each in self.objects.listing(f"kv/{namespace}/")
            if each.size_bytes
        }
        found = keys & names.keys()
        for key in found:  # its writer may be about to sync it
            self.objects.sync(names[key])
        return set(found)

    def claim(self, namespace: str, keys: Sequence[str]) -> set[str]:
        """Keep KV from being collected; returns those of ``keys`` that are no longer there.

        Raises :class:`StoreUnavailableError`, also while a collection runs.
        """
        claims.claim(self._root, namespace, keys)
        found = self.found(namespace, keys)
        if self._pause.why:
            raise StoreUnavailableError(self._pause.why)
        return set(keys) - found

    # -- writing ---------------------------------------------------------------------------------

    def put(self, header: payload.PayloadHeader, read: payload.Read) -> None:
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
            object_bytes = self.objects.head(name)
            if object_bytes == seal_bytes + header.file_bytes and not is_doubtful:
                self.objects.sync(name)  # another machine may just have written it
                return
            data = self._sealed(header, read)
            self.objects.put(name, data, if_absent=object_bytes is None and not is_doubtful)
        except (StoreUnavailableError, InvalidInputError) as exc:
            self.counters.add("failures")
            self._write_pause.begin(str(exc))
            raise
        self._write_pause.relax()
        self._doubtful.discard(entry)
        self.counters.add("puts")

    def _sealed(self, header: payload.PayloadHeader, read: payload.Read) -> bytearray:
        """The object of a payload: seals, header, layers."""
        body = bytearray(header.encoded)
        for piece in payload.verified_pieces(header, read):
            body += piece
        seals, view = bytearray(), memoryview(body)
        offsets = header.frame.offsets
        for layer in range(len(header.checksums)):
            sealing = self.seals.sealing(header.namespace, header.key, layer)
            if sealing is not None:
                sealing.update(view[offsets[layer] : offsets[layer + 1]])
                seals += sealing.digest()
        return seals + view

    def close(self) -> None:
        """End all requests. Idempotent."""
        self._root.close()
