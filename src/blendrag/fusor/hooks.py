"""Forward hooks on an unmodified model, for one blended forward.

:class:`Pack` says which rows a layer computes; the hooks slice the layer's arguments to those rows. They act
only on the forward that is given the pack's cache, because other threads may run the same modules meanwhile.
They serve exactly one forward, and are removed after it, whatever happens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from blendrag.errors import UnsupportedModelError
from blendrag.fusor.attention import NAME, ROWS_KEYWORD, implementation
from blendrag.fusor.fusion import Phase
from blendrag.fusor.pack import Pack
from blendrag.fusor.rows import AnyRows, take
from blendrag.model.structure import DecoderStack

#: Tensor arguments indexed by token in their last dimension (``[…, N]``).
BY_TOKEN = ("position_ids", "cache_position")
#: Arguments that are passed on as they are.
UNTOUCHED = ("hidden_states", "past_key_values", "past_key_value", "layer_past")

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@contextmanager
def hooked(
    stack: DecoderStack, pack: Pack, fast_attention: bool, observes: bool = True
) -> Iterator[None]:
    """Within this context the first forward of ``stack`` with the pack's cache is blended.

    ``observes``: scouts see the model's attention, and mask their rows themselves.
    """
    cache, timeline = pack.cache, pack.timeline
    names = _parameters(stack.layers[0])
    with ExitStack() as hooks:
        for fusion in pack.fusions:
            hooks.callback(fusion.close)
        cache.merge = pack.merge
        hooks.callback(cache.end_fusion)

        def begin(
            module: nn.Module, args: Any, kwargs: dict[str, Any] | None = None
        ) -> Arguments | None:
            if kwargs is None or not _carries(cache, args, kwargs):
                return None
            hooks.enter_context(_under_way(cache))
            if fast_attention:
                hooks.enter_context(implementation(stack, NAME))
            if (
                "logits_to_keep" in kwargs
            ):  # Gemma 4 would drop rows by itself where layers share KV
                kwargs = {**kwargs, "logits_to_keep": 0}
            if pack.needs_scout:
                with pack.scout_pass(stack):
                    module.forward(*args, **kwargs)
            return args, kwargs

        def finish(*_: Any) -> None:
            if _is_under_way(cache):
                hooks.close()

        def leave(index: int, *_: Any) -> None:
            if timeline is not None and _is_under_way(cache):
                timeline.leave(index)

        for index, layer in enumerate(stack.layers):
            slicing = _slicing(pack, index, names, not fast_attention, observes)
            hooks.callback(layer.register_forward_pre_hook(slicing, with_kwargs=True).remove)
            if timeline is not None:
                hooks.callback(layer.register_forward_hook(partial(leave, index)).remove)
        hooks.callback(stack.base.register_forward_pre_hook(begin, with_kwargs=True).remove)
        hooks.callback(stack.base.register_forward_hook(finish).remove)
        for fusion in pack.fusions:
            fusion.loader.start()
        yield


def _parameters(layer: nn.Module) -> list[str]:
    """Names of the parameters of a decoder layer's forward, in order."""
    return list(inspect.signature(type(layer).forward).parameters)[1:]


def _slicing(
    pack: Pack, index: int, names: Sequence[str], masked: bool, observes: bool
) -> Callable[..., Arguments | None]:
    """Forward pre-hook of layer ``index``: runs it on the pack's rows only.

    ``names``: of the layer's positional parameters. ``masked``: the model's own attention runs, with explicit
    masks.
    """

    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> Arguments | None:
        # torch passes no kwargs if the hook is removed after another thread began to run hooks
        if kwargs is None or not _is_under_way(pack.cache):
            return None
        pack.check(index)
        if pack.timeline is not None:
            pack.timeline.enter(index)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        hidden = args[0] if args else kwargs["hidden_states"]
        if hidden.shape[-3] != 1:  # [1, n, D], or more of them at once (Gemma 3n)
            raise UnsupportedModelError(
                f"a batch of {hidden.shape[-3]} sequences cannot be blended in one forward; "
                "blend one prompt at a time"
            )

        def arguments(rows: AnyRows, indices: torch.Tensor | None) -> Arguments:
            with_mask = masked and (pack.phase is not Phase.SCOUT or not observes)
            sliced = slice_kwargs(given, rows, with_mask)
            if not masked:
                sliced[ROWS_KEYWORD] = rows
            states = hidden if indices is None else hidden[..., indices, :]
            positional = [states, *(sliced.pop(name) for name in names[1 : len(args)])]
            if args:
                sliced.pop(names[0])
                return tuple(positional), sliced
            sliced["hidden_states"] = states
            return (), sliced

        def run(rows: AnyRows, indices: torch.Tensor | None) -> None:
            positional, named = arguments(rows, indices)
            module.forward(*positional, **named)

        return arguments(*pack.enter_layer(index, run))

    return hook


