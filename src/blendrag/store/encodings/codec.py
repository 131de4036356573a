"""What both codecs share: their contract, parts as tensors, and work in blocks.

A block has at most :data:`BLOCK_ITEMS` numbers. Up to that size torch starts no threads of its own
(``at::parallel_for``'s grain size, torch 2.11 to 2.13), so a codec may run in a loader's thread
without a second OpenMP team, and in a forked child; and a block's intermediate numbers stay in the
cache. Measured on one core, 2 x 512 x 64 numbers into bfloat16: 0.48 ns each; numpy, which has no
bfloat16, took 0.88.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import torch

from blendrag.kv import KVLayout
from blendrag.store.encodings.base import Part, stored_layer_bytes, stored_parts

#: Numbers worked on at once.
BLOCK_ITEMS = 1 << 15
#: Reductions go to several threads at that size already.
_REDUCED_ITEMS = BLOCK_ITEMS // 2

_TORCH = {"F32": torch.float32, "I8": torch.int8, "F8_E4M3": torch.int8}
#: A little below float32's largest number, so that rounding never leads beyond it.
_LARGEST = torch.finfo(torch.float32).max * (1 - 2**-22)

Scale = torch.Tensor


class Codec(ABC):
    """One encoding of one layout. Stateless; runs no operator on more than a block."""

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout

    @torch.inference_mode()
    def encode(self, layer: int, numbers: torch.Tensor) -> torch.Tensor:
        """The stored bytes of a finite layer ``[2, Hkv, T, D]`` on the CPU: uint8 ``[n]``."""
        tokens = numbers.shape[2]
        stored = torch.empty(stored_layer_bytes(self._layout, layer, tokens), dtype=torch.uint8)
        self._encode(numbers, self._tensors(stored, layer, tokens))
        return stored

    @torch.inference_mode()
    def decode(self, layer: int, stored: torch.Tensor, out: torch.Tensor) -> None:
        """Stored bytes, uint8 ``[n]``, into ``out`` ``[2, Hkv, T, D]`` of the compute dtype."""
        self._decode(self._tensors(stored, layer, out.shape[2]), out)

    def _tensors(self, stored: torch.Tensor, layer: int, tokens: int) -> list[torch.Tensor]:
        tensors, begin = [], 0
        for part in stored_parts(self._layout, layer, tokens):
            tensors.append(_view(stored, begin, part))
            begin += part.size_bytes
        return tensors

    @abstractmethod
    def _encode(self, numbers: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Fill ``parts``, in the order of :func:`stored_parts`."""

    @abstractmethod
    def _decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Fill ``out`` from ``parts``."""


def _view(stored: torch.Tensor, begin: int, part: Part) -> torch.Tensor:
    piece = stored[begin : begin + part.size_bytes]
    return piece.view(_TORCH[part.dtype]).view(part.shape)


def blocks(tokens: int, width: int, items: int = BLOCK_ITEMS) -> Iterator[slice]:
    """Stretches of tokens of at most ``items`` numbers."""
    step = max(1, items // width)
    return (slice(at, min(at + step, tokens)) for at in range(0, tokens, step))


def decoded_blocks(out: torch.Tensor) -> Iterator[tuple[int, int, slice, torch.Tensor]]:
    """``(key or value, head, tokens, block)`` over all of ``out`` ``[2, Hkv, T, D]``.

    Fill the block, float32 ``[n, D]``: when the next one is asked for, it is rounded once into its
    place, or was in it all along.
    """
    _, heads, tokens, width = out.shape
    stretches = list(blocks(tokens, width))
    scratch = torch.empty(stretches[0].stop, width)
    for kv in (0, 1):
        for head in range(heads):
            for at in stretches:
                target = out[kv, head, at]  # [n, D]
                if target.dtype == torch.float32:
                    yield kv, head, at, target
                else:
                    block = scratch[: at.stop - at.start]
                    yield kv, head, at, block
                    target.copy_(block)


def over_tokens(numbers: torch.Tensor, reduce: Callable[[torch.Tensor], torch.Tensor]) -> Scale:
    """``reduce`` (``amax`` and the like) over the tokens of ``[T, D]``, in float32 ``[D]``."""
    tokens, width = numbers.shape
    found = [reduce(numbers[at]) for at in blocks(tokens, width, _REDUCED_ITEMS)]
    return reduce(torch.stack(found)).float()


def over_channels(numbers: torch.Tensor) -> Scale:
    """The largest magnitude of every token of ``[T, D]``, in float32 ``[T]``."""
    tokens, width = numbers.shape
    found = [numbers[at].abs().amax(1) for at in blocks(tokens, width, _REDUCED_ITEMS)]
    return torch.cat(found).float()


def scales_of(reach: torch.Tensor, steps: float, middle: torch.Tensor | float = 0.0) -> Scale:
    """Scales with which ``steps`` times the scale is ``reach``, and stays finite beside ``middle``."""
    room = _LARGEST - abs(middle) if isinstance(middle, float) else _LARGEST - middle.abs()
    return torch.clamp(torch.minimum(reach, torch.as_tensor(room)), min=0) / steps


def in_steps(numbers: torch.Tensor, scale: Scale) -> torch.Tensor:
    """``numbers / scale``, 0 where the scale is 0 because all that share it are equal (or nearly)."""
    return torch.where(scale > 0, numbers / scale, 0.0)
