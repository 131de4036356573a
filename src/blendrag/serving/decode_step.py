"""One forward that decodes a token for each of several requests.

The model sees a batch of one-token sequences, each at its own position. Keys and values go to each request's
own cache, and each row attends to that cache only; there is no padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.cache_utils import Cache, DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from blendrag.fusor.attention import UNSERVED, NotServedError, implementation
from blendrag.fusor.cache import BlendCache, BlendLayer
from blendrag.model.adapter import ModelAdapter

NAME = "blendrag_decode"
#: Arguments of a forward that joint steps provide themselves, or that do not matter for one token.
_PROVIDED = frozenset(
    ("input_ids", "past_key_values", "position_ids", "cache_position", "attention_mask", "use_cache",
     "return_dict", "logits_to_keep")
)  # fmt: skip


@dataclass(frozen=True)
class DecodeStep:
    """A forward of one request that decodes a token."""

    adapter: ModelAdapter
    forward: Callable[..., Any]
    """The model's own."""
    ids: torch.Tensor
    """``[1, 1]``"""
    cache: BlendCache

    @classmethod
    def of(
        cls, adapter: ModelAdapter, forward: Callable[..., Any], given: Mapping[str, Any]
    ) -> DecodeStep | None:
        """The step that a call of ``forward`` with these arguments is; ``None`` if it must run alone."""
        ids, cache = given.get("input_ids"), given.get("past_key_values")
        if not isinstance(ids, torch.Tensor) or ids.shape != (1, 1):
            return None
        if not isinstance(cache, BlendCache) or not cache.is_one_sequence:
            return None
        more = (given[name] for name in given.keys() - _PROVIDED)
        if any(value is not None and value is not False for value in more):
            return None
        limit = adapter.blend_limit_tokens
        if limit is not None and cache.get_seq_length() >= limit:
            return None  # all rows of a forward use one rotary table
        return cls(adapter, forward, ids, cache)


def decoded_together(steps: Sequence[DecodeStep]) -> list[Any]:
    """What the forward of each step would return: logits ``[1, 1, V]`` and its cache.

    After an error all caches are as before.
    """
    adapter, forward = steps[0].adapter, steps[0].forward
    lengths = [step.cache.get_seq_length() for step in steps]
    rows = _Rows([step.cache for step in steps])
    try:
        with torch.inference_mode(), _attending(adapter, rows):
            output = forward(
                input_ids=torch.cat([step.ids for step in steps]),  # [R, 1]
                position_ids=torch.tensor(lengths, device=adapter.device)[:, None],  # [R, 1]
                past_key_values=rows,
                use_cache=True,
                return_dict=True,
            )
    except BaseException:
        for step, length in zip(steps, lengths, strict=True):
            step.cache.show(length)
        raise
    logits = output.logits  # [R, 1, V]
    return [
        type(output)(logits=logits[row : row + 1], past_key_values=step.cache)
        for row, step in enumerate(steps)
    ]


class _RowsLayer(DynamicLayer):
    """The same layer of several caches."""

    def __init__(self, layers: Sequence[BlendLayer], rows: _Rows) -> None:
        super().__init__()
        self._layers = layers
        self._rows = rows

    def get_seq_length(self) -> int:
        """Of the longest, as if the others were padded."""
        return max(layer.get_seq_length() for layer in self._layers)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append row i ``[1, Hkv, 1, D]`` to layer i. :func:`attend` takes what they hold from there."""
        fresh = zip(key_states.split(1), value_states.split(1), strict=True)
        self._rows.held = [
            layer.update(*row) for layer, row in zip(self._layers, fresh, strict=True)
        ]
        return key_states, value_states


class _Rows(Cache):
    """The caches of several requests, one a row."""

    def __init__(self, caches: Sequence[BlendCache]) -> None:
        layers = zip(*(cache.layers for cache in caches), strict=True)
        super().__init__(layers=[_RowsLayer(same, self) for same in layers])
        self.held: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
        """K and V ``[1, Hkv, N, D]`` of each row in the layer that was updated last."""


_rows: ContextVar[_Rows | None] = ContextVar("blendrag_decode_rows", default=None)


@contextmanager
def _attending(adapter: ModelAdapter, rows: _Rows) -> Iterator[None]:
    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    token = _rows.set(rows)
    try:
        with implementation(adapter.stack, NAME):
            yield
    finally:
        _rows.reset(token)


def attend(
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
    """``query`` ``[R, H, 1, D]``, row i over what its request's cache holds → ``[R, 1, H, D]``."""
    rows = _rows.get()
    if rows is None or attention_mask is not None or len(rows.held) != len(query):
        raise NotServedError("the layer does not attend to what its cache holds")
    if any(kwargs.get(name) is not None for name in UNSERVED):
        raise NotServedError("the attention needs more than scaled dot products")
    count, heads, _, width = query.shape
    kv_heads = key.shape[1]
    folded = query.reshape(count, kv_heads, heads // kv_heads, width)
    outs = []
    for row, (keys, values) in zip(folded.split(1), rows.held, strict=True):
        if sliding_window is not None:
            keys, values = keys[:, :, -sliding_window:], values[:, :, -sliding_window:]
        outs.append(F.scaled_dot_product_attention(row, keys, values, scale=scaling))
    return torch.cat(outs).reshape(count, 1, heads, -1), None
