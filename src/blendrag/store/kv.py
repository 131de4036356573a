"""What a chunk's KV cache is: its layout, and the tensors themselves.

Owns the shapes. Does not know about files, models or positions. Keys are stored as the model
computed them behind the corpus's prefix, that is rotated to ``[prefix_tokens, prefix_tokens + T)``;
moving them is the business of :mod:`blendrag.model.positions`.

Layouts are of use to who knows no tensors (``blendrag store check``), so torch is imported when the
first tensor is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from blendrag.store.identity import NATIVE_ENCODING

if TYPE_CHECKING:
    import torch

    #: Stored dtypes by the name that goes into keys and headers.
    DTYPES: dict[str, torch.dtype]

#: Bytes of one number, by the name of its stored dtype.
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def __getattr__(name: str) -> Any:
    if name != "DTYPES":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import torch

    found = globals()["DTYPES"] = {dtype: getattr(torch, dtype) for dtype in ITEM_BYTES}
    return found


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
    """Of the tensors, which a store takes and gives back."""
    encoding: str = NATIVE_ENCODING
    """How a store keeps them (:mod:`blendrag.store.encodings`)."""

    def encoded(self, encoding: str) -> KVLayout:
        """The same tensors, kept in another way."""
        return replace(self, encoding=encoding)

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    def layer_shape(self, layer: int, tokens: int) -> tuple[int, int, int, int]:
        """``[2, Hkv, T, D]`` of one layer."""
        shape = self.layers[layer]
        return (2, shape.kv_heads, tokens, shape.head_dim)

    def layer_bytes(self, layer: int, tokens: int) -> int:
        """Bytes of one layer's tensor, however it is stored."""
        shape = self.layers[layer]
        return 2 * shape.kv_heads * tokens * shape.head_dim * self.item_bytes

    def chunk_bytes(self, tokens: int) -> int:
        """Bytes of a chunk's tensors over all layers, however they are stored."""
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
