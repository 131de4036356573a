"""Forward hooks on an unmodified model, for one blended forward.

:class:`Pack` says which rows a layer computes; the hooks slice the layer's arguments to those rows. They act
only on the forward that is given the pack's cache, because other threads may run the same modules meanwhile.
They serve exactly one forward, and are removed after it, whatever happens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from blendrag.errors import UnsupportedModelError
from blendrag.fusor.attention import NAME, ROWS_KEYWORD, implementation
from blendrag.fusor.fusion import Phase
from blendrag.fusor.pack import Pack
from blendrag.fusor.rows import AnyRows, take
from blendrag.model.sharing import is_given, only_here
from blendrag.model.structure import DecoderStack

#: Tensor arguments indexed by token in their last dimension (``[…, N]``).
BY_TOKEN = ("position_ids", "cache_position")
#: Arguments that are passed on as they are; ALiBi's are biases of all keys.
UNTOUCHED = (
    "hidden_states", "past_key_values", "past_key_value", "layer_past", "alibi", "position_bias",
)  # fmt: skip

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@contextmanager
def hooked(
    stack: DecoderStack,
    pack: Pack,
    fast_attention: bool,
    observes: bool,
    by_token: Mapping[str, int],
) -> Iterator[None]:
    """Within this context the first forward of ``stack`` with the pack's cache is blended.

    ``observes``: scouts see the attention and mask their rows. ``by_token``: of :func:`token_arguments`.
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
            is_traced = torch.compiler.is_dynamo_compiling()
            if kwargs is None or is_traced or not is_given(cache, args, kwargs):
                return None
            hooks.enter_context(_under_way(cache))
            if fast_attention:
                hooks.enter_context(implementation(stack, NAME))
            # Gemma 4 would drop rows by itself where layers share KV
            if "logits_to_keep" in kwargs:
                kwargs = {**kwargs, "logits_to_keep": 0}
            if pack.needs_scout:
                with pack.scout_pass(stack):
                    try:
                        module.forward(*args, **kwargs)
                    except AttributeError as exc:
                        # MPT's forward asks the mask for its size, which only its own attention gets
                        # (transformers 5.23)
                        if observes or exc.obj is not None:
                            raise
            return args, kwargs

        def finish(*_: Any) -> None:
            if _is_under_way(cache):
                hooks.close()

        def leave(index: int, *_: Any) -> None:
            if timeline is not None and _is_under_way(cache):
                timeline.leave(index)

        for index, layer in enumerate(stack.layers):
            slicing = _slicing(pack, index, names, by_token, not fast_attention, observes)
            hooks.callback(layer.register_forward_pre_hook(slicing, with_kwargs=True).remove)
            if timeline is not None:
                hooks.callback(layer.register_forward_hook(partial(leave, index)).remove)
        hooks.callback(stack.base.register_forward_pre_hook(begin, with_kwargs=True).remove)
        hooks.callback(stack.base.register_forward_hook(finish).remove)
        for fusion in pack.fusions:
            fusion.loader.start()
        yield


def _parameters(layer: nn.Module) -> list[str]:
    """Names of the positional parameters of a decoder layer's forward after the hidden states."""
    parameters = list(inspect.signature(type(layer).forward).parameters.values())[2:]
    return [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]


def _named(args: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
    """The positional arguments after the hidden states, by name, or number if it has none."""
    more = args[1:]
    numbers = (f"#{number}" for number in range(len(names) + 1, len(more) + 1))
    return dict(zip((*names[: len(more)], *numbers), more, strict=True))


class _Seen(Exception):
    """Ends a forward whose layer arguments are known."""


@torch.inference_mode()
def token_arguments(stack: DecoderStack) -> dict[str, int]:
    """Other arguments of decoder layers with an entry per token, and in which dimension, -1 or -2: Gemma's
    inputs per layer, scales by position. Found from two forwards that end when a layer of each type began."""
    types = list(stack.layer_types)
    firsts = [types.index(kind) for kind in dict.fromkeys(types)]
    shapes: dict[tuple[int, str], list[torch.Size]] = {}

    def note(index: int, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        given = {**_named(args, _parameters(module)), **kwargs}
        for name, value in given.items():
            if isinstance(value, torch.Tensor) and name not in UNTOUCHED:
                shapes.setdefault((index, name), []).append(value.shape)
        if index == firsts[-1]:
            raise _Seen

    device = next(stack.base.parameters()).device
    handles = [
        stack.layers[i].register_forward_pre_hook(only_here(partial(note, i)), with_kwargs=True)
        for i in firsts
    ]
    counts = 5, 7
    try:
        for count in counts:
            ids = torch.zeros((1, count), dtype=torch.long, device=device)
            with suppress(_Seen):
                stack.base(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    found = {}
    for (_, name), both in shapes.items():
        sizes = zip(*both, strict=False)
        dims = [dim - len(both[0]) for dim, pair in enumerate(sizes) if pair == counts]
        if dims in ([-1], [-2]):
            found[name] = dims[0]
    return found


def _slicing(
    pack: Pack,
    index: int,
    names: Sequence[str],
    by_token: Mapping[str, int],
    masked: bool,
    observes: bool,
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
        positional = _named(args, names)
        given = {**positional, **kwargs}
        hidden = args[0] if args else kwargs["hidden_states"]
        if hidden.shape[-3] != 1:  # [1, n, D], or more of them at once (Gemma 3n)
            raise UnsupportedModelError(
                f"a batch of {hidden.shape[-3]} sequences cannot be blended in one forward; "
                "blend one prompt at a time"
            )

        def arguments(rows: AnyRows, indices: torch.Tensor | None) -> Arguments:
            with_mask = masked and (pack.phase is not Phase.SCOUT or not observes)
            sliced = slice_kwargs(given, rows, with_mask, by_token)
            if not masked:
                sliced[ROWS_KEYWORD] = rows
            states = hidden if indices is None else hidden[..., indices, :]
            if args:
                return (states, *(sliced.pop(name) for name in positional)), sliced
            sliced["hidden_states"] = states
            return (), sliced

        def run(rows: AnyRows, indices: torch.Tensor | None) -> None:
            some, named = arguments(rows, indices)
            module.forward(*some, **named)

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


def slice_kwargs(
    kwargs: dict[str, Any],
    rows: AnyRows,
    masked: bool,
    by_token: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Any]:
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
        elif name in by_token and isinstance(value, torch.Tensor):
            out[name] = take(value, rows.positions, by_token[name]) if fewer else value
        elif name not in UNTOUCHED:
            _refuse_token_length(name, value, rows.prompt_tokens)
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


def _refuse_token_length(name: str, value: Any, prompt_tokens: int) -> None:
    if isinstance(value, torch.Tensor) and prompt_tokens > 1 and prompt_tokens in value.shape:
        raise UnsupportedModelError(
            f"layer argument {name} of shape {tuple(value.shape)} depends on the prompt's tokens in a "
            "way blending does not know; use mode full"
        )
