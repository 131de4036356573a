"""Layers as they are stored: checked and encoded on the way in, decoded on the way out.

int8 has 255 even steps, around the middle of the channel for keys and around 0 for values.

A decoded number is off by at most half a step of its scale: the range of its channel / 508 for a key, the
largest value of its token / 254 for a value.

A block has at most :data:`BLOCK_ITEMS` numbers. Up to that size torch starts no threads
(``at::parallel_for``'s grain size, torch 2.11 to 2.13), so the codec may run in a loader's thread
without a second OpenMP team, and a block's intermediate numbers stay in the cache. numpy is
single-threaded too, but has no bfloat16 and takes twice as long.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from blendrag.errors import InvalidInputError
from blendrag.store.encodings import stored_bytes_by_layer, stored_parts
from blendrag.store.identity import NATIVE_ENCODING
from blendrag.store.kv import ChunkKV, KVLayout, LayerShape
from blendrag.store.tensor_bytes import tensor_buffer

#: Numbers processed at once.
BLOCK_ITEMS = 1 << 15
#: Reductions already use several threads at that size.
_REDUCED_ITEMS = BLOCK_ITEMS // 2

_TORCH = {"F32": torch.float32, "I8": torch.int8}
#: The largest code, in steps of the scale.
_STEPS = 127
#: A little below float32's largest number, so that rounding never exceeds it.
_LARGEST = torch.finfo(torch.float32).max * (1 - 2**-22)

#: Dtype → integer types of its width, and the bits of infinity. Infinity and the NaNs are the largest
#: bit patterns of either sign: signed integers order the positive ones, unsigned the negative ones.
_INFINITY: dict[str, tuple[type[np.signedinteger[Any]], type[np.unsignedinteger[Any]], int]] = {
    "float32": (np.int32, np.uint32, 0x7F80_0000),
    "float16": (np.int16, np.uint16, 0x7C00),
    "bfloat16": (np.int16, np.uint16, 0x7F80),
}


def codec_of(layout: KVLayout) -> Int8 | None:
    """The codec of this layout; ``None`` for the native encoding."""
    return None if layout.encoding == NATIVE_ENCODING else Int8(layout)


def staging_of(layout: KVLayout, tokens: int) -> Staging | None:
    """The buffer that one chunk's layers are decoded from; ``None`` for the native encoding."""
    codec = codec_of(layout)
    return Staging(codec, tokens) if codec else None


def stored_layers(key: str, kv: ChunkKV) -> Iterator[torch.Tensor]:
    """Each layer as it is stored: checked, then encoded. One at a time, while it is in the cache.

    Raises :class:`InvalidInputError` for NaN and infinity.
    """
    codec = codec_of(kv.layout)
    for number, tensor in enumerate(kv.layers):
        layer = tensor.detach().cpu().contiguous()
        if kv.layout.layers[number].is_state:
            yield layer  # bytes; its numbers were checked when they were computed
            continue
        if not _all_finite(layer, kv.layout.dtype):
            raise InvalidInputError(
                f"KV {key[:12]}… has NaN or infinity in layer {number}, expected finite numbers; "
                "compute it in bfloat16 or float32, or leave this chunk out"
            )
        yield codec.encode(number, layer) if codec else layer


def _all_finite(layer: torch.Tensor, dtype: str) -> bool:
    """Whether a contiguous CPU tensor holds neither NaN nor infinity. Makes no copy."""
    signed, unsigned, infinity = _INFINITY[dtype]
    bits = np.frombuffer(tensor_buffer(layer), dtype=signed)
    negative_infinity = infinity | 1 << (8 * bits.itemsize - 1)
    return bool(bits.max() < infinity and bits.view(unsigned).max() < negative_infinity)


