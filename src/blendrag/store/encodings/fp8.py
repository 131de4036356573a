"""fp8: e4m3, one scale for all that :mod:`base` lets share one, the largest number at 448.

Steps grow with the number, so a decoded one is off by at most a sixteenth of itself, or by 2^-10 of
its scale if it is small. There is no NaN among the bytes, as only finite numbers are stored.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blendrag.store.encodings.codec import (
    Codec,
    blocks,
    decoded_blocks,
    in_steps,
    over_channels,
    over_tokens,
    scales_of,
)

LARGEST = 448
#: What turns float16's smallest exponent into that of e4m3: 2^(15 - 7).
_EXPONENT_GAP = 256.0
#: All bits of an int16 but the one below its sign.
_WITHOUT_SECOND_SIGN = ~(1 << 14)


class Fp8(Codec):
    """See the module."""

    def _encode(self, numbers: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        key_scales, value_scales, coded = parts
        _, heads, tokens, width = numbers.shape
        for head in range(heads):
            keys, values = numbers[0, head], numbers[1, head]  # [T, D]
            reach = over_tokens(keys, lambda x: x.abs().amax(0))
            key_scale = key_scales[head].copy_(scales_of(reach, LARGEST))  # [D]
            value_scale = value_scales[head].copy_(scales_of(over_channels(values), LARGEST))  # [T]
            for at in blocks(tokens, width):
                _round(keys[at].float(), key_scale, coded[0, head, at])
                _round(values[at].float(), value_scale[at, None], coded[1, head, at])

    def _decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        # torch converts e4m3 number by number (2.13: 3 ns each). Shifted, its bits are a float16 that
        # is too small by a power of two: sign seeeemmm -> s0eeeemm m0000000, subnormals included.
        key_scales, value_scales, coded = parts
        for kv, head, at, block in decoded_blocks(out):
            bits = coded[kv, head, at].to(torch.int16)
            bits.bitwise_left_shift_(7).bitwise_and_(_WITHOUT_SECOND_SIGN)
            block.copy_(bits.view(torch.float16))
            scale = key_scales[head] if kv == 0 else value_scales[head, at, None]
            block.mul_(scale * _EXPONENT_GAP)


def _round(numbers: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    bounded = in_steps(numbers, scale).clamp_(-LARGEST, LARGEST)
    out.copy_(bounded.to(torch.float8_e4m3fn).view(torch.int8))
