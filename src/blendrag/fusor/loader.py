"""Brings stored KV of layer i+1 into place while layer i computes (CacheBlend §5, §6).

:class:`LayerLoader` has one thread per prompt, with more if the model is on a GPU. They only read, verify and
decode: torch operators there would start a second OpenMP team. :class:`StoredKV` waits for a layer on the
computing thread and rotates its keys.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import cast

import torch

from blendrag import tracing
from blendrag.errors import CorruptKVError, StoreUnavailableError, starting_thread
from blendrag.fusor.staging import Transfer, staging_ring
from blendrag.metrics import LOAD, REPOSITION, WAIT, Timeline, noted
from blendrag.model.positions import Repositioner
from blendrag.store.base import KVReader, ResidentReader
from blendrag.store.kv import ChunkKV, LayerShape

#: Threads that read the chunks of a layer, if the model computes elsewhere: one copies and verifies far
#: slower than a GPU takes KV, and more hold up the thread that queues kernels, as they share the interpreter.
#: On a CPU they would take the cores of the model.
READERS = 3


@dataclass(frozen=True)
class LoadedSpan:
    """A stretch of the prompt whose KV is stored; shorter than ``reader.tokens`` if the chunk is cut."""

    start: int
    end: int
    reader: KVReader
    stored_position: int
    """Position the first token had when it was encoded (the length of its prefix, if ``first`` is 0)."""
    exact: bool
    """KV is what a full prefill would compute here: its tokens are not candidates for recompute."""
    first: int = 0
    """The reader's token that the span begins with."""

    @property
    def tokens(self) -> int:
        return self.end - self.start

    @property
    def offset(self) -> int:
        """Δ by which stored keys must be rotated."""
        return self.start - self.stored_position


class HeldKV:
    """A reader over KV in memory, as the store would return it."""

    key = "0" * 64
    tier = "memory"

    def __init__(self, kv: ChunkKV) -> None:
        self.tokens = kv.tokens
        self._layers = kv.layers

    @torch.inference_mode()
    def read_layer(self, layer: int, out: torch.Tensor) -> None:
        out.copy_(self._layers[layer])

    def is_cached(self) -> bool:
        return True

    def close(self) -> None:
        """Nothing to release."""


class SpanCorruptError(CorruptKVError):
    """A span's bytes failed verification while the query ran, or a remote did not give them in time; nothing
    was computed from them."""

    def __init__(self, span: LoadedSpan, cause: Exception) -> None:
        self.span = span
        super().__init__(str(cause))


@contextmanager
def reading(span: LoadedSpan) -> Iterator[None]:
    """Turns errors of reading ``span`` into :class:`SpanCorruptError`."""
    try:
        yield
    except (CorruptKVError, StoreUnavailableError) as exc:
        raise SpanCorruptError(span, exc) from exc


class LayerLoader:
    """Reads the spans layer by layer in a background thread; the paper's ``fetch_kv``.

    ``buffers[i]`` is layer i's ``[2, Hkv, N, D]``; ``per_layer[i]`` the spans to read there.
    """

    def __init__(
        self,
        buffers: Sequence[torch.Tensor],
        per_layer: Sequence[Sequence[LoadedSpan]],
        timeline: Timeline | None = None,
    ) -> None:
        self._timeline = timeline
        self._trace_context = tracing.current()
        self.load_s = 0.0
        """Seconds spent reading and verifying so far."""
        self._failure: BaseException | None = None
        self._stop = threading.Event()
        self._ready = [threading.Event() for _ in buffers]
        self._in_place = 0
        """Layers that :meth:`synchronize` has seen in place."""
        placed = [
            [(span, buffer[:, :, span.start : span.end]) for span in spans]
            for buffer, spans in zip(buffers, per_layer, strict=True)
        ]
        # asked once for each span: it looks at every attribute
        every = {id(span): span for span in chain(*per_layer)}
        are = {at: isinstance(span.reader, ResidentReader) for at, span in every.items()}
        self._work = [[one for one in layer if not are[id(one[0])]] for layer in placed]
        self._resident = [[one for one in layer if are[id(one[0])]] for layer in placed]
        transfers = [
            [
                Transfer(view, (*view.shape[:2], span.reader.tokens, view.shape[3]), span.first)
                for span, view in work
                if not _reads_in_place(span, view)
            ]
            for work in self._work
        ]
        self._ring = staging_ring(transfers, buffers[0].device)
        most = max(map(len, self._work), default=1)
        self._readers = max(1, min(READERS, most)) if buffers[0].device.type != "cpu" else 1
        self._thread = threading.Thread(target=self._run, name="blendrag-loader", daemon=True)

    def start(self) -> None:
        """Begin to read. Raises :class:`NoThreadError`."""
        self._ring.start()
        with starting_thread():
            self._thread.start()

    def _run(self) -> None:
        try:
            with (
                tracing.span("load", self._loaded, self._trace_context),
                ThreadPoolExecutor(self._readers, "blendrag-reader") as readers,
            ):
                self._read_all(readers)
        except BaseException as exc:
            self._failure = exc
        finally:
            for event in self._ready:
                event.set()

    def _read_all(self, readers: ThreadPoolExecutor) -> None:
        for layer, work in enumerate(self._work):
            slots = self._ring.fill(layer)
            if self._stop.is_set():  # the ring may be closed, and gave no slots
                return
            staged = iter(slots)
            began = time.perf_counter()
            with noted(self._timeline if work else None, LOAD, layer):
                targets = [
                    (span, view if _reads_in_place(span, view) else next(staged))
                    for span, view in work
                ]
                own, *others = (targets[i :: self._readers] for i in range(self._readers))
                with starting_thread():
                    jobs = [readers.submit(self._fetch_all, layer, each) for each in others]
                self._fetch_all(layer, own)
                for job in jobs:
                    job.result()
                if self._stop.is_set():
                    return
            self.load_s += time.perf_counter() - began
            self._ring.send(layer, slots)
            self._ready[layer].set()

    def _loaded(self) -> dict[str, int]:
        spans = {id(span): span for work in self._work for span, _ in work}
        views = [view for work in self._work for _, view in work]
        return {
            "blendrag.tokens.loaded": sum(span.tokens for span in spans.values()),
            "blendrag.bytes.loaded": sum(view.numel() * view.itemsize for view in views),
        }

    def _fetch_all(self, layer: int, targets: Sequence[tuple[LoadedSpan, torch.Tensor]]) -> None:
        for span, target in targets:
            if self._stop.is_set():
                return
            self.fetch_kv(span, layer, target)

    def fetch_kv(self, span: LoadedSpan, layer: int, target: torch.Tensor) -> None:
        """Read and verify one span's KV."""
        with reading(span):
            span.reader.read_layer(layer, target)

    def synchronize(self, layer: int) -> None:
        """Block until ``layer`` and those before it are in place; raise what the reading thread raised.

        On a GPU the current stream waits instead of the thread.
        """
        while self._in_place <= layer:
            self._ready[self._in_place].wait()
            if self._failure is not None:
                raise self._failure
            self._ring.receive(self._in_place)
            for span, view in self._resident[self._in_place]:
                cast(ResidentReader, span.reader).copy_layer(self._in_place, view)
            self._in_place += 1

    def is_ready(self, layer: int) -> bool:
        """Whether :meth:`synchronize` would return without waiting."""
        ready = self._ready[layer].is_set() and self._failure is None
        return ready and self._ring.has_arrived(layer)

    def close(self) -> None:
        """Stop reading; blocks until the thread has left the buffers alone. Idempotent."""
        self._stop.set()
        self._ring.stop()
        if self._thread.is_alive():
            self._thread.join()
        self._failure = None  # its frames hold this loader
        self._ring.close()
        self._work = self._resident = []  # views of the prompt's buffers


