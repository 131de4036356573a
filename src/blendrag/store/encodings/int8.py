"""int8: 255 even steps, for keys around the middle of their channel, for values around 0.

A decoded number is off by at most half a step of its scale: the range of its channel / 508 for a
key, the largest value of its token / 254 for a value.
"""

from __future__ import annotations

import torch

from blendrag.store.encodings.codec import (
    Block,
    Codec,
    coded_stretches,
    in_steps,
    largest,
    over_tokens,
    scales_of,
)

STEPS = 127


class Int8(Codec):
    """See the module."""

    def _encode(
        self,
        numbers: torch.Tensor,
        scale: torch.Tensor,
        middle: torch.Tensor | None,
        coded: torch.Tensor,
        per_token: bool,
    ) -> None:
        if middle is None:
            reach = largest(numbers, per_token)
        else:
            low, high = over_tokens(numbers, _lowest), over_tokens(numbers, _highest)
            middle.copy_(low / 2 + high / 2)  # halves do not overflow
            reach = torch.maximum(high - middle, middle - low)
        scale.copy_(scales_of(reach, STEPS, middle))
        for at, each in coded_stretches(numbers, scale, per_token):
            # cut off rather than round_(), which goes to several threads from 2048 numbers on (torch 2.13)
            steps = in_steps(numbers[at], each, middle, STEPS).add_(STEPS + 0.5)
            coded[at].copy_(steps.to(torch.int16).sub_(STEPS))

    def decode(self, block: Block, out: torch.Tensor) -> None:
        out.copy_(block.coded)
        if block.middle is None:
            out.mul_(block.scale)
        else:
            torch.addcmul(block.middle, out, block.scale, out=out)


def _lowest(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.amin(0)


def _highest(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.amax(0)
