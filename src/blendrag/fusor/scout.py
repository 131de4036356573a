"""The scout pass: what the question attends to, observed over stored KV before anything is recomputed.

One forward of the fresh tokens, with attention written out so that its weights can be summed: as slow as
``eager`` attention over few rows, and exact with softcaps, attention sinks and any mask. Its K and V are
discarded: the blended forward computes the fresh tokens again, over recomputed chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import nn

from blendrag.errors import is_out_of_memory
from blendrag.fusor.attention import implementation
from blendrag.fusor.rows import Rows
from blendrag.model.compat import register_attention
from blendrag.model.structure import DecoderStack
from blendrag.model.windows import window_of

NAME = "blendrag_scout"
#: Attention weights held at a time, in elements: rows are attended in blocks of about this size.
BLOCK_WEIGHTS = 1 << 23


class Scout:
    """Sums the attention that the last ``asking`` rows of one prompt pay to every token of it.

    ``counting``: the layers to sum (``None``: all); the pass may end after them. ``sqrt``: sum square roots.
    ``rows``: those of the pass, which mask it; ``None`` if the forward brings masks.
    """

    def __init__(
        self,
        asking: int,
        counting: range | None = None,
        sqrt: bool = False,
        rows: Rows | None = None,
    ) -> None:
        self.rows = rows
        self.layers = 0
        """Attention calls seen."""
        self._counting = counting
        self._sqrt = sqrt
        self._asking = asking
        self._sums: list[torch.Tensor] = []

    def ends_before(self, layer: int) -> bool:
        """Whether no layer from this one on is summed."""
        return self._counting is not None and layer >= self._counting.stop

    @property
    def attention(self) -> torch.Tensor | None:
        """``[N]`` float32, summed over rows, heads and layers; ``None`` if the model does not compute
        attention through transformers' interface."""
        return torch.stack(self._sums).sum(0) if self._sums else None

    def add(self, weights: torch.Tensor, first_row: int, rows: int) -> None:
        """``weights`` ``[H, s, N]`` of the rows from ``first_row`` on, out of ``rows``."""
        block = weights[:, max(0, rows - self._asking - first_row) :]
        if self._counting is None or self.layers in self._counting:
            self._sums.append((block.sqrt() if self._sqrt else block).sum((0, 1)))


class Observed(NamedTuple):
    """The rows and keys of a forward that a scout observes, by default all."""

    scout: Scout
    rows: slice = slice(None)
    keys: slice = slice(None)


_observed: ContextVar[Callable[[], Sequence[Observed]]] = ContextVar(NAME)


@contextmanager
def scouting(stack: DecoderStack, observed: Callable[[], Sequence[Observed]]) -> Iterator[None]:
    """Forwards of ``stack`` in this context and thread report to scouts; ``observed()`` is called in each
    layer, and what it returns covers all rows in order."""
    register_attention(NAME, scout_attention)
    token = _observed.set(observed)
    try:
        with implementation(stack, NAME):
            yield
    finally:
        _observed.reset(token)


@torch.inference_mode()
def observes(stack: DecoderStack) -> bool:
    """Whether a scout sees this model's attention, measured. Falcon's is its own."""
    device = next(stack.base.parameters()).device
    ids = torch.tensor([[3, 1, 4]], device=device)
    scout = Scout(1, rows=Rows(torch.arange(3, device=device), 3))
    try:
        with scouting(stack, lambda: [Observed(scout)]):
            stack.base(input_ids=ids, use_cache=False)
    except Exception as exc:  # attention of any model, without the mask that it expects
        if is_out_of_memory(exc):
            raise
        return False
    return scout.layers > 0


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

    ``attention_mask`` ``[1, 1 or H, S, N]``: boolean, True = visible, or additive; ``None`` if the scouts
    have rows. ``s_aux`` ``[H]``: logits of attention sinks, which take weight and have no value.
    """
    heads, kv_heads, width = query.shape[1], key.shape[1], query.shape[-1]
    sharing = heads // kv_heads  # KV heads are shared by groups of query heads, never repeated
    scale = width**-0.5 if scaling is None else scaling
    window = window_of(module, sliding_window)
    parts = []
    for scout, own, own_keys in _observed.get()():
        rows, keys, values = query[0, :, own], key[0, :, own_keys], value[0, :, own_keys]
        tokens = keys.shape[1]
        step = max(1, BLOCK_WEIGHTS // (heads * tokens))
        for a in range(0, rows.shape[1], step):
            block = rows[:, a : a + step]  # [H, s, D]
            n = block.shape[1]
            if attention_mask is not None:
                bias = _additive(attention_mask[0, :, a : a + step], query.dtype)
                bias = bias.expand(heads, n, tokens).reshape(-1, sharing * n, tokens)
            else:
                assert scout.rows is not None, "a scout without rows needs masks"
                bias = scout.rows.bias(a, a + n, window, query.dtype, sharing)
            grouped = block.reshape(kv_heads, -1, width)  # [Hkv, G·s, D]
            if softcap is None:
                logits = torch.baddbmm(bias, grouped, keys.mT, alpha=scale)
            else:
                logits = (grouped @ keys.mT).float().mul_(scale / softcap).tanh_()
                logits = logits.mul_(softcap) + bias
            if s_aux is not None:
                sinks = s_aux.to(logits.dtype).view(kv_heads, sharing, 1).expand(-1, -1, n)
                logits = torch.cat((logits, sinks.reshape(kv_heads, -1, 1)), dim=-1)
            weights = logits.softmax(-1, dtype=torch.float32)[..., :tokens]
            scout.add(weights.reshape(heads, n, tokens), a, rows.shape[1])
            parts.append((weights.to(value.dtype) @ values).view(heads, n, -1))  # [H, s, Dv]
        scout.layers += 1
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return out.transpose(0, 1)[None], None


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask that may be boolean (True = visible) as what is added to logits."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