def _reads_in_place(span: LoadedSpan, view: torch.Tensor) -> bool:
    return view.device.type == "cpu" and span.tokens == span.reader.tokens


class StoredKV:
    """Stored KV of one prompt, placed layer by layer: loaded, its keys rotated to their prompt positions."""

    def __init__(
        self,
        spans: Sequence[LoadedSpan],
        groups: Sequence[torch.Tensor],
        shapes: Sequence[LayerShape],
        repositioner: Repositioner,
        all_enter: bool,
        timeline: Timeline | None = None,
    ) -> None:
        """``groups`` are ``[layers, 2, Hkv, N, D]`` of consecutive layers, ``shapes`` those of all layers.
        ``all_enter``: layer 0 computes every token of blended chunks, so only exact chunks are loaded
        there."""
        self._timeline = timeline
        self._shapes = shapes
        self._all_enter = all_enter
        self._placed = 0
        """Number of layers in place."""
        self._repositioner = repositioner
        self._where = [(group, at) for group in groups for at in range(len(group))]
        """Each layer's group and index in it."""
        self._moved: slice | None = None
        """From the first moved token to the last. Tokens between spans rotate by 0, and are computed."""
        moved = [span for span in spans if span.offset]
        if moved:
            self._moved = slice(moved[0].start, moved[-1].end)
            offsets = torch.zeros(moved[-1].end, dtype=torch.long)
            for span in moved:
                offsets[span.start : span.end] = span.offset
            self._tables = repositioner.tables(offsets[self._moved].to(groups[0].device))
        exact = [span for span in spans if span.exact]
        per_layer = [exact if self._skips(layer) else spans for layer in range(len(self._where))]
        self.loader = LayerLoader([group[at] for group, at in self._where], per_layer, timeline)

    def place(self, layer: int) -> None:
        """Block until stored KV of ``layer`` is in place and rotated; raises what reading it raised.

        Following layers that are ready and rotate alike are rotated in the same operation.
        """
        while self._placed <= layer:
            first = end = self._placed
            while end == first or (self._alike(first, end) and self.loader.is_ready(end)):
                with noted(self._timeline, WAIT, end):
                    self.loader.synchronize(end)
                end += 1
            with noted(self._timeline, REPOSITION, first):
                if self._moved is not None and not self._skips(first):
                    group, at = self._where[first]
                    moved = group[at : at + end - first, :, :, self._moved]
                    both = self._shapes[first].split(moved, dim=1)  # [layers, Hkv, n, D]
                    keys = both[self._repositioner.part(first)]
                    self._repositioner.rotate_(keys, first, self._tables)
            self._placed = end

    def close(self) -> None:
        """Stop reading, and hold the prompt's buffers no longer. Idempotent."""
        self.loader.close()
        self._where = []

    def _skips(self, layer: int) -> bool:
        return layer == 0 and self._all_enter

    def _alike(self, one: int, other: int) -> bool:
        """Whether both layers exist, are in one group and rotated alike."""
        if other >= len(self._where) or self._where[one][0] is not self._where[other][0]:
            return False
        of = self._repositioner
        alike = {(self._skips(i), of.kinds[i], of.table_names[i]) for i in (one, other)}
        return len(alike) == 1
