"""Brings layer i+1 of all chunks into place while layer i computes (CacheBlend §5, §6).

Owns one thread per request that only reads, verifies and decodes: torch operators there, on more than
a block at a time, would start a second OpenMP team. Layers land straight in the prompt's KV buffers
where a reader can write there. Does not know which tokens are recomputed, nor how keys
are re-positioned.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from blendrag.errors import CorruptKVError, starting_thread
from blendrag.fusor.staging import Transfer, staging_ring
from blendrag.metrics import LOAD, Timeline, noted
from blendrag.store.base import KVReader


@dataclass(frozen=True)
class LoadedSpan:
    """A stretch of the prompt whose KV comes from the store.

    ``end - start`` may be less than ``reader.tokens``: a chunk cut off at its tail lends its head.
    """

    start: int
    end: int
    reader: KVReader
    stored_position: int
    """Position the first token had when it was encoded (the length of its prefix)."""
    exact: bool
    """KV is what a full prefill would compute here: no candidate for recompute."""

    @property
    def tokens(self) -> int:
        return self.end - self.start

    @property
    def offset(self) -> int:
        """Δ by which stored keys must be rotated."""
        return self.start - self.stored_position


class SpanCorruptError(CorruptKVError):
    """A span's bytes failed verification while the query ran; nothing was computed from them."""

    def __init__(self, span: LoadedSpan, cause: Exception) -> None:
        self.span = span
        super().__init__(str(cause))


class LayerLoader:
    """Reads the spans layer by layer in a background thread; the paper's ``fetch_kv``.

    ``buffers[i]`` is layer i's ``[2, Hkv, N, D]``; ``wanted[i]`` the spans needed there. On a CPU whole
    chunks are read in place; all else goes through a :class:`StagingRing` of two layers.
    """

    def __init__(
        self,
        buffers: Sequence[torch.Tensor],
        wanted: Sequence[Sequence[LoadedSpan]],
        timeline: Timeline | None = None,
    ) -> None:
        self._timeline = timeline
        self.load_s = 0.0
        """Seconds spent reading and verifying so far."""
        self._failure: BaseException | None = None
        self._stop = threading.Event()
        self._ready = [threading.Event() for _ in buffers]
        self._in_place = 0
        """Layers that :meth:`synchronize` has seen in place, from the first on."""
        self._work = [
            [(span, buffer[:, :, span.start : span.end]) for span in spans]
            for buffer, spans in zip(buffers, wanted, strict=True)
        ]
        transfers = [
            [_transfer(span, view) for span, view in work if not _reads_in_place(span, view)]
            for work in self._work
        ]
        self._ring = staging_ring(transfers, buffers[0].device)
        self._thread = threading.Thread(target=self._run, name="blendrag-loader", daemon=True)

    def start(self) -> None:
        """Begin to read. Raises :class:`NoThreadError`."""
        self._ring.start()
        with starting_thread():
            self._thread.start()

    def _run(self) -> None:
        try:
            for layer, work in enumerate(self._work):
                slots = self._ring.fill(layer)
                staged = iter(slots)
                with noted(self._timeline if work else None, LOAD, layer):
                    for span, view in work:
                        if self._stop.is_set():
                            return
                        target = view if _reads_in_place(span, view) else next(staged)
                        self.fetch_kv(span, layer, target)
                self._ring.send(layer, slots)
                self._ready[layer].set()
        except BaseException as exc:
            self._failure = exc
        finally:
            for event in self._ready:
                event.set()

    def fetch_kv(self, span: LoadedSpan, layer: int, target: torch.Tensor) -> None:
        """Read and verify one span's KV of ``layer`` into ``target``."""
        began = time.perf_counter()
        try:
            span.reader.read_layer(layer, target)
        except CorruptKVError as exc:
            raise SpanCorruptError(span, exc) from exc
        finally:
            self.load_s += time.perf_counter() - began

    def synchronize(self, layer: int) -> None:
        """Block until ``layer`` and those before it are in place; raise what the reading thread met.

        On a GPU it is the stream that waits, for what is queued on it from now on.
        """
        while self._in_place <= layer:
            self._ready[self._in_place].wait()
            if self._failure is not None:
                raise self._failure
            self._ring.receive(self._in_place)
            self._in_place += 1

    def is_there(self, layer: int) -> bool:
        """Whether ``layer`` is in place, so that :meth:`synchronize` waits for nothing."""
        ready = self._ready[layer].is_set() and self._failure is None
        return ready and self._ring.has_arrived(layer)

    def close(self) -> None:
        """Stop reading; blocks until the thread has left the buffers alone. Idempotent."""
        self._stop.set()
        self._ring.stop()
        if self._thread.is_alive():
            self._thread.join()
        self._failure = None  # its frames hold this loader, and with it the prompt's buffers
        self._ring.close()


def _reads_in_place(span: LoadedSpan, view: torch.Tensor) -> bool:
    return view.device.type == "cpu" and span.tokens == span.reader.tokens


def _transfer(span: LoadedSpan, view: torch.Tensor) -> Transfer:
    return Transfer(view, (*view.shape[:2], span.reader.tokens, view.shape[3]))
