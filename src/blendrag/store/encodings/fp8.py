"""fp8: e4m3, one scale for all that :mod:`base` lets share one, the largest number at 448.

Steps grow with the number, so a decoded one is off by at most a sixteenth of itself, or by 2^-10 of
its scale if it is small. There is no NaN among the bytes, as only finite numbers are stored.
"""

from __future__ import annotations

import torch

from blendrag.store.encodings.codec import (
    Block,
    Codec,
    coded_stretches,
    in_steps,
    largest,
    scales_of,
)

LARGEST = 448
#: What turns float16's smallest exponent into that of e4m3: 2^(15 - 7).
_EXPONENT_GAP = 256.0
#: All bits of an int16 but the one below its sign.
_WITHOUT_SECOND_SIGN = ~(1 << 14)


class Fp8(Codec):
    """See the module."""

    def _encode(
        self,
        numbers: torch.Tensor,
        scale: torch.Tensor,
        middle: torch.Tensor | None,
        coded: torch.Tensor,
        per_token: bool,
    ) -> None:
        scale.copy_(scales_of(largest(numbers, per_token), LARGEST, middle))
        for at, each in coded_stretches(numbers, scale, per_token):
            steps = in_steps(numbers[at], each, middle, LARGEST)
            coded[at].copy_(steps.to(torch.float8_e4m3fn).view(torch.int8))

    def decode(self, block: Block, out: torch.Tensor) -> None:
        # torch converts e4m3 number by number (2.13: 3 ns each). Shifted, its bits are a float16 that
        # is too small by a power of two: sign seeeemmm -> s0eeeemm m0000000, subnormals included.
        bits = block.coded.to(torch.int16)
        bits.bitwise_left_shift_(7).bitwise_and_(_WITHOUT_SECOND_SIGN)
        out.copy_(bits.view(torch.float16))
        out.mul_(block.scale * _EXPONENT_GAP)
