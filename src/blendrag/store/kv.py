"""What a chunk's KV cache is: its layout, and the tensors themselves. Of a layer with a running state it has
what the chunk does to that, which does not grow with the chunk.

Keys are stored as the model computed them after the corpus's prefix, that is, rotated to positions
``[prefix_tokens, prefix_tokens + T)``; :mod:`blendrag.model.positions` moves them.

torch is imported on first use, because commands such as ``blendrag store check`` need only layouts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from blendrag.store.identity import NATIVE_ENCODING

if TYPE_CHECKING:
    import torch

#: Bytes of one number by the name of its stored dtype.
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` → ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class LayerShape:
    """Heads and widths of one layer's K and V.

    Its KV is one tensor ``[2, Hkv, T, D]``, keys first. If the widths differ, as in MLA's layers of latent
    vectors, it is ``[1, Hkv, T, Dk+Dv]``: the values of each token follow its keys.
    """

    kv_heads: int
    head_dim: int
    """Width of K."""
    value_dim: int | None = None
    """Width of V; ``None``: that of K."""

    @property
    def is_state(self) -> bool:
        """Whether it is that of a running state."""
        return False

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> LayerShape:
        """That of K and V ``[…, Hkv, T, D]``."""
        width = values.shape[-1] if values.shape[-1] != keys.shape[-1] else None
        return cls(int(keys.shape[-3]), int(keys.shape[-1]), width)

    def tensor_shape(self, tokens: int) -> tuple[int, int, int, int]:
        """``[2, Hkv, T, D]``, or ``[1, Hkv, T, Dk+Dv]``."""
        if self.value_dim is None:
            return (2, self.kv_heads, tokens, self.head_dim)
        return (1, self.kv_heads, tokens, self.head_dim + self.value_dim)

    def split(self, kv: torch.Tensor, dim: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, views of a layer's tensor, of which ``dim`` is the dimension of 2 or 1."""
        if self.value_dim is None:
            return kv.select(dim, 0), kv.select(dim, 1)
        both = kv.select(dim, 0)
        return both.narrow(-1, 0, self.head_dim), both.narrow(-1, self.head_dim, self.value_dim)

    def joined(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The tensor of a layer from its K and V ``[Hkv, T, D]``; a copy."""
        import torch

        if self.value_dim is None:
            return torch.stack((keys, values))
        return torch.cat((keys, values), dim=-1)[None]


@dataclass(frozen=True)
class StateShape(LayerShape):
    """What a chunk does to a layer's running state, as bytes: one tensor ``[1, 1, 1, n]`` of uint8, whatever
    its length (:mod:`blendrag.model.linear_layers`). ``head_dim`` is n."""

    def __init__(self, record_bytes: int) -> None:
        super().__init__(1, record_bytes)

    @property
    def is_state(self) -> bool:
        return True

    def tensor_shape(self, tokens: int) -> tuple[int, int, int, int]:
        return (1, 1, 1, self.head_dim)

    def split(self, kv: torch.Tensor, dim: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        raise TypeError("the record of a running state has no K and V")


@dataclass(frozen=True)
class KVLayout:
    """Shapes and dtype of a model's KV, all layers; the same for every chunk of a namespace.

    A layer with both KV and a running state is two layers here.
    """

    layers: tuple[LayerShape, ...]
    dtype: str
    """Dtype of K and V that a store takes and returns."""
    encoding: str = NATIVE_ENCODING
    """How a store keeps them (:mod:`blendrag.store.encodings`)."""

    def encoded(self, encoding: str) -> KVLayout:
        """The same tensors stored in another encoding."""
        return replace(self, encoding=encoding)

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def layer_dtype(self, layer: int) -> torch.dtype:
        """Dtype of one layer's tensor."""
        import torch

        return torch.uint8 if self.layers[layer].is_state else self.torch_dtype

    @cached_property
    def has_states(self) -> bool:
        """Whether some layers have running states."""
        return any(shape.is_state for shape in self.layers)

    @property
    def token_bytes(self) -> int:
        """Bytes of each token's K and V in all layers, before encoding."""
        return self.size_bytes(1) - self.size_bytes(0)

    def layer_shape(self, layer: int, tokens: int) -> tuple[int, int, int, int]:
        """See :meth:`LayerShape.tensor_shape`."""
        return self.layers[layer].tensor_shape(tokens)

    def size_bytes(self, tokens: int) -> int:
        """Bytes of the KV of so many tokens in all layers, before encoding."""
        return sum(self.layer_bytes(layer, tokens) for layer in range(len(self.layers)))

    def layer_bytes(self, layer: int, tokens: int) -> int:
        """Bytes of one layer's tensor, before encoding."""
        item_bytes = 1 if self.layers[layer].is_state else ITEM_BYTES[self.dtype]
        return math.prod(self.layer_shape(layer, tokens)) * item_bytes


@dataclass(frozen=True)
class ChunkKV:
    """One chunk's KV: per layer a contiguous CPU tensor, as in :class:`LayerShape`."""

    layout: KVLayout
    tokens: int
    layers: Sequence[torch.Tensor]

    def __post_init__(self) -> None:
        if len(self.layers) != len(self.layout.layers):
            raise ValueError(f"{len(self.layers)} layers, expected {len(self.layout.layers)}")
        for i, layer in enumerate(self.layers):
            expected = self.layout.layer_shape(i, self.tokens)
            dtype = self.layout.layer_dtype(i)
            if tuple(layer.shape) != expected or layer.dtype != dtype:
                raise ValueError(
                    f"layer {i} is {tuple(layer.shape)} {layer.dtype}, expected {expected} {dtype}"
                )

    def mean_with(self, other: ChunkKV, share: float) -> ChunkKV:
        """The mean of this, of weight ``share``, and of what was computed of the same chunk behind other
        text, at the same positions."""
        pairs = zip(self.layers, other.layers, strict=True)
        return replace(
            self, layers=[b.float().lerp(a.float(), share).to(a.dtype) for a, b in pairs]
        )

    @property
    def size_bytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)
