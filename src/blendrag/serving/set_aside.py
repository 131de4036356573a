"""KV of a request that waits, out of the memory that others need."""

from __future__ import annotations

from collections.abc import Sequence
from tempfile import TemporaryFile

import torch


class SetAside:
    """Copies of the KV of each layer, ``[2, Hkv, n, D]``: a GPU's in the memory of the host, others in a
    temporary file without a name, which is gone with this object or its process."""

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        self.tokens = layers[0].shape[2]
        self._copies: list[torch.Tensor] = []
        self._file = None
        if layers[0].device.type != "cpu":
            self._copies = [layer.to("cpu") for layer in layers]
            return
        self._file = TemporaryFile()  # noqa: SIM115 - closed with this object
        for layer in layers:
            self._file.write(_bytes_of(layer.contiguous()))

    def restore(self, layers: Sequence[torch.Tensor]) -> None:
        """Copy all to ``layers``, of the same shapes."""
        if self._file is None:
            for layer, copy in zip(layers, self._copies, strict=True):
                layer.copy_(copy)
            return
        self._file.seek(0)
        for layer in layers:
            read = torch.empty_like(layer, memory_format=torch.contiguous_format)
            if self._file.readinto(_bytes_of(read)) != read.nbytes:
                raise OSError("a temporary file is shorter than what was written to it")
            layer.copy_(read)
        self._file.close()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy().data).cast("B")
