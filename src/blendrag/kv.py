"""What a chunk's KV cache is: its layout, and the tensors themselves.

Owns the shapes. Does not know about files, models or positions. Keys are stored as the model
computed them behind the corpus's prefix, that is rotated to ``[prefix_tokens, prefix_tokens + T)``;
moving them is the business of :mod:`blendrag.positions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

#: Stored dtypes by the name that goes into keys and headers.
DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` → ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class LayerShape:
    """Heads and width of one layer's K (and V, which has the same)."""

    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class KVLayout:
    """Shapes and dtype of a model's KV, all layers; the same for every chunk of a namespace."""

    layers: tuple[LayerShape, ...]
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def item_bytes(self) -> int:
        return self.torch_dtype.itemsize

    def layer_shape(self, layer: int, tokens: int) -> tuple[int, int, int, int]:
        """``[2, Hkv, T, D]`` of one layer."""
        shape = self.layers[layer]
        return (2, shape.kv_heads, tokens, shape.head_dim)

    def layer_bytes(self, layer: int, tokens: int) -> int:
        shape = self.layers[layer]
        return 2 * shape.kv_heads * tokens * shape.head_dim * self.item_bytes

    def chunk_bytes(self, tokens: int) -> int:
        """Bytes of a chunk's KV over all layers, headers excluded."""
        return sum(self.layer_bytes(i, tokens) for i in range(len(self.layers)))


@dataclass(frozen=True)
class ChunkKV:
    """One chunk's KV: per layer a contiguous CPU tensor ``[2, Hkv, T, D]``, keys first."""

    layout: KVLayout
    tokens: int
    layers: Sequence[torch.Tensor]

    def __post_init__(self) -> None:
        if len(self.layers) != len(self.layout.layers):
            raise ValueError(f"{len(self.layers)} layers, expected {len(self.layout.layers)}")
        for i, layer in enumerate(self.layers):
            expected = self.layout.layer_shape(i, self.tokens)
            if tuple(layer.shape) != expected or layer.dtype != self.layout.torch_dtype:
                raise ValueError(
                    f"layer {i} is {tuple(layer.shape)} {layer.dtype}, "
                    f"expected {expected} {self.layout.torch_dtype}"
                )

    @property
    def size_bytes(self) -> int:
        return self.layout.chunk_bytes(self.tokens)
