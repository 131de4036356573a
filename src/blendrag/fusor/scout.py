"""The scout pass: what the question attends to, observed over stored KV before anything is recomputed.

One forward of the fresh tokens. In layers whose attention is summed it is written out: by products that keep
its weights in the model's dtype (:func:`_by_products`), or, with softcaps, attention sinks, windows or masks,
as in ``eager`` attention (:func:`_written_out`), the reference in the tests. Other layers attend as in a
blended forward. K and V are discarded: that computes the fresh tokens again, over recomputed chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

from blendrag.errors import is_out_of_memory
from blendrag.fusor.attention import attend, implementation, needs_more
from blendrag.fusor.rows import Rows
from blendrag.model.compat import register_attention
from blendrag.model.structure import DecoderStack
from blendrag.model.windows import Window, window_of

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
        self.asking = asking
        self._counting = counting
        self._sqrt = sqrt
        self._sums: list[torch.Tensor] = []

    def ends_before(self, layer: int) -> bool:
        """Whether no layer from this one on is summed."""
        return self._counting is not None and layer >= self._counting.stop

    @property
    def sums_layer(self) -> bool:
        """Whether the attention of the layer under way is summed."""
        return self._counting is None or self.layers in self._counting

    @property
    def attention(self) -> torch.Tensor | None:
        """``[N]`` float32, summed over rows, heads and layers; ``None`` if the model does not compute
        attention through transformers' interface."""
        return torch.stack(self._sums).sum(0) if self._sums else None

    @cached_property
    def rows_before(self) -> Rows:
        """The rows of the pass that do not ask."""
        assert self.rows is not None
        return self.rows.first(self.rows.count - self.asking)

    def add(self, weights: torch.Tensor) -> None:
        """Add ``weights`` ``[H, s, N]`` of rows that ask, or those of a KV head as rows of one head.

        They may be changed in place.
        """
        if self.sums_layer:
            if self._sqrt:
                weights.sqrt_()
            # a product: torch's sums over rows (2.13) take a CPU longer than the softmax
            ones = weights.new_ones((1, 1, 1)).expand(len(weights), 1, weights.shape[1])
            self._sums.append((ones @ weights).float().sum((0, 1)))


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
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """``query`` ``[1, H, S, D]`` over ``key``/``value`` ``[1, Hkv, N, D]`` → ``[1, S, H, Dv]``.

    ``attention_mask`` ``[1, 1 or H, S, N]``: boolean, True = visible, or additive; ``None`` if the scouts
    have rows. ``s_aux`` ``[H]``: logits of attention sinks, which take weight and have no value.
    """
    window = window_of(module, sliding_window)
    is_plain = attention_mask is None and softcap is None and s_aux is None
    is_plain = is_plain and not needs_more(kwargs)
    parts = []
    for scout, own, own_keys in _observed.get()():
        rows = scout.rows
        qkv = query[:, :, own], key[:, :, own_keys], value[:, :, own_keys]
        if is_plain and rows is not None and not scout.sums_layer:
            parts.append(attend(rows, *qkv, scaling, window))
        elif is_plain and rows is not None and not _hides(window, rows.prompt_tokens):
            parts.append(_by_products(scout, *qkv, scaling))
        else:
            parts.append(_written_out(scout, *qkv, attention_mask, scaling, softcap, s_aux, window))
        scout.layers += 1
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), None


def _hides(window: Window | None, tokens: int) -> bool:
    """Whether a row of so many tokens may not see an earlier one."""
    return window is not None and window.tokens < tokens


def _by_products(
    scout: Scout, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """:func:`_written_out` without a window or anything else: less memory, and fewer passes over it.

    The rows that ask are the prompt's last ones and see all keys before them, so only the rest is masked.
    """
    heads, kv_heads, width = query.shape[1], key.shape[1], query.shape[-1]
    tokens, before = key.shape[2], query.shape[2] - scout.asking
    scale = width**-0.5 if scaling is None else scaling
    parts = []
    if before:
        earlier = query[:, :, :before]
        parts.append(attend(scout.rows_before, earlier, key, value, scaling, None))
    unused, asked = query.new_empty((1, 1, 1)), tokens - scout.asking
    step = max(1, BLOCK_WEIGHTS // (heads * tokens))
    for a in range(asked, tokens, step):
        block = query[0, :, before + a - asked :][:, :step]  # [H, n, D]
        n = block.shape[1]
        grouped = block.reshape(kv_heads, -1, width)  # [Hkv, G·n, D]
        weights = torch.baddbmm(unused, grouped, key[0].mT, beta=0, alpha=scale)  # [Hkv, G·n, N]
        hidden = query.new_full((n, tokens - a), float("-inf")).triu_(1)
        weights.view(heads, n, tokens)[..., a:] += hidden
        torch.softmax(weights, -1, out=weights)
        out = (weights @ value[0]).view(heads, n, -1)
        scout.add(weights)
        parts.append(out.transpose(0, 1)[None])
    return torch.cat(parts, dim=1)


def _written_out(
    scout: Scout,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
    s_aux: torch.Tensor | None,
    window: Window | None,
) -> torch.Tensor:
    """Attention as in ``eager``, its weights in float32: the slow reference."""
    heads, kv_heads, width = query.shape[1], key.shape[1], query.shape[-1]
    sharing = heads // kv_heads  # KV heads are shared by groups of query heads, never repeated
    scale = width**-0.5 if scaling is None else scaling
    rows, keys, values = query[0], key[0], value[0]
    tokens, count = keys.shape[1], rows.shape[1]
    step, parts = max(1, BLOCK_WEIGHTS // (heads * tokens)), []
    for a in range(0, count, step):
        block = rows[:, a : a + step]  # [H, n, D]
        n = block.shape[1]
        if mask is not None:
            bias = _additive(mask[0, :, a : a + step], query.dtype)
            bias = bias.expand(heads, n, tokens).reshape(-1, sharing * n, tokens)
        else:
            assert scout.rows is not None, "a scout without rows needs masks"
            bias = scout.rows.bias(a, a + n, window, query.dtype, sharing)
        grouped = block.reshape(kv_heads, -1, width)  # [Hkv, G·n, D]
        if softcap is None:
            logits = torch.baddbmm(bias, grouped, keys.mT, alpha=scale)
        else:
            logits = (grouped @ keys.mT).float().mul_(scale / softcap).tanh_()
            logits = logits.mul_(softcap) + bias
        if s_aux is not None:
            sinks = s_aux.to(logits.dtype).view(kv_heads, sharing, 1).expand(-1, -1, n)
            logits = torch.cat((logits, sinks.reshape(kv_heads, -1, 1)), dim=-1)
        weights = logits.softmax(-1, dtype=torch.float32)[..., :tokens].reshape(heads, n, tokens)
        out = (weights.view(kv_heads, -1, tokens).to(values.dtype) @ values).view(heads, n, -1)
        scout.add(weights[:, max(0, count - scout.asking - a) :])
        parts.append(out)  # [H, n, Dv]
    return torch.cat(parts, dim=1).transpose(0, 1).contiguous()[None]  # AFMoE takes views of it


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask that may be boolean (True = visible) as what is added to logits."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
