"""Attention of selected rows and of decoded tokens, registered with transformers like its own.

Selected rows are attended in blocks whose keys end at the block's last row; KV heads are never repeated. Used
only if a tiny forward shows that the model's layers pass it what it needs (:func:`serves`). Otherwise the
model's own implementation gets the explicit mask of :attr:`Rows.mask`, also the reference in the tests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig

from blendrag.errors import is_out_of_memory
from blendrag.fusor.rows import AnyRows, AttentionBlock, Rows
from blendrag.model import compat
from blendrag.model.kv_compare import NOISE, content, magnitude, misfit
from blendrag.model.sharing import only_here
from blendrag.model.structure import DecoderStack
from blendrag.model.windows import Window, window_of

NAME = "blendrag"
#: The name of :func:`blend_attention` while :func:`serves` watches it.
PROBE_NAME = "blendrag_probe"
#: Keyword that carries the rows through the decoder layer to the attention function.
ROWS_KEYWORD = "blend_rows"
#: Devices without a fused kernel for a mask over shared KV heads: there a bias is folded for each call.
FOLDS_ANYWAY = ("cuda",)
#: Dtypes that torch's fused CUDA kernels take.
HALF_PRECISION = (torch.bfloat16, torch.float16)
#: Query heads per KV head from which torch's CPU kernel (2.13) is faster with heads as rows of one head, in
#: 16 bits on a CPU with AMX. In float32 and on other CPUs it always is: a single row is not computed as a
#: product of matrices there.
FOLDED_HEADS = 4
#: Rows from which torch's fused kernel (2.13) is faster with heads apart in bfloat16 on a CPU with AMX: the
#: bias is then that of one head.
APART_ROWS = 64
#: An odd number of rows below this is attended with one row more where torch's fused kernel (2.13) takes two
#: at a time: one row takes twice as long as two, and three and seven a tenth longer than four and eight.
EVEN_ROWS = 8
#: Tokens of a part at least, where the threads of a CPU share the tokens of one head.
PART_TOKENS = 512
#: Tokens from which one more is attended sooner by products: torch's CPU kernel (2.13) calls oneDNN for every
#: 512 tokens of a head.
PRODUCT_TOKENS = 2048
#: Latest tokens, of which or of the first token one usually has the largest logit.
LATEST_TOKENS = 16
#: Arguments of attention implementations that this one does not serve.
UNSERVED = ("softcap", "s_aux", "position_bias", "cache")


class NotServedError(Exception):
    """The model's attention needs something else. Never leaves :func:`serves`."""


def blend_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """``query`` ``[1, H, S, D]`` over ``key``/``value`` ``[1, Hkv, N, D]`` → ``[1, S, H, D]``."""
    rows: AnyRows | None = kwargs.get(ROWS_KEYWORD)
    if rows is None or attention_mask is not None:
        raise NotServedError("the layer does not pass the selected rows to its attention")
    require_plain(kwargs)
    rows.attended = True
    window = window_of(module, sliding_window)
    outs = []
    for _, own, a, b, lo, hi in rows.parts:
        qkv = query[:, :, a:b], key[:, :, lo:hi], value[:, :, lo:hi]
        outs.append(attend(own, *qkv, scaling, window))
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1), None


def needs_more(arguments: Mapping[str, Any]) -> bool:
    """Whether an attention with these further arguments is more than scaled dot products."""
    return any(arguments.get(name) is not None for name in UNSERVED)


def require_plain(arguments: Mapping[str, Any]) -> None:
    """Raise :class:`NotServedError` if the attention :func:`needs_more`."""
    if needs_more(arguments):
        raise NotServedError("the attention needs more than scaled dot products")


