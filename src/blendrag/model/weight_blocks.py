"""Whole numbers, a scale and a zero for each block of a weight's inputs.

A GGUF file keeps weights as whole numbers in blocks of 16 or 32 with a scale each. Unpacked to bfloat16, a
weight still shows them: all numbers of a block lie on a grid with few steps. :func:`round_blocks` tries the
grids of GGUF's formats, so it finds the file's own numbers; for other weights it rounds to the nearest.
https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Grid(NamedTuple):
    """Equal steps over the numbers of a block."""

    steps: int
    """Of the largest absolute value, or of the range."""
    is_range: bool = False
    """Whether the steps begin at the smallest number, instead of at 0."""
    share: float = 1.0
    """How much of the range they cover; numbers outside are clipped."""


class Width(NamedTuple):
    """The numbers that a packed format can hold."""

    low: int
    high: int
    parts: int
    """The zero is added so many times."""
    grids: tuple[Grid, ...]


#: Q4_0 has 8 steps up to its largest value, Q4_1 and Q4_K have 15 in the range; their blocks need not use all
#: of them. The last two are for other weights, which gain by a narrower range.
FOUR_BITS = Width(
    -8,
    7,
    1,
    (
        *(Grid(steps, True) for steps in range(15, 8, -1)),
        *(Grid(steps) for steps in range(8, 4, -1)),
        Grid(15, True, 0.9),
        Grid(15, True, 0.8),
    ),
)
#: 32 to 26 steps are those of Q6_K, and multiples of those of Q3_K and Q5_0; 31 to 22 in the range are those
#: of Q5_1 and Q5_K, and multiples of those of Q2_K; 127 are those of Q8_0, of most blocks of IQ4, and for
#: other weights.
#: A number is 16 · high nibble + low nibble, both in [-8, 7], each with the zero.
EIGHT_BITS = Width(
    -136,
    119,
    17,
    (
        *(Grid(steps) for steps in range(32, 25, -1)),
        *(Grid(steps, True) for steps in range(31, 21, -1)),
        Grid(127),
    ),
)
#: Relative error up to which a block lies on a grid. bfloat16, which rounded the weights and the largest of
#: them, makes 0.004; other weights differ by 0.01 and more from all grids but that of 127 steps.
ON_GRID = 0.005


class Blocks(NamedTuple):
    """A weight ``[N, K]`` in blocks of B inputs: number · scale + zero."""

    numbers: torch.Tensor
    """Whole, in float32, ``[N, K/B, B]``"""
    scale: torch.Tensor
    """``[N, K/B, 1]``, representable in bfloat16"""
    zero: torch.Tensor
    """``[N, K/B, 1]``; a ``parts``-th of it is representable in bfloat16."""

    def weight(self) -> torch.Tensor:
        """``[N, K]``"""
        return (self.numbers * self.scale + self.zero).flatten(1)


def round_blocks(
    weight: torch.Tensor, size: int, width: Width, grids: Sequence[Grid] = ()
) -> Blocks:
    """A float32 ``weight`` ``[N, K]`` in blocks of ``size`` inputs, each on the first of ``grids`` (those of
    ``width``) that it lies on, or else on the nearest."""
    groups = weight.reshape(-1, size)  # [G, B]
    most = ON_GRID**2 * groups.square().sum(-1)
    first, *others = grids or width.grids
    numbers, least = _on(first, groups)
    shifted = torch.full((len(groups), 1), first.is_range)
    for grid in others:
        left = (least > most).nonzero().squeeze(1)
        if not len(left):
            break
        tried, error = _on(grid, groups[left])
        better = error < least[left]
        at = left[better]
        numbers[at], least[at], shifted[at] = tried[better], error[better], grid.is_range
    scale, zero = _fitted(groups, numbers, shifted)
    shape = (len(weight), -1, size)
    return Blocks(
        *(part.reshape(*shape[:2], part.shape[-1]) for part in _stored(numbers, scale, zero, width))
    )


def grids_by_use(weight: torch.Tensor, size: int, width: Width) -> list[Grid]:
    """The grids of ``width``, those on which most blocks of a float32 ``weight`` ``[N, K]`` lie first."""
    groups = weight.reshape(-1, size)
    errors = torch.stack([_on(grid, groups)[1] for grid in width.grids])  # [grids, G]
    is_on = errors <= ON_GRID**2 * groups.square().sum(-1)
    is_on[-1] = True
    uses = is_on.byte().argmax(0).bincount(minlength=len(errors))  # the first on which each lies
    return [width.grids[i] for i in uses.argsort(descending=True, stable=True)]


def _on(grid: Grid, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of ``groups`` ``[G, B]`` on ``grid``, and the squared error of each group."""
    if grid.is_range:
        low, high = groups.aminmax(dim=-1, keepdim=True)
        start = low + (high - low) * ((1 - grid.share) / 2)
        scale = ((high - low) * (grid.share / grid.steps)).clamp_min_(1e-12)
        numbers = ((groups - start) / scale).round_().clamp_(0, grid.steps)
        error = (numbers * scale).add_(start).sub_(groups)
    else:
        scale = (groups.abs().amax(-1, keepdim=True) / grid.steps).clamp_min_(1e-12)
        numbers = (groups / scale).round_()
        error = (numbers * scale).sub_(groups)
    return numbers, error.square_().sum(-1)


def _fitted(
    groups: torch.Tensor, numbers: torch.Tensor, shifted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales, and zeros where they are ``shifted``, with the smallest squared error: bfloat16 has rounded the
    largest number, from which the grid was made, as much as the others."""
    middle, centre = (each.mean(-1, keepdim=True) * shifted for each in (groups, numbers))
    away = numbers - centre
    scale = ((groups - middle) * away).sum(-1, keepdim=True)
    scale /= away.square().sum(-1, keepdim=True).clamp_min_(1e-12)
    return scale, middle - centre * scale


def _stored(numbers: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, width: Width) -> Blocks:
    """As the product takes them. Whole steps of the zero move into the numbers as far as these have room:
    what is left of it is rounded less."""
    low, high = numbers.aminmax(dim=-1, keepdim=True)
    steps = (zero / scale).nan_to_num_(0, 0, 0).round_()
    steps = torch.minimum(torch.maximum(steps, width.low - low), width.high - high)
    rounded = scale.bfloat16().float()
    left = ((zero - steps * scale) / width.parts).bfloat16().float() * width.parts
    return Blocks((numbers + steps).clamp_(width.low, width.high), rounded, left)
