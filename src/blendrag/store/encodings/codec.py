"""What both codecs share: their contract, parts as tensors, and work in blocks.

A block has at most :data:`BLOCK_ITEMS` numbers. Up to that size torch starts no threads of its own
(``at::parallel_for``'s grain size, torch 2.11 to 2.13), so a codec may run in a loader's thread
without a second OpenMP team, and in a forked child; and a block's intermediate numbers stay in the
cache. numpy, which is single-threaded, has no bfloat16 and takes twice as long.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from blendrag.store.encodings.base import stored_layer_bytes, stored_parts
from blendrag.store.forking import renew_after_fork
from blendrag.store.kv import KVLayout, LayerShape
from blendrag.store.raw import tensor_buffer

#: Numbers worked on at once.
BLOCK_ITEMS = 1 << 15
#: Reductions go to several threads at that size already.
_REDUCED_ITEMS = BLOCK_ITEMS // 2

_TORCH = {"F32": torch.float32, "I8": torch.int8, "F8_E4M3": torch.int8}
#: A little below float32's largest number, so that rounding never leads beyond it.
_LARGEST = torch.finfo(torch.float32).max * (1 - 2**-22)


class Block(NamedTuple):
    """Some tokens of one head's keys or values, as they are stored."""

    head: int
    """Which ``[T, D]`` of a layer's ``[2, Hkv, T, D]``, keys first."""
    at: slice | None
    """Which tokens of it, if not all."""
    coded: torch.Tensor
    """``[n, D]``, one byte each, or what a codec has unpacked them into."""
    scale: torch.Tensor
    """Of keys ``[D]``, of values ``[n, 1]``."""
    middle: torch.Tensor | None
    """``[D]``, where the numbers are counted from, if not from 0."""
    exact: torch.Tensor | None
    """float32 ``[n, D]`` to decode into; ``None`` where the target itself is float32."""
    unpack: Callable[[], None] | None = None
    """To be called before this block and those behind it are decoded, up to the next that has one."""


class Codec(ABC):
    """One encoding of one layout. Stateless; runs no operator on more than a block."""

    steps: int
    """Of its scale, the largest number that is coded."""

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout

    @torch.inference_mode()
    def encode(self, layer: int, numbers: torch.Tensor) -> torch.Tensor:
        """The stored bytes of a finite layer ``[2, Hkv, T, D]`` on the CPU: uint8 ``[n]``."""
        tokens = numbers.shape[2]
        stored = torch.empty(stored_layer_bytes(self.layout, layer, tokens), dtype=torch.uint8)
        parts = self._parts(layer, tokens, stored)
        coded = parts.pop("")
        for kv, name in enumerate(("key", "value")):
            scales, middles = parts[f".{name}_scales"], parts.get(f".{name}_middles")
            for head, (each, scale) in enumerate(zip(numbers[kv], scales, strict=True)):
                middle = None if middles is None else middles[head]
                self._encode(each, scale, middle, coded[kv, head], per_token=kv == 1)
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
    ) -> list[Block]:
        """A stored layer block by block, in this order, to be decoded by way of ``scratch``."""
        parts = self._parts(layer, tokens, stored)
        coded, found = parts[""], []
        _, heads, _, width = coded.shape
        for number in range(2 * heads):
            kv, head = divmod(number, heads)
            name = ("key", "value")[kv]
            scale, middles = parts[f".{name}_scales"][head], parts.get(f".{name}_middles")
            middle = None if middles is None else middles[head]
            for at in stretches(tokens, width):
                exact = None if scratch is None else scratch[: at.stop - at.start]
                whole = at.stop - at.start == tokens
                each = scale[at, None] if kv else scale
                block = Block(
                    number, None if whole else at, coded[kv, head, at], each, middle, exact
                )
                found.append(block)
        return found

    def _encode(
        self,
        numbers: torch.Tensor,
        scale: torch.Tensor,
        middle: torch.Tensor | None,
        coded: torch.Tensor,
        per_token: bool,
    ) -> None:
        """Fill ``scale``, ``middle`` and ``coded`` from ``numbers`` ``[T, D]`` of one head."""
        if middle is None:
            reach = _largest(numbers, per_token)
        else:
            low, high = _over_tokens(numbers, _lowest), _over_tokens(numbers, _highest)
            middle.copy_(low / 2 + high / 2)  # halves do not overflow
            reach = torch.maximum(high - middle, middle - low)
        scale.copy_(_scales_of(reach, self.steps, middle))
        for at in stretches(*numbers.shape):
            each = scale[at, None] if per_token else scale
            coded[at].copy_(self.code(_in_steps(numbers[at], each, middle, self.steps)))

    @abstractmethod
    def code(self, steps: torch.Tensor) -> torch.Tensor:
        """Each byte, as an integer, of numbers in steps: float32 ``[n, D]``, which may be overwritten."""

    @abstractmethod
    def decode(self, block: Block, out: torch.Tensor) -> None:
        """Fill ``out``, float32 ``[n, D]``."""