def attend(
    rows: Rows,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: Window | None,
) -> torch.Tensor:
    """``[1, S, H, D]`` of one prompt's rows."""
    heads, kv_heads = query.shape[1], key.shape[1]
    window = None if window is not None and window.tokens >= rows.prompt_tokens else window
    if rows.covers_prompt and window is None:
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=heads != kv_heads
        )
        return out.transpose(1, 2).contiguous()  # AFMoE takes views of it
    sharing = heads // kv_heads
    outs = []
    if window is None and has_fused_kernels(key, value):
        stripes = rows.stripes(query.dtype, sharing)
        outs = [_striped(stripe, query, key, value, scaling) for stripe in stripes]
        if outs:
            return torch.cat(outs, dim=1)
    multiplies = sharing > 1 and _multiplies(query)
    keys = _centred(key) if multiplies else key
    is_apart = rows.count >= APART_ROWS and _has_heads_apart(query)
    for block in rows.blocks(window, query.dtype, 1 if is_apart else sharing):
        a, b, lo, hi, bias = block
        queries = query[:, :, a:b]
        if sharing > 1 and bias.shape[0] == b - a and query.device.type in FOLDS_ANYWAY:
            bias = block.folded(sharing).bias
        folds = bias.shape[0] != b - a
        if folds:
            # torch's CPU kernel (2.13) would pack K and V again for every head that shares them.
            queries = queries.reshape(1, kv_heads, -1, queries.shape[-1])  # [1, Hkv, G·s, D]
        qkv = queries, keys[:, :, lo:hi], value[:, :, lo:hi]
        if folds and multiplies:
            out = _by_products(*qkv, bias, scaling)
        else:
            out = F.scaled_dot_product_attention(
                *qkv, attn_mask=bias, scale=scaling, enable_gqa=queries.shape[1] != kv_heads
            )
        outs.append(out.reshape(1, heads, b - a, -1).transpose(1, 2))  # [1, s, H, D]
    return outs[0].contiguous() if len(outs) == 1 else torch.cat(outs, dim=1)


