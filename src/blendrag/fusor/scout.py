"""The scout pass: what the question looks at, seen over stored KV before anything is recomputed.

One forward of the fresh tokens alone, with attention written out so that its weights can be added up.
That is as slow as ``eager`` attention for few rows, and exact: softcaps, attention sinks and any mask.
Its K and V are thrown away: the blended forward computes the fresh tokens over mended chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from blendrag.fusor.attention import implementation
from blendrag.model.layers import DecoderStack

NAME = "blendrag_scout"
#: Attention weights held at a time, in elements: rows are attended in blocks of about this size.
BLOCK_WEIGHTS = 1 << 23


class Scout:
    """Adds up the attention that the last ``asking`` rows pay to every prompt token.

    ``damped`` counts the layers of a model that is to be asked by square roots: see
    :attr:`SelectionPolicy.damps`. 0 adds up the attention as it is, of all layers.
    """

    def __init__(
        self, prompt_tokens: int, asking: int, device: torch.device, damped: int = 0
    ) -> None:
        self.attention = torch.zeros(prompt_tokens, dtype=torch.float32, device=device)
        """``[N]``, summed over rows, heads and layers."""
        self._damped = range(damped // 4, damped) if damped else None
        self.layers = 0
        """Attention calls seen; 0 after a pass: the model does not use transformers' interface."""
        self._asking = asking

    def add(self, weights: torch.Tensor, first_row: int, rows: int) -> None:
        """``weights`` ``[H, s, N]`` are of the rows from ``first_row`` on, out of ``rows``."""
        skipped = max(0, rows - self._asking - first_row)
        asked = weights[:, skipped:]
        if self._damped is None:
            self.attention += asked.sum((0, 1))
        elif self.layers in self._damped:
            self.attention += asked.sqrt().sum((0, 1))


_current: ContextVar[Scout] = ContextVar(NAME)


@contextmanager
def scouting(stack: DecoderStack, scout: Scout) -> Iterator[None]:
    """Forwards of ``stack`` within this context and thread report to ``scout``."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, scout_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
    with reporting_to(scout), implementation(stack, NAME):
        yield


@contextmanager
def reporting_to(scout: Scout) -> Iterator[None]:
    """:func:`scout_attention` within this context and thread reports to ``scout``."""
    token = _current.set(scout)
    try:
        yield
    finally:
        _current.reset(token)


def scout_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """``query`` ``[1, H, S, D]`` over ``key``/``value`` ``[1, Hkv, N, D]`` → ``[1, S, H, Dv]``.

    ``attention_mask`` ``[1, 1 or H, S, N]``: boolean, True = visible, or additive. ``s_aux`` ``[H]``:
    logits of attention sinks, which take weight and give nothing.
    """
    scout = _current.get()
    _, heads, rows, width = query.shape
    kv_heads, tokens = key.shape[1], key.shape[2]
    scale = width**-0.5 if scaling is None else scaling
    out = query.new_empty((1, rows, heads, value.shape[-1]))
    step = max(1, BLOCK_WEIGHTS // (heads * tokens))
    for a in range(0, rows, step):
        asked = query[0, :, a : a + step]  # [H, s, D]
        n = asked.shape[1]
        # KV heads are shared by groups of query heads, never repeated.
        grouped = asked.reshape(kv_heads, -1, width)  # [Hkv, G·s, D]
        logits = (grouped @ key[0].mT).float().view(heads, n, tokens).mul_(scale)
        if softcap is not None:
            logits.div_(softcap).tanh_().mul_(softcap)
        mask = attention_mask[0, :, a : a + step]
        if mask.dtype == torch.bool:
            logits.masked_fill_(~mask, torch.finfo(torch.float32).min)
        else:
            logits.add_(mask)
        if s_aux is not None:
            sinks = s_aux.float().view(heads, 1, 1).expand(-1, n, 1)
            logits = torch.cat((logits, sinks), dim=-1)
        weights = logits.softmax(-1)[..., :tokens]
        scout.add(weights, a, rows)
        mixed = weights.to(value.dtype).reshape(kv_heads, -1, tokens) @ value[0]
        out[0, a : a + step] = mixed.view(heads, n, -1).transpose(0, 1)
    scout.layers += 1
    return out, None