class Staging:
    """Room for one stored layer, used for layer after layer of a chunk. Thread-safe.

    Its blocks are found once for every shape of layer: finding them anew would take as long as decoding.
    """

    def __init__(self, codec: Codec, tokens: int) -> None:
        layers = range(len(codec.layout.layers))
        self._codec, self._tokens = codec, tokens
        self._sizes = [stored_layer_bytes(codec.layout, i, tokens) for i in layers]
        self._stored: torch.Tensor | None = None
        self._blocks: dict[LayerShape, list[Block]] = {}
        self.renew_locks()
        renew_after_fork(self)

    def renew_locks(self) -> None:
        """See :mod:`forking`. What a thread of the parent left half done is done anew."""
        self._lock = threading.Lock()

    def read(self, layer: int, fill: Callable[[Any], object], out: torch.Tensor) -> None:
        """Decode ``layer`` into ``out`` ``[2, Hkv, T, D]`` of the compute dtype, rounded once.

        ``fill`` puts its stored bytes into the writable buffer of their size that it is given; what it
        raises is raised here, and ``out`` is untouched.
        """
        with self._lock, torch.inference_mode():
            if self._stored is None:
                self._stored = torch.empty(max(self._sizes), dtype=torch.uint8)
            fill(tensor_buffer(self._stored[: self._sizes[layer]]))
            self._decode(self._blocks_of(layer, self._stored), out)

    def _decode(self, blocks: Sequence[Block], out: torch.Tensor) -> None:
        decode = self._codec.decode
        heads = [each for kv in out.unbind(0) for each in kv.unbind(0)]  # [T, D]
        for block in blocks:
            target = heads[block.head] if block.at is None else heads[block.head][block.at]
            if block.unpack is not None:
                block.unpack()
            if block.exact is None:
                decode(block, target)
            else:
                decode(block, block.exact)
                target.copy_(block.exact)

    def _blocks_of(self, layer: int, stored: torch.Tensor) -> list[Block]:
        layout = self._codec.layout
        shape = layout.layers[layer]
        if shape not in self._blocks:
            rows = next(stretches(self._tokens, shape.head_dim)).stop
            direct = layout.torch_dtype == torch.float32
            scratch = None if direct else torch.empty(rows, shape.head_dim)
            self._blocks[shape] = self._codec.blocks(layer, self._tokens, stored, scratch)
        return self._blocks[shape]


def stretches(tokens: int, width: int, items: int = BLOCK_ITEMS) -> Iterator[slice]:
    """Stretches of tokens of at most ``items`` numbers."""
    step = max(1, items // width)
    return (slice(at, min(at + step, tokens)) for at in range(0, tokens, step))


def _over_tokens(
    numbers: torch.Tensor, reduce: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """``reduce`` (``amax`` and the like) over the tokens of ``[T, D]``, in float32 ``[D]``."""
    tokens, width = numbers.shape
    found = [reduce(numbers[at]) for at in stretches(tokens, width, _REDUCED_ITEMS)]
    return reduce(torch.stack(found)).float()


def _largest(numbers: torch.Tensor, per_token: bool) -> torch.Tensor:
    """The largest magnitudes of ``[T, D]``: of every token ``[T]`` or of every channel ``[D]``."""
    if not per_token:
        return _over_tokens(numbers, lambda x: x.abs().amax(0))
    tokens, width = numbers.shape
    found = [numbers[at].abs().amax(1) for at in stretches(tokens, width, _REDUCED_ITEMS)]
    return torch.cat(found).float()


def _scales_of(reach: torch.Tensor, steps: int, middle: torch.Tensor | None) -> torch.Tensor:
    """Scales with which ``steps`` times the scale is ``reach``, and stays finite beside ``middle``."""
    room = torch.full_like(reach, _LARGEST) - (0.0 if middle is None else middle.abs())
    return torch.minimum(reach, room).clamp_(min=0) / steps


def _in_steps(
    numbers: torch.Tensor, scale: torch.Tensor, middle: torch.Tensor | None, steps: int
) -> torch.Tensor:
    """``[n, D]`` in steps of the scale, at most ``steps`` of them; 0 where the scale is 0, as all that
    share it are equal (or nearly)."""
    away = numbers.float() if middle is None else numbers.float() - middle
    return torch.where(scale > 0, away / scale, 0.0).clamp_(-steps, steps)


def _lowest(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.amin(0)


def _highest(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.amax(0)
