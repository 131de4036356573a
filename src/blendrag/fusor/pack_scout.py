"""The scout pass of several prompts in one forward: each prompt's rows over its own keys.

Another attention function than one prompt's only in who sees what: masks are made of each prompt's rows,
as those that the model would make of all prompts together grow with the square of their tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from blendrag.fusor.attention import ROWS_KEYWORD, implementation
from blendrag.fusor.packed_rows import PackedRows
from blendrag.fusor.scout import Scout, reporting_to, scout_attention
from blendrag.model.structure import DecoderStack

NAME = "blendrag_pack_scout"

_current: ContextVar[Mapping[int, Scout]] = ContextVar(NAME)


@contextmanager
def scouting_together(stack: DecoderStack, scouts: Mapping[int, Scout]) -> Iterator[None]:
    """Forwards of ``stack`` within this context and thread report to the prompts' ``scouts``."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, pack_scout_attention)
    token = _current.set(scouts)
    try:
        with implementation(stack, NAME):
            yield
    finally:
        _current.reset(token)


def pack_scout_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """``query`` ``[1, H, ΣS, D]`` over the buffers of all prompts ``[1, Hkv, C, D]``."""
    rows: PackedRows = kwargs[ROWS_KEYWORD]
    scouts = _current.get()
    out = query.new_empty((1, query.shape[2], query.shape[1], value.shape[-1]))
    for member, _, a, b, lo, hi in rows.parts:
        keys, values = key[:, :, lo:hi], value[:, :, lo:hi]
        with reporting_to(scouts[member]):
            mixed, _ = scout_attention(
                module,
                query[:, :, a:b],
                keys,
                values,
                None,
                scaling,
                sliding_window=sliding_window,
            )
        out[:, a:b] = mixed
    return out, None
