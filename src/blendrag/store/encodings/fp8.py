"""fp8: e4m3, scaled so that the largest number of a scale is 448.

Steps grow with the number: a decoded number is off by at most a sixteenth of itself, or by 2^-10 of
its scale if it is small. No byte is NaN, because only finite numbers are stored.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blendrag.store.encodings import stored_parts
from blendrag.store.encodings.codec import BLOCK_ITEMS, Codec, CodedBlock

#: Ratio between the smallest exponents of e4m3 and float16: 2^(15 - 7).
_EXPONENT_GAP = 256.0
#: 16-bit numbers in one of 64 bits.
_LANES = 4
#: Keeps the sign and the seven bits of each number; clears the bit below the sign and foreign bits.
_WITHOUT_SECOND_SIGN = torch.tensor(0xBF80_BF80_BF80_BF80 - (1 << 64))
_SEVEN = torch.tensor(7)
#: Unpacked at once: the largest number of 64-bit operations that starts no thread.
UNPACKED_ITEMS = _LANES * BLOCK_ITEMS


class Fp8(Codec):
    steps = 448

    def code(self, steps: torch.Tensor) -> torch.Tensor:
        return steps.to(torch.float8_e4m3fn).view(torch.int8)

    def blocks(
        self, layer: int, tokens: int, stored: torch.Tensor, scratch: torch.Tensor | None
    ) -> list[CodedBlock]:
        """See :meth:`Codec.blocks`. Blocks share the buffer that they are unpacked into."""
        blocks = super().blocks(layer, tokens, stored, scratch)
        scale_bytes = sum(part.size_bytes for part in stored_parts(self.layout, layer, tokens)[:-1])
        scales = stored[:scale_bytes].view(torch.float32).split(BLOCK_ITEMS)
        at_once = max(1, UNPACKED_ITEMS // max(block.coded.numel() for block in blocks))
        portions = [blocks[i : i + at_once] for i in range(0, len(blocks), at_once)]
        largest_items = max(sum(block.coded.numel() for block in portion) for portion in portions)
        room = torch.empty(-(-largest_items // _LANES) * _LANES, dtype=torch.int16)
        found: list[CodedBlock] = []
        for portion in portions:
            found += _unpacked(portion, room, () if found else scales)
        return found

    def decode(self, block: CodedBlock, out: torch.Tensor) -> None:
        out.copy_(block.coded)
        out.mul_(block.scale)


def _unpacked(
    blocks: list[CodedBlock], room: torch.Tensor, scales: Sequence[torch.Tensor]
) -> list[CodedBlock]:
    """The blocks as float16 numbers in ``room``, too small by a power of two.

    The first block unpacks them all. If it is the layer's first, ``scales`` are the layer's, which
    then make up for the power of two. torch converts e4m3 one number at a time (2.13: 3 ns each). Its
    bits, shifted, are such a float16: seeeemmm -> s0eeeemm m0000000, subnormals included. Four are
    shifted at once; bits that move into a neighbour are cleared together with the second sign.
    """
    bits, found, begin = [], [], 0
    for block in blocks:
        end = begin + block.coded.numel()
        wide = room[begin:end].view(block.coded.shape)
        bits.append((wide, block.coded))
        found.append(block._replace(coded=wide.view(torch.float16)))
        begin = end
    lanes = room[: -(-begin // _LANES) * _LANES].view(torch.int64)

    def unpack() -> None:
        for wide, coded in bits:
            wide.copy_(coded)
        lanes.bitwise_left_shift_(_SEVEN).bitwise_and_(_WITHOUT_SECOND_SIGN)
        for scale in scales:
            scale.mul_(_EXPONENT_GAP)

    found[0] = found[0]._replace(unpack=unpack)
    return found
