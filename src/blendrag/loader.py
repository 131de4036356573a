"""Brings layer i+1 of all chunks into place while layer i computes (CacheBlend §5, §6).

Owns one thread per request that only reads, verifies and decodes: torch operators there, on more than
a block at a time, would start a second OpenMP team. Layers land straight in the prompt's KV buffers;
nothing but encoded bytes is staged on a CPU. Does not know which tokens are recomputed, nor how keys
are re-positioned.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from blendrag.errors import CorruptKVError
from blendrag.store.base import KVReader
from blendrag.timeline import LOAD, Timeline, noted


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

    ``buffers[i]`` is layer i's ``[2, Hkv, N, D]``; ``wanted[i]`` the spans needed there. On a CPU the
    bytes are read in place; elsewhere into pinned memory and copied in :meth:`synchronize`.
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
        self._copies: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in buffers]
        self._work = [
            [(span, self._target(layer, buffer, span)) for span in spans]
            for layer, (buffer, spans) in enumerate(zip(buffers, wanted, strict=True))
        ]
        self._thread = threading.Thread(target=self._run, name="blendrag-loader", daemon=True)

    def _target(self, layer: int, buffer: torch.Tensor, span: LoadedSpan) -> torch.Tensor:
        """Where the reader writes: the buffer itself, or a staging tensor copied afterwards."""
        view = buffer[:, :, span.start : span.end]  # [2, Hkv, n, D]
        whole = span.tokens == span.reader.tokens
        if buffer.device.type == "cpu" and whole:
            return view
        shape = (2, buffer.shape[1], span.reader.tokens, buffer.shape[3])
        pinned = buffer.device.type == "cuda"
        staging = torch.empty(shape, dtype=buffer.dtype, pin_memory=pinned)
        self._copies[layer].append((view, staging[:, :, : span.tokens]))
        return staging

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            for layer, work in enumerate(self._work):
                with noted(self._timeline if work else None, LOAD, layer):
                    for span, target in work:
                        if self._stop.is_set():
                            return
                        self.fetch_kv(span, layer, target)
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
        """Block until ``layer`` is in place; raise what the reading thread met."""
        self._ready[layer].wait()
        if self._failure is not None:
            raise self._failure
        copies, self._copies[layer] = self._copies[layer], []
        for view, staging in copies:
            view.copy_(staging, non_blocking=True)

    def close(self) -> None:
        """Stop reading; blocks until the thread has left the buffers alone. Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
