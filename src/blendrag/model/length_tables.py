"""Rotary tables that depend on the length of the sequence: LongRoPE and dynamic NTK.

transformers chooses the table in every forward by its largest position (``dynamic_rope_update``). LongRoPE
has two tables, one up to the original length and one for all longer sequences, so KV of either kind can be
kept. With dynamic NTK, every length beyond the original one has its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from blendrag.model.sharing import only_here


class LongRotary:
    """A rotary module of LongRoPE as in a sequence that is longer than ``limit``."""

    def __init__(self, rotary: nn.Module, limit: int) -> None:
        self._rotary, self._limit = rotary, limit

    def __call__(
        self, like: torch.Tensor, positions: torch.Tensor, *layer_type: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return _cut(self._rotary(like, _extended(positions, self._limit), *layer_type))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rotary, name)


@contextmanager
def long_table(rotary: nn.Module, limit: int) -> Iterator[None]:
    """Within this context the caller's forwards use the table of sequences longer than ``limit``."""

    def extend(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": _extended(kwargs["position_ids"], limit)}
        like, positions, *rest = args
        return (like, _extended(positions, limit), *rest), kwargs

    hooks = [
        rotary.register_forward_pre_hook(only_here(extend), with_kwargs=True),
        rotary.register_forward_hook(only_here(lambda module, args, out: _cut(out))),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _extended(positions: torch.Tensor, limit: int) -> torch.Tensor:
    """``positions`` ``[…, n]`` and one beyond the original length: ``[…, n + 1]``."""
    return torch.cat((positions, positions.new_full((*positions.shape[:-1], 1), limit)), -1)


def _cut(table: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines ``[…, n + 1, D]`` without the last position."""
    cos, sin = table
    return cos[..., :-1, :], sin[..., :-1, :]


@contextmanager
def own_tables(rotary: nn.Module | None) -> Iterator[None]:
    """Within this context each of the caller's forwards has the dynamic table of its own length.

    transformers (5.23) keeps that of the longest sequence so far until a short one comes, so that a prompt
    would be rotated by what other requests left.
    """
    if rotary is None or getattr(rotary, "rope_type", None) != "dynamic":
        yield
        return

    def forget(module: Any, args: Any) -> None:
        module.max_seq_len_cached = module.original_max_seq_len
        table = module.original_inv_freq.to(module.inv_freq.device)
        module.register_buffer("inv_freq", table, persistent=False)

    hook = rotary.register_forward_pre_hook(only_here(forget))
    try:
        yield
    finally:
        hook.remove()