class CodedBlock(NamedTuple):
    """Some tokens of one head's stored keys or values."""

    head: int
    """Which ``[T, D]`` of a layer: those of K's heads come first."""
    at: slice | None
    """Its tokens; ``None`` for all."""
    coded: torch.Tensor
    """int8 ``[n, D]``."""
    scale: torch.Tensor
    """``[D]`` for keys, ``[n, 1]`` for values."""
    middle: torch.Tensor | None
    """``[D]`` for keys, the zero point; ``None`` for values."""
    exact: torch.Tensor | None
    """float32 ``[n, D]`` to decode into; ``None`` if the target itself is float32."""

    def decode(self, out: torch.Tensor) -> None:
        """Fill ``out``, float32 ``[n, D]``."""
        out.copy_(self.coded)
        if self.middle is None:
            out.mul_(self.scale)
        else:
            torch.addcmul(self.middle, out, self.scale, out=out)


class Int8:
    """The codec of one layout. Stateless; no operator runs on more than a block."""

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout

    @torch.inference_mode()
    def encode(self, layer: int, numbers: torch.Tensor) -> torch.Tensor:
        """The stored bytes of a finite layer (:class:`LayerShape`) on the CPU: uint8 ``[n]``."""
        tokens, split = numbers.shape[2], self.layout.layers[layer].split
        stored = torch.empty(stored_bytes_by_layer(self.layout, tokens)[layer], dtype=torch.uint8)
        parts = self._parts(layer, tokens, stored)
        both = zip(("key", "value"), split(numbers), split(parts.pop("")), strict=True)
        for name, exact, coded in both:
            scales, middles = parts[f".{name}_scales"], parts.get(f".{name}_middles")
            for head, scale in enumerate(scales):
                middle = None if middles is None else middles[head]
                self._encode(exact[head], scale, middle, coded[head])
        return stored

    def _parts(self, layer: int, tokens: int, stored: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parts of a stored layer as tensors, by name."""
        tensors, begin = {}, 0
        for part in stored_parts(self.layout, layer, tokens):
            piece = stored[begin : begin + part.size_bytes]
            tensors[part.name] = piece.view(_TORCH[part.dtype]).view(part.shape)
            begin += part.size_bytes
        return tensors

    def blocks(
        self, layer: int, tokens: int, stored: torch.Tensor, scratch: torch.Tensor | None
    ) -> list[CodedBlock]:
        """The blocks of a stored layer in order, to be decoded through ``scratch``, float32 ``[n]``."""
        parts = self._parts(layer, tokens, stored)
        shape, found = self.layout.layers[layer], list[CodedBlock]()
        both = [each for kv in shape.split(parts[""]) for each in kv.unbind(0)]  # [T, D]
        for number, coded in enumerate(both):
            kv, head = divmod(number, shape.kv_heads)
            name, width = ("key", "value")[kv], coded.shape[1]
            scale, middles = parts[f".{name}_scales"][head], parts.get(f".{name}_middles")
            middle = None if middles is None else middles[head]
            for at in token_slices(tokens, width):
                exact = None
                if scratch is not None:
                    exact = scratch[: (at.stop - at.start) * width].view(-1, width)
                whole = at.stop - at.start == tokens
                each = scale[at, None] if kv else scale
                found.append(
                    CodedBlock(number, None if whole else at, coded[at], each, middle, exact)
                )
        return found

    def _encode(
        self,
        numbers: torch.Tensor,
        scale: torch.Tensor,
        middle: torch.Tensor | None,
        coded: torch.Tensor,
    ) -> None:
        """Fill ``scale``, ``middle`` and ``coded`` from ``numbers`` ``[T, D]`` of one head.

        ``middle``: of keys; values have none.
        """
        if middle is None:
            reach = _largest(numbers)
        else:
            low = _over_tokens(numbers, lambda x: x.amin(0))
            high = _over_tokens(numbers, lambda x: x.amax(0))
            middle.copy_(low / 2 + high / 2)  # halves do not overflow
            reach = torch.maximum(high - middle, middle - low)
        scale.copy_(_scales_of(reach, middle))
        for at in token_slices(*numbers.shape):
            each = scale[at, None] if middle is None else scale
            coded[at].copy_(_codes(numbers[at], each, middle))


class Staging:
    """A buffer for one stored layer, used for each layer of a chunk in turn. Thread-safe.

    The blocks are computed once per layer shape: computing them takes as long as decoding.
    """

    def __init__(self, codec: Int8, tokens: int) -> None:
        self._codec, self._tokens = codec, tokens
        self._sizes = stored_bytes_by_layer(codec.layout, tokens)
        self._stored: torch.Tensor | None = None
        self._blocks: dict[LayerShape, list[CodedBlock]] = {}
        self._lock = threading.Lock()

    def read(self, layer: int, fill: Callable[[Any], object], out: torch.Tensor) -> None:
        """Decode ``layer`` into ``out`` (:class:`LayerShape`) of the compute dtype, rounded once.

        ``fill`` writes the stored bytes into the buffer it is given. If it raises, ``out`` is
        untouched.
        """
        with self._lock, torch.inference_mode():
            if self._stored is None:
                self._stored = torch.empty(max(self._sizes), dtype=torch.uint8)
            fill(tensor_buffer(self._stored[: self._sizes[layer]]))
            self._decode(layer, self._blocks_of(layer, self._stored), out)

    def _decode(self, layer: int, blocks: Sequence[CodedBlock], out: torch.Tensor) -> None:
        shape = self._codec.layout.layers[layer]
        heads = [each for kv in shape.split(out) for each in kv.unbind(0)]  # [T, D]
        for block in blocks:
            target = heads[block.head] if block.at is None else heads[block.head][block.at]
            if block.exact is None:
                block.decode(target)
            else:
                block.decode(block.exact)
                target.copy_(block.exact)

    def _blocks_of(self, layer: int, stored: torch.Tensor) -> list[CodedBlock]:
        layout = self._codec.layout
        shape = layout.layers[layer]
        if shape not in self._blocks:
            direct = layout.torch_dtype == torch.float32
            widest = max(shape.head_dim, shape.value_dim or 0)
            most = max(BLOCK_ITEMS, widest)  # of one block
            scratch = None if direct else torch.empty(min(most, self._tokens * widest))
            self._blocks[shape] = self._codec.blocks(layer, self._tokens, stored, scratch)
        return self._blocks[shape]


def token_slices(tokens: int, width: int, items: int = BLOCK_ITEMS) -> Iterator[slice]:
    """Slices of tokens with at most ``items`` numbers each."""
    step = max(1, items // width)
    return (slice(at, min(at + step, tokens)) for at in range(0, tokens, step))


def _over_tokens(
    numbers: torch.Tensor, reduce: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """``reduce`` (such as ``amax``) over the tokens of ``[T, D]``: float32 ``[D]``."""
    tokens, width = numbers.shape
    found = [reduce(numbers[at]) for at in token_slices(tokens, width, _REDUCED_ITEMS)]
    return reduce(torch.stack(found)).float()


def _largest(numbers: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each token of ``[T, D]``: float32 ``[T]``."""
    tokens, width = numbers.shape
    found = [numbers[at].abs().amax(1) for at in token_slices(tokens, width, _REDUCED_ITEMS)]
    return torch.cat(found).float()


def _scales_of(reach: torch.Tensor, middle: torch.Tensor | None) -> torch.Tensor:
    """Scales such that :data:`_STEPS` times the scale is ``reach``, and finite when added to ``middle``."""
    room = torch.full_like(reach, _LARGEST) - (0.0 if middle is None else middle.abs())
    return torch.minimum(reach, room).clamp_(min=0) / _STEPS


def _codes(numbers: torch.Tensor, scale: torch.Tensor, middle: torch.Tensor | None) -> torch.Tensor:
    """``[n, D]`` as int16 steps of the scale; 0 where the scale is 0, because the numbers that share it are
    (almost) equal."""
    away = numbers.float() if middle is None else numbers.float() - middle
    steps = torch.where(scale > 0, away / scale, 0.0).clamp_(-_STEPS, _STEPS)
    # truncated: round_() uses several threads from 2048 numbers on (torch 2.13)
    return steps.add_(_STEPS + 0.5).to(torch.int16).sub_(_STEPS)
