"""int8: 255 even steps, for keys around the middle of their channel, for values around 0.

A decoded number is off by at most half a step of its scale: the range of its channel / 508 for a
key, the largest value of its token / 254 for a value.
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

STEPS = 127


class Int8(Codec):
    """See the module."""

    def _encode(self, numbers: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        key_scales, key_middles, value_scales, steps = parts
        _, heads, tokens, width = numbers.shape
        for head in range(heads):
            keys, values = numbers[0, head], numbers[1, head]  # [T, D]
            low, high = (
                over_tokens(keys, lambda x: x.amin(0)),
                over_tokens(keys, lambda x: x.amax(0)),
            )
            middle = key_middles[head].copy_(low / 2 + high / 2)  # [D]; halves do not overflow
            reach = torch.maximum(high - middle, middle - low)
            key_scale = key_scales[head].copy_(scales_of(reach, STEPS, middle))  # [D]
            value_scale = value_scales[head].copy_(scales_of(over_channels(values), STEPS))  # [T]
            for at in blocks(tokens, width):
                _round(keys[at].float() - middle, key_scale, steps[0, head, at])
                _round(values[at].float(), value_scale[at, None], steps[1, head, at])

    def _decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        key_scales, key_middles, value_scales, steps = parts
        for kv, head, at, block in decoded_blocks(out):
            block.copy_(steps[kv, head, at])
            if kv == 0:
                torch.addcmul(key_middles[head], block, key_scales[head], out=block)
            else:
                block.mul_(value_scales[head, at, None])


def _round(numbers: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    # cut off rather than round_(), which goes to several threads from 2048 numbers on (torch 2.13)
    bounded = in_steps(numbers, scale).clamp_(-STEPS, STEPS)
    out.copy_(bounded.add_(STEPS + 0.5).to(torch.int16).sub_(STEPS))