def has_fused_kernels(key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether :func:`~blendrag.model.compat.cuda_attention` serves such keys and values."""
    width = key.shape[-1]
    return (
        key.is_cuda
        and key.dtype in HALF_PRECISION
        and width % 8 == 0
        and width <= compat.FLASH_WIDTH
        and width == value.shape[-1]
        and compat.has_flash_attention(key.device.index)
    )


def _striped(
    stripe: AttentionBlock,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """``[1, s, H, D]`` of the stripe's rows. Keys that all rows see need no mask, which takes GPUs far less
    time; both parts are merged by their log-sum-exp."""
    a, b, lo, hi, bias = stripe
    heads, kv_heads = query.shape[1], key.shape[1]
    rows = query[:, :, a:b].reshape(1, kv_heads, -1, query.shape[-1])  # [1, Hkv, G·s, D]
    kv = key[:, :, lo:hi], value[:, :, lo:hi]
    out, lse = compat.cuda_attention(rows, *kv, bias, scaling)
    if lo:
        seen, seen_lse = compat.cuda_attention(
            rows, key[:, :, :lo], value[:, :, :lo], None, scaling
        )
        share = torch.sigmoid(seen_lse - lse)[..., None]
        out = (out + share * (seen - out)).to(query.dtype)
    return out.reshape(1, heads, b - a, -1).transpose(1, 2)


def _multiplies(query: torch.Tensor) -> bool:
    """Whether :func:`_by_products` is the faster way for blocks of these rows: in bfloat16, on CPUs without
    AMX, which torch's fused kernel (2.13) uses and the softmax of products does not."""
    return query.device.type == "cpu" and query.dtype == torch.bfloat16 and not has_amx()


def _has_heads_apart(query: torch.Tensor) -> bool:
    """Whether :data:`APART_ROWS` holds for these rows."""
    return query.device.type == "cpu" and query.dtype == torch.bfloat16 and has_amx()


@cache
def has_amx() -> bool:
    """Whether this CPU multiplies bfloat16 in tiles."""
    return bool(torch.cpu.get_capabilities().get("amx_bf16"))


def _centred(key: torch.Tensor) -> torch.Tensor:
    """Keys less their mean, which changes no softmax: logits are smaller and lose less when rounded."""
    return (key.float() - key.mean(dim=2, keepdim=True, dtype=torch.float32)).to(key.dtype)


def _by_products(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """Attention with its logits in memory, rounded to the dtype as in transformers' ``eager``; faster than
    torch's fused kernel (2.13) on a CPU with bfloat16 products."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    logits = torch.baddbmm(bias, query[0], key[0].mT, alpha=scaling)  # [Hkv, G·s, N]
    return logits.softmax(-1) @ value[0]


def decode_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' ``sdpa``, and :func:`attend_token` for one token.

    ``query`` ``[B, H, S, D]`` over ``key``/``value`` ``[B, Hkv, N, D]`` → ``[B, S, H, D]``.
    """
    has_more = dropout or needs_more(kwargs)
    is_masked_by_head = attention_mask is not None and attention_mask.shape[1] != 1
    is_stock = query.shape[1] == key.shape[1] and not wants_even_rows(query)
    if query.shape[2] != 1 or is_stock or has_more or is_masked_by_head:
        arguments = (module, query, key, value, attention_mask)
        return compat.stock_sdpa(*arguments, scaling=scaling, dropout=dropout, **kwargs)
    return attend_token(query, key, value, scaling, attention_mask), None


def attend_token(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one token: ``query`` ``[B, H, 1, D]`` over ``key``/``value`` ``[B, Hkv, N, D]`` →
    ``[B, 1, H, D]``, with a ``mask`` for all heads.

    K and V are read where they are. Heads that share them are rows of one head, which read them once, unless
    they are so few that torch's CPU kernel is faster with each of them alone.
    """
    batch, heads, _, width = query.shape
    kv_heads = key.shape[1]
    sharing = heads // kv_heads
    if mask is None and has_fused_kernels(key, value):
        # cuDNN, torch's default on an H200 (2.11), takes 35 ms to prepare each new length
        folded = query.reshape(batch, kv_heads, sharing, width)
        out, _ = compat.cuda_attention(folded, key, value, None, scaling)
        return out.reshape(batch, 1, heads, width)
    is_short = query.device.type == "cpu" and query.element_size() == 2 and sharing < FOLDED_HEADS
    if not (is_short and has_amx()) or key.shape[3] != value.shape[3]:
        query = query.reshape(batch, kv_heads, sharing, width)
    rows = query.shape[2]
    if mask is None and _is_long(query, key):
        return _token_by_products(query, key, value, scaling).reshape(1, 1, heads, -1)
    if wants_even_rows(query):
        query = with_one_row_more(query)
    parts = 1 if mask is not None else _parts(query, key, value)
    if parts > 1:
        out = _in_parts(query, key, value, scaling, parts)
    else:
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling, enable_gqa=query.shape[1] != kv_heads
        )
    return out[:, :, :rows].reshape(batch, 1, heads, -1)


def _is_long(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether :func:`_token_by_products` is the faster way for rows ``query`` ``[B, Hkv, G, D]``."""
    return (
        len(query) == 1
        and query.shape[2] > 1
        and key.shape[2] >= PRODUCT_TOKENS
        and _multiplies(query)
        and compat.cpu_multiplies_fast(query.dtype)
    )


def _token_by_products(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Attention of ``query`` ``[1, Hkv, G, D]``, which sees all keys, as two products → ``[1, Hkv, G, D]``.

    oneDNN copies the second factor of a product, which takes long for transposed keys, so K is the first.
    Products are rounded to the dtype. An estimate of the largest logit is subtracted before, so that those
    that matter are small and lose little.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    keys, queries = key[0], query[0].mT  # [Hkv, N, D], [Hkv, D, G]
    likely = torch.cat((keys[:, :1], keys[:, -LATEST_TOKENS:]), 1)
    largest = torch.bmm(likely, queries).amax(1, keepdim=True)  # [Hkv, 1, G]
    logits = torch.baddbmm(-scaling * largest, keys, queries, alpha=scaling)  # [Hkv, N, G]
    return torch.bmm(logits.mT.softmax(-1), value[0])[None]


def wants_even_rows(query: torch.Tensor) -> bool:
    """Whether torch's fused kernel (2.13) attends the rows of ``query`` ``[B, H, S, D]`` sooner with one row
    more: it multiplies pairs of rows in bfloat16."""
    rows = query.shape[2]
    is_odd = rows % 2 == 1 and rows < EVEN_ROWS
    return is_odd and _multiplies(query) and compat.cpu_multiplies_fast(query.dtype)


def with_one_row_more(query: torch.Tensor) -> torch.Tensor:
    return torch.cat((query, query[:, :, -1:]), dim=2)


def _parts(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """Into how many parts the tokens are cut, so that all threads compute: torch's CPU kernel (2.13) gives
    each of them whole heads."""
    heads, tokens = key.shape[1:3]
    if (
        query.device.type != "cpu"
        or len(query) > 1
        or query.shape[1] != heads
        or key.shape != value.shape
    ):
        return 1
    threads = torch.get_num_threads()
    return max(1, min(threads // math.gcd(heads, threads), tokens // PART_TOKENS))


def _in_parts(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, parts: int
) -> torch.Tensor:
    """Attention of ``query`` ``[1, H, S, D]`` over parts of equal length and the tokens that are left, merged
    by their log-sum-exps (Flash-Decoding, https://pytorch.org/blog/flash-decoding/)."""
    length = key.shape[2] // parts
    cut = [each[0, :, : parts * length].unflatten(1, (parts, length)) for each in (key, value)]
    keys, values = (each.transpose(0, 1) for each in cut)  # [P, H, L, D]
    out, lse = compat.cpu_flash_attention(
        query.expand(parts, -1, -1, -1), keys, values, scale=scaling
    )
    if parts * length < key.shape[2]:
        left = (each[:, :, parts * length :] for each in (key, value))
        last_out, last_lse = compat.cpu_flash_attention(query, *left, scale=scaling)
        out, lse = torch.cat((out, last_out)), torch.cat((lse, last_lse))
    return (out * lse.softmax(0)[..., None]).sum(0, keepdim=True).to(query.dtype)


@contextmanager
def fast_decoding(stack: DecoderStack) -> Iterator[None]:
    """Decode with :func:`decode_attention` where it helps, in this thread and context only."""
    if next(stack.base.parameters()).device.type not in ("cpu", "cuda"):
        yield
        return
    compat.replace_sdpa(_sdpa)
    token = _folds.set(True)
    try:
        yield
    finally:
        with suppress(ValueError):  # left in another context than it was entered in
            _folds.reset(token)


_folds: ContextVar[bool] = ContextVar("blendrag_folds", default=False)


def _sdpa(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' ``sdpa``, which folds heads within :func:`fast_decoding`."""
    folds = not torch.compiler.is_dynamo_compiling() and _folds.get()
    return (decode_attention if folds else compat.stock_sdpa)(*args, **kwargs)


@contextmanager
def implementation(stack: DecoderStack, name: str) -> Iterator[None]:
    """Run the stack's attention with implementation ``name``, in this thread and context only."""
    compat.choose_attention(_chosen)
    compat.register_attention(NAME, blend_attention)
    inner = (attention.config for attention in stack.attentions if hasattr(attention, "config"))
    configs = [stack.base.config, stack.config, *inner]
    token = _override.set((name, frozenset(id(config) for config in configs)))
    try:
        yield
    finally:
        with suppress(ValueError):  # left in another context than it was entered in
            _override.reset(token)


_override: ContextVar[tuple[str, frozenset[int]] | None] = ContextVar(
    "blendrag_implementation", default=None
)
"""The implementation to use, and the configs (by ``id``) that it applies to."""


def _chosen(config: PreTrainedConfig) -> str | None:
    """What :func:`implementation` runs in place of the implementation of ``config``."""
    # dynamo cannot trace a ContextVar, and never traces our forwards; is_compiling() would also be true
    # here while another thread compiles (torch 2.13)
    override = None if torch.compiler.is_dynamo_compiling() else _override.get()
    return override[0] if override is not None and id(config) in override[1] else None


@torch.inference_mode()
def serves(stack: DecoderStack) -> bool:
    """Whether :func:`blend_attention` reproduces this model's own attention, measured."""
    if compat.attention_name(stack.config) == "eager":
        return False
    device = next(stack.base.parameters()).device
    ids = torch.tensor([[3, 1, 4, 1, 5, 9]], device=device)
    rows = Rows(torch.arange(6, device=device), 6)
    windows: list[int | None] = []

    def watched(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        windows.append(kwargs.get("sliding_window"))
        return blend_attention(*args, **kwargs)

    compat.register_attention(PROBE_NAME, watched)

    def pass_rows(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, ROWS_KEYWORD: rows}

    expected = stack.base(input_ids=ids, use_cache=False).last_hidden_state
    hook = only_here(pass_rows)
    handles = [la.register_forward_pre_hook(hook, with_kwargs=True) for la in stack.layers]
    try:
        with implementation(stack, PROBE_NAME):
            got = stack.base(input_ids=ids, use_cache=False).last_hidden_state
    except Exception as exc:  # layers of any model, given what they may not know
        if is_out_of_memory(exc):
            raise
        return False
    finally:
        for handle in handles:
            handle.remove()
    if not rows.attended:  # the model ignores its config
        return False
    if any(slides and w is None for slides, w in zip(_slides(stack), windows, strict=False)):
        return False  # its windows are only in its masks, which six tokens do not show
    # Per channel: trained models have a few channels that are far larger than the rest.
    noise = NOISE.get(expected.dtype, NOISE[torch.bfloat16])
    allowed = noise * content(expected, expected.roll(1, -2))
    allowed += torch.finfo(expected.dtype).eps * magnitude(expected)
    return misfit(got, expected, allowed).fits


def _slides(stack: DecoderStack) -> list[bool]:
    """Whether each layer has a sliding window, by the config."""
    has_window = getattr(stack.config, "sliding_window", None) is not None
    kinds = getattr(stack.config, "layer_types", None) or ["sliding_attention"] * len(stack.layers)
    return [has_window and kind == "sliding_attention" for kind in kinds]