_cache_under_way: ContextVar[Cache | None] = ContextVar("blendrag_forward", default=None)


@contextmanager
def _under_way(cache: Cache) -> Iterator[None]:
    """Within this context and thread the decoder runs the forward that was given ``cache``."""
    token = _cache_under_way.set(cache)
    try:
        yield
    finally:
        with suppress(ValueError):  # after an error it may be left in another context
            _cache_under_way.reset(token)


def _is_under_way(cache: Cache) -> bool:
    """Whether this thread runs the forward that was given ``cache``; never while dynamo traces one."""
    return not torch.compiler.is_dynamo_compiling() and _cache_under_way.get() is cache


def _carries(cache: Cache, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether ``cache`` is among the arguments of a forward; never while dynamo traces one."""
    traced = torch.compiler.is_dynamo_compiling()
    return not traced and any(value is cache for value in (*args, *kwargs.values()))


def slice_kwargs(kwargs: dict[str, Any], rows: AnyRows, masked: bool) -> dict[str, Any]:
    """Keyword arguments of a layer for ``rows`` only.

    ``masked``: the attention needs a mask. Its rows are gathered, or built if the model relied on plain
    causality (``None``). Nothing is copied if ``rows`` are all rows of the prompt. Raises
    :class:`UnsupportedModelError` for an unknown argument of the prompt's length.
    """
    out = dict(kwargs)
    fewer = rows.count < rows.prompt_tokens
    for name, value in kwargs.items():
        if name == "attention_mask":
            out[name] = _mask_of(value, rows) if masked else None
        elif name == "position_embeddings":
            out[name] = rows.gather(value, -2) if fewer else value  # [1, N, D] each
        elif name in BY_TOKEN and isinstance(value, torch.Tensor):
            out[name] = rows.gather(value, -1) if fewer else value
        elif fewer and (dim := _token_dim(name, value, rows.prompt_tokens)):
            out[name] = take(value, rows.positions, dim)
    if masked and "attention_mask" not in kwargs:
        out["attention_mask"] = rows.mask
    return out


def _mask_of(mask: torch.Tensor | None, rows: AnyRows) -> Any:
    if mask is None:
        return rows.mask
    if mask.ndim != 4 or mask.shape[-2] != rows.prompt_tokens:
        raise UnsupportedModelError(
            f"attention mask of shape {tuple(mask.shape)} has no row per prompt token "
            f"({rows.prompt_tokens}); use mode full"
        )
    fewer = rows.count < rows.prompt_tokens
    return rows.gather(mask, -2, alone=True) if fewer else mask  # [1, 1, N, N]


def _token_dim(name: str, value: Any, prompt_tokens: int) -> int:
    """Which dimension of another argument, -1 or -2, has an entry per token (Gemma's per-layer inputs, scales
    by position); 0: none. Whether that is what it means, the gate measures."""
    if name in UNTOUCHED or not isinstance(value, torch.Tensor):
        return 0
    found = [dim - value.ndim for dim, size in enumerate(value.shape) if size == prompt_tokens]
    if prompt_tokens == 1 or not found:
        return 0
    if found in ([-1], [-2]):
        return found[0]
    raise UnsupportedModelError(
        f"layer argument {name} of shape {tuple(value.shape)} depends on the prompt's tokens in a "
        "way blending does not know; use mode full"
    )
