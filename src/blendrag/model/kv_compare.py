"""Compare two computations of the same keys, values or logits, up to numerical noise.

Used by the position probe, the choice of attention, the gate and the probe kept in a store. K and V are
compared separately, and every channel (a KV head's dimension) relative to how much it differs from token to
token. A norm over a whole tensor hides errors where a model adds large biases: in Qwen2's first layers they
reach hundreds, while the token contributes about 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Error from computing at another position or in another order, relative to a channel's content. On real
#: models it is up to .04 in bfloat16 and .00003 in float32; real mistakes are of order 1.
NOISE = {torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
#: Largest difference of logits, relative to the largest logit, that counts as equal.
LOGIT_TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 6e-2}
#: Disturbed KV or states must move logits by more than this, relative to the largest logit.
MIN_DISTURBED_LOGIT_SHIFT = 1e-2
#: No channel may be off by more than this many times its allowance, however well the others fit.
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
    """How much each channel tells about its token: ``[H, 1, D]``, float32.

    ``tensor`` and ``others`` ``[H, n, D]`` hold different tokens at equal positions, where a bias cancels.
    """
    return (tensor.float() - others.float()).square().mean(-2, keepdim=True).div(2).sqrt()


def magnitude(*tensors: torch.Tensor) -> torch.Tensor:
    """The largest number of each channel in any of ``tensors`` ``[H, n, D]``: ``[H, 1, D]``, float32."""
    return torch.cat([tensor.float() for tensor in tensors], -2).abs().amax(-2, keepdim=True)


def misfit(actual: torch.Tensor, expected: torch.Tensor, allowed: torch.Tensor) -> Misfit:
    """The error of ``actual`` ``[H, n, D]``, where each channel may be off by ``allowed`` ``[H, 1, D]``.

    Root mean squares over tokens and channels rather than the worst number: at far positions a
    low-precision rotary table is rounded coarsely, and a sharp attention turns that into a large error of a
    few numbers. Real mistakes differ everywhere.
    """
    error = (actual.float() - expected.float()).square().mean(-2, keepdim=True).sqrt()
    relative = torch.where(error == 0, 0.0, error / allowed).double()  # [H, 1, D]; 0/0 is no error
    channels = relative.square().mean((0, 1)).sqrt()  # [D]
    return Misfit(float(channels.square().mean().sqrt()), float(channels.max()))


def difference_of(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of two tensors of logits; NaN if there is any."""
    return float((one.float() - other.float()).abs().max())


def shows_errors(disturbed: float, differs: float, scale: float) -> bool:
    """Whether a check of logits up to ``scale`` could see something wrong: disturbed input moves them by
    ``disturbed``, and what should be equal ``differs``. False for NaN."""
    return disturbed > max(MIN_DISTURBED_LOGIT_SHIFT * scale, 2 * differs)
