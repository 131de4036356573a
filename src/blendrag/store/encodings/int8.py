"""int8: 255 even steps, around the middle of the channel for keys and around 0 for values.

A decoded number is off by at most half a step of its scale: the range of its channel / 508 for a
key, the largest value of its token / 254 for a value.
"""

from __future__ import annotations

import torch

from blendrag.store.encodings.codec import Codec, CodedBlock


class Int8(Codec):
    steps = 127

    def code(self, steps: torch.Tensor) -> torch.Tensor:
        # truncated: round_() uses several threads from 2048 numbers on (torch 2.13)
        return steps.add_(self.steps + 0.5).to(torch.int16).sub_(self.steps)

    def decode(self, block: CodedBlock, out: torch.Tensor) -> None:
        out.copy_(block.coded)
        if block.middle is None:
            out.mul_(block.scale)
        else:
            torch.addcmul(block.middle, out, block.scale, out=out)
