"""Host memory for KV on its way from a reader to where the model computes (CacheBlend §5, §6).

Needed if a reader cannot write into the prompt's buffers: on another device, or for a chunk that is cut.
The reading thread fills one slot while the other is copied out, and waits if both are full. A query
then takes two layers of memory on top of the prompt's own, however deep the model.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch

#: Each with room for one layer.
SLOTS = 2


class Transfer(NamedTuple):
    """A tensor to be staged, and where some of its tokens go."""

    target: torch.Tensor
    """``[2, Hkv, n, D]`` of the prompt's buffer."""
    shape: tuple[int, ...]
    """``[2, Hkv, T, D]`` with ``T >= first + n``: what the reader writes, in the target's dtype."""
    first: int = 0
    """The token of ``shape`` that the target begins with."""

    @property
    def size_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.target.element_size()

    def place(self, staged: torch.Tensor) -> None:
        """Copy the tokens that the target takes."""
        self.target.copy_(staged[:, :, self.first : self.first + self.target.shape[2]])


class StagingRing(ABC):
    """The transfers of every layer, in ascending order. One thread fills, one receives."""

    pinned = False

    def __init__(self, transfers: Sequence[Sequence[Transfer]]) -> None:
        self._transfers = transfers
        self._slot_bytes = max((sum(t.size_bytes for t in each) for each in transfers), default=0)
        self._slots: list[torch.Tensor] = []
        self._used = 0
        self._closed = False

    def start(self) -> None:  # noqa: B027 - only a device has something to wait for
        """Called by the receiving thread before the first slot is filled."""

    def fill(self, layer: int) -> list[torch.Tensor]:
        """Where the reader writes the layer's transfers, once a slot is free; empty if the ring is closed."""
        if not self._transfers[layer]:
            return []
        at = self._used % SLOTS
        self._used += 1
        if at == len(self._slots):
            slot = torch.empty(self._slot_bytes, dtype=torch.uint8, pin_memory=self.pinned)
            self._slots.append(slot)
        else:
            self._wait_until_free(at)
        return [] if self._closed else self._parts(self._slots[at], layer)

    def _parts(self, slot: torch.Tensor, layer: int) -> list[torch.Tensor]:
        """The layer's transfers in ``slot``, one after another."""
        parts, begin = [], 0
        for transfer in self._transfers[layer]:
            part = slot[begin : begin + transfer.size_bytes]
            parts.append(part.view(transfer.target.dtype).view(transfer.shape))
            begin += transfer.size_bytes
        return parts

    @abstractmethod
    def _wait_until_free(self, slot: int) -> None:
        """Block until the last content of ``slot`` is copied out, or the ring is closed."""

    @abstractmethod
    def send(self, layer: int, filled: Sequence[torch.Tensor]) -> None:
        """Hand over what :meth:`fill` returned for ``layer``, now filled."""

    @abstractmethod
    def receive(self, layer: int) -> None:
        """Put ``layer``, which was sent, in place for everything the calling thread does next."""

    def has_arrived(self, layer: int) -> bool:
        """Whether ``layer``, which was sent, can be received without waiting."""
        return True

    def stop(self) -> None:
        """Wake a thread that waits for a slot."""
        self._closed = True

    def close(self) -> None:
        """Leave the targets alone and free the slots; the filling thread has ended. Idempotent."""
        self._slots, self._transfers = [], ()


class HostRing(StagingRing):
    """The receiving thread copies (see :mod:`blendrag.fusor.loader`)."""

    def __init__(self, transfers: Sequence[Sequence[Transfer]]) -> None:
        super().__init__(transfers)
        self._sent: list[Sequence[torch.Tensor]] = [()] * len(transfers)
        self._free = threading.Semaphore(0)
        """Slots copied out."""

    def _wait_until_free(self, slot: int) -> None:
        self._free.acquire()

    def send(self, layer: int, filled: Sequence[torch.Tensor]) -> None:
        self._sent[layer] = filled

    def receive(self, layer: int) -> None:
        filled, self._sent[layer] = self._sent[layer], ()
        if not filled:
            return
        for transfer, staged in zip(self._transfers[layer], filled, strict=True):
            transfer.place(staged)
        self._free.release()

    def stop(self) -> None:
        super().stop()
        self._free.release()

    def close(self) -> None:
        self._sent = [()] * len(self._sent)
        super().close()


class CudaRing(StagingRing):
    """Pinned slots, copied on a separate stream as soon as they are full.

    Neither side waits for the whole device: the receiving thread's stream waits for the layer's event, and
    the filling thread for the event of the copy that last used the slot.
    """

    pinned = True

    def __init__(self, transfers: Sequence[Sequence[Transfer]], device: torch.device) -> None:
        super().__init__(transfers)
        self._device = device
        self._stream = torch.cuda.Stream(device)
        # blocking: a waiting thread sleeps instead of spinning next to the one that queues kernels
        self._arrived = [torch.cuda.Event(blocking=True) for _ in transfers]
        self._last: dict[int, int] = {}
        """Slot → the layer that was last sent from it."""

    def start(self) -> None:
        # Work queued before may still read the targets' memory.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def _wait_until_free(self, slot: int) -> None:
        self._arrived[self._last[slot]].synchronize()

    def send(self, layer: int, filled: Sequence[torch.Tensor]) -> None:
        if not filled:
            return
        at, transfers = (self._used - 1) % SLOTS, self._transfers[layer]
        with torch.cuda.stream(self._stream):
            # Whole to the device and from there to its places: the only copy of this shape that is
            # asynchronous and needs no second one in host memory.
            used = self._slots[at][: sum(transfer.size_bytes for transfer in transfers)]
            arrived = self._parts(used.to(self._device, non_blocking=True), layer)
            for transfer, part in zip(transfers, arrived, strict=True):
                transfer.place(part)
            self._arrived[layer].record(self._stream)
        self._last[at] = layer

    def has_arrived(self, layer: int) -> bool:
        return not self._transfers[layer] or self._arrived[layer].query()

    def receive(self, layer: int) -> None:
        if self._transfers[layer]:
            torch.cuda.current_stream(self._device).wait_event(self._arrived[layer])

    def close(self) -> None:
        # The targets' memory must not be reused before the last copy. torch reuses pinned memory only after
        # the copies queued from it.
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        super().close()


def staging_ring(transfers: Sequence[Sequence[Transfer]], device: torch.device) -> StagingRing:
    return CudaRing(transfers, device) if device.type == "cuda" else HostRing(transfers)
