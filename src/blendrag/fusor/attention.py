"""Attention of selected rows, registered beside transformers' own implementations.

Replaces ``sdpa`` for the one blended forward: rows are attended in blocks whose keys end at the
block's last row, KV heads are never repeated. It is used only where a tiny forward shows that the
model's layers pass it what it needs (:func:`serves`); elsewhere the explicit mask of
:meth:`Rows.mask` goes to the model's own implementation, which is also the reference it is tested
against.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from blendrag.fusor.rows import AnyRows, Block, Rows
from blendrag.model.kv_compare import NOISE, content, magnitude, misfit
from blendrag.model.sharing import in_this_thread
from blendrag.model.structure import DecoderStack

NAME = "blendrag"
#: The same while :func:`serves` looks on.
PROBE_NAME = "blendrag_probe"
#: Keyword by which the rows travel through the decoder layer to the attention function.
ROWS_KEYWORD = "blend_rows"
#: Where folding a bias for one call is cheaper than not to: a GPU has no fused kernel for a mask
#: over KV heads that are shared.
FOLDS_ANYWAY = ("cuda",)
#: Things an attention implementation may be asked for that this one does not do.
UNSERVED = ("softcap", "s_aux", "position_bias", "cache")


class NotServedError(Exception):
    """This model's attention needs something else; internal to :func:`serves`."""


def blend_attention(
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
    """``query`` ``[1, H, S, D]`` over ``key``/``value`` ``[1, Hkv, N, D]`` → ``[1, S, H, D]``."""
    rows: AnyRows | None = kwargs.get(ROWS_KEYWORD)
    if rows is None or attention_mask is not None:
        raise NotServedError("layer does not pass the selected rows on to its attention")
    if any(kwargs.get(name) is not None for name in UNSERVED):
        raise NotServedError("attention asks for more than scaled dot products")
    rows.attended = True
    outs = [
        _attend(
            own, query[:, :, a:b], key[:, :, lo:hi], value[:, :, lo:hi], scaling, sliding_window
        )
        for _, own, a, b, lo, hi in rows.parts
    ]
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1), None


def _attend(
    rows: Rows,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    heads, kv_heads = query.shape[1], key.shape[1]
    if window is not None and window >= rows.prompt_tokens:
        window = None
    if rows.covers_prompt and window is None:
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=heads != kv_heads
        )
        return out.transpose(1, 2)
    sharing = heads // kv_heads
    parts = [
        _attend_block(block, query, key, value, scaling, sharing)
        for block in rows.blocks(window, query.dtype, sharing)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _attend_block(
    block: Block,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    sharing: int,
) -> torch.Tensor:
    """``[1, s, H, D]`` of the block's rows."""
    a, b, lo, hi, bias = block
    asked = query[:, :, a:b]
    if sharing > 1 and bias.shape[0] == b - a and query.device.type in FOLDS_ANYWAY:
        bias = block.folded(sharing).bias
    if bias.shape[0] != b - a:
        # torch's CPU kernel (2.13) would pack K and V anew for every head that shares them.
        asked = asked.reshape(1, key.shape[1], -1, asked.shape[-1])  # [1, Hkv, G·s, D]
    out = F.scaled_dot_product_attention(
        asked,
        key[:, :, lo:hi],
        value[:, :, lo:hi],
        attn_mask=bias,
        scale=scaling,
        enable_gqa=asked.shape[1] != key.shape[1],
    )
    return out.reshape(1, query.shape[1], b - a, -1).transpose(1, 2)


class _Override(NamedTuple):
    name: str
    configs: frozenset[int]
    """By ``id``."""


_override: ContextVar[_Override | None] = ContextVar("blendrag_implementation", default=None)


@contextmanager
def implementation(stack: DecoderStack, name: str) -> Iterator[None]:
    """Run the stack's attention with implementation ``name``, in this thread and context only."""
    _let_implementation_differ()
    ALL_ATTENTION_FUNCTIONS.register(NAME, blend_attention)
    configs = [stack.base.config, stack.config, *(a.config for a in stack.attentions)]
    token = _override.set(_Override(name, frozenset(id(config) for config in configs)))
    try:
        yield
    finally:
        with suppress(ValueError):  # left in another context than it was entered in
            _override.reset(token)


@functools.cache
def _let_implementation_differ() -> None:
    """Have configs answer our own forwards with the implementation of :func:`implementation`.

    transformers (5.17) asks the config in every layer and for every mask, and has no other way to
    choose for one call. To set it on the config would change forwards of other threads too. So the
    property that all configs share looks at the context first; elsewhere it reads and writes what it
    always did.
    """
    stock = PreTrainedConfig._attn_implementation

    def get(config: PreTrainedConfig) -> Any:
        # dynamo cannot trace a ContextVar, and what it traces is never ours; is_compiling() would also
        # be true here while another thread compiles (torch 2.13)
        override = None if torch.compiler.is_dynamo_compiling() else _override.get()
        if override is not None and id(config) in override.configs:
            return override.name
        return stock.fget(config)

    PreTrainedConfig._attn_implementation = property(get, stock.fset, doc=stock.__doc__)


def _slides(stack: DecoderStack) -> list[bool]:
    """Whether each layer has a sliding window, by the config."""
    if getattr(stack.config, "sliding_window", None) is None:
        return [False] * len(stack.layers)
    declared = getattr(stack.config, "layer_types", None)
    return [
        kind == "sliding_attention"
        for kind in declared or ["sliding_attention"] * len(stack.layers)
    ]


@torch.inference_mode()
def serves(stack: DecoderStack) -> bool:
    """Whether :func:`blend_attention` reproduces this model's own attention, measured."""
    if stack.config._attn_implementation == "eager":
        return False
    device = next(stack.base.parameters()).device
    ids = torch.tensor([[3, 1, 4, 1, 5, 9]], device=device)
    rows = Rows(torch.arange(6, device=device), 6)
    windows: list[int | None] = []

    def watched(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        windows.append(kwargs.get("sliding_window"))
        return blend_attention(*args, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register(PROBE_NAME, watched)

    def pass_rows(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, ROWS_KEYWORD: rows}

    expected = stack.base(input_ids=ids, use_cache=False).last_hidden_state
    hook = in_this_thread(pass_rows)
    handles = [la.register_forward_pre_hook(hook, with_kwargs=True) for la in stack.layers]
    try:
        with implementation(stack, PROBE_NAME):
            got = stack.base(input_ids=ids, use_cache=False).last_hidden_state
    except (NotServedError, TypeError):
        return False
    finally:
        for handle in handles:
            handle.remove()
    if not rows.attended:  # the model goes its own way, whatever its config says
        return False
    if any(s and w is None for s, w in zip(_slides(stack), windows, strict=False)):
        return False  # its windows are in its masks alone, which few tokens do not show
    # Per channel: trained models have a few channels that are far larger than the rest.
    noise = NOISE.get(expected.dtype, NOISE[torch.bfloat16]) * content(
        expected, expected.roll(1, -2)
    )
    rounding = torch.finfo(expected.dtype).eps * magnitude(expected)
    return misfit(got, expected, noise + rounding).fits
