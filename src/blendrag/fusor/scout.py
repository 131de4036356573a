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
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from blendrag.fusor.attention import implementation
from blendrag.fusor.rows import Rows
from blendrag.model.structure import DecoderStack

NAME = "blendrag_scout"
#: Attention weights held at a time, in elements: rows are attended in blocks of about this size.
BLOCK_WEIGHTS = 1 << 23


class Scouted(Exception):
    """Ends a scout pass once the layers that count were seen; never seen outside of the fusor."""


class Scout:
    """Adds up the attention that the last ``asking`` rows pay to every prompt token.

    ``layers`` are those that count (``None``: all); nobody needs what comes after them. ``sqrt_attention``:
    see :attr:`SelectionPolicy.sqrt_attention`. ``rows`` are those of the pass, whose masks they make;
    ``None`` where the forward brings masks.
    """

    def __init__(
        self,
        prompt_tokens: int,
        asking: int,
        device: torch.device,
        layers: range | None = None,
        sqrt_attention: bool = False,
        rows: Rows | None = None,
    ) -> None:
        self.rows = rows
        self.layers = 0
        """Attention calls seen; 0 after a pass: the model does not use transformers' interface."""
        self._prompt_tokens = prompt_tokens
        self._device = device
        self._counting = layers
        self._damps = sqrt_attention
        self._asking = asking
        self._sums: list[torch.Tensor] = []

    def ends_before(self, layer: int) -> bool:
        """Whether no layer from this one on counts."""
        return self._counting is not None and layer >= self._counting.stop

    @property
    def attention(self) -> torch.Tensor:
        """``[N]`` float32, summed over rows, heads and layers."""
        if not self._sums:
            return torch.zeros(self._prompt_tokens, dtype=torch.float32, device=self._device)
        return torch.stack(self._sums).sum(0)

    def add(self, weights: torch.Tensor, first_row: int, rows: int) -> None:
        """``weights`` ``[H, s, N]`` are of the rows from ``first_row`` on, out of ``rows``."""
        asked = weights[:, max(0, rows - self._asking - first_row) :]
        if self._counting is None or self.layers in self._counting:
            self._sums.append((asked.sqrt() if self._damps else asked).sum((0, 1)))


_current: ContextVar[Scout] = ContextVar(NAME)


@contextmanager
def scouting(stack: DecoderStack, scout: Scout) -> Iterator[None]:
    """Forwards of ``stack`` within this context and thread report to ``scout``."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, scout_attention)
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
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """``query`` ``[1, H, S, D]`` over ``key``/``value`` ``[1, Hkv, N, D]`` → ``[1, S, H, Dv]``.

    ``attention_mask`` ``[1, 1 or H, S, N]``: boolean, True = visible, or additive; ``None`` where the scout
    has rows. ``s_aux`` ``[H]``: logits of attention sinks, which take weight and give nothing.
    """
    scout = _current.get()
    _, heads, rows, width = query.shape
    kv_heads, tokens = key.shape[1], key.shape[2]
    sharing = heads // kv_heads
    scale = width**-0.5 if scaling is None else scaling
    parts = []
    step = max(1, BLOCK_WEIGHTS // (heads * tokens))
    for a in range(0, rows, step):
        asked = query[0, :, a : a + step]  # [H, s, D]
        n = asked.shape[1]
        if attention_mask is not None:
            bias = _additive(attention_mask[0, :, a : a + step], query.dtype)
            bias = bias.expand(heads, n, tokens).reshape(-1, sharing * n, tokens)
        else:
            assert scout.rows is not None, "a scout without rows brings masks"
            bias = scout.rows.bias(a, a + n, sliding_window, query.dtype, sharing)
        # KV heads are shared by groups of query heads, never repeated.
        grouped = asked.reshape(kv_heads, -1, width)  # [Hkv, G·s, D]
        if softcap is None:
            logits = torch.baddbmm(bias, grouped, key[0].mT, alpha=scale)
        else:
            logits = (grouped @ key[0].mT).float().mul_(scale / softcap).tanh_().mul_(
                softcap
            ) + bias
        if s_aux is not None:
            sinks = s_aux.view(kv_heads, sharing, 1, 1).expand(-1, -1, n, 1)
            sinks = sinks.reshape(kv_heads, -1, 1)
            logits = torch.cat((logits, sinks.to(logits.dtype)), dim=-1)
        weights = logits.softmax(-1, dtype=torch.float32)[..., :tokens]
        scout.add(weights.reshape(heads, n, tokens), a, rows)
        mixed = weights.to(value.dtype) @ value[0]  # [Hkv, G·s, Dv]
        parts.append(mixed.view(heads, n, -1))
    scout.layers += 1
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return out.transpose(0, 1)[None], None


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask that may be boolean, True = visible, as what is added to logits."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
