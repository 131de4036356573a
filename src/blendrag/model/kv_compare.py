"""Are two computations of the same keys, or of the same values, equal up to noise?

Owns the comparison that the position probe, the choice of attention and the probe kept in a store share.
K and V are compared apart, and every channel (a KV head's dimension) on a scale of its own: how much
the channel differs from token to token. A norm over a whole tensor is blind where a model adds large
biases. In Qwen2's first layers they reach hundreds, while what the token itself adds is about 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Error that counts as noise of computing at another place or in another order, relative to a channel's
#: content. On real models it is up to .04 in bfloat16 and .00003 in float32; what is wrong is off by
#: order 1.
NOISE = {torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
#: An error of this many times what is allowed in one channel is too much, however well the others fit.
WORST_CHANNEL = 10.0


@dataclass(frozen=True)
class Misfit:
    """An error in units of what is allowed."""

    overall: float
    """Root mean square over channels."""
    worst_channel: float

    @property
    def fits(self) -> bool:
        """False for NaN."""
        return self.overall <= 1.0 and self.worst_channel <= WORST_CHANNEL


def content(tensor: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """How much each channel says about its token: ``[H, 1, D]``, float32.

    ``tensor`` and ``others`` ``[H, n, D]`` hold different tokens. At equal positions a bias cancels,
    rotated or not.
    """
    return (tensor.float() - others.float()).square().mean(-2, keepdim=True).div(2).sqrt()


def magnitude(*tensors: torch.Tensor) -> torch.Tensor:
    """The largest number of each channel in any of ``tensors`` ``[H, n, D]``: ``[H, 1, D]``, float32."""
    largest = [tensor.float().abs().amax(-2, keepdim=True) for tensor in tensors]
    return torch.stack(largest).amax(0)


def misfit(actual: torch.Tensor, expected: torch.Tensor, allowed: torch.Tensor) -> Misfit:
    """The error of ``actual`` ``[H, n, D]``, where each channel may be off by ``allowed`` ``[H, 1, D]``.

    In the root mean square over tokens and channels, not of the worst number: at far positions a
    low-precision rotary table is rounded coarsely, and a trained, sharp attention turns that into a
    large error of a few numbers. What is wrong differs all over.
    """
    error = (actual.float() - expected.float()).square().mean(-2, keepdim=True).sqrt()
    relative = torch.where(
        error == 0, 0.0, error / allowed
    ).double()  # [H, 1, D]; 0 / 0 is no error
    channels = relative.square().mean((0, 1)).sqrt()  # [D]
    return Misfit(float(channels.square().mean().sqrt()), float(channels.max()))
