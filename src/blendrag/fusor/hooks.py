"""Forward hooks on the decoder layers of an unmodified model, for one forward.

:class:`Pack` says which rows a layer computes, and the hooks slice the layer's arguments to those.
:class:`Fusor` registers and removes them. Other threads may run the same modules meanwhile: the hooks act
only on the forward that was given the pack's cache (:func:`under_way`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from blendrag.errors import UnsupportedModelError
from blendrag.fusor.attention import ROWS_KEYWORD
from blendrag.fusor.fusion import Phase
from blendrag.fusor.pack import Pack
from blendrag.fusor.rows import AnyRows, At
from blendrag.metrics import Timeline

#: Tensor arguments indexed by token in their last dimension (``[…, N]``).
BY_TOKEN = ("position_ids", "cache_position")
#: Arguments that are passed on as they are.
UNTOUCHED = ("hidden_states", "past_key_values", "past_key_value", "layer_past")


_cache_under_way: ContextVar[Cache | None] = ContextVar("blendrag_forward", default=None)


@contextmanager
def under_way(cache: Cache) -> Iterator[None]:
    """Within this context and thread the decoder runs the forward that was given ``cache``."""
    token = _cache_under_way.set(cache)
    try:
        yield
    finally:
        # A caller may leave the fusion in another context than the forward ran in, after an error to keep.
        with suppress(ValueError):
            _cache_under_way.reset(token)


def is_under_way(cache: Cache) -> bool:
    """Whether this thread runs the forward that was given ``cache``. Never while dynamo traces one."""
    return not torch.compiler.is_dynamo_compiling() and _cache_under_way.get() is cache


def carries(cache: Cache, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Whether ``cache`` is among the arguments of a forward. Never while dynamo traces one."""
    if torch.compiler.is_dynamo_compiling():
        return False
    return any(value is cache for value in (*args, *(kwargs or {}).values()))


class LayerHook:
    """Forward pre-hook of one decoder layer: runs it on the pack's rows only."""

    def __init__(self, pack: Pack, index: int, masked: bool) -> None:
        """``masked``: the model's own attention runs, with explicit masks."""
        self._pack = pack
        self._index = index
        self._masked = masked

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        pack = self._pack
        # torch passes no kwargs if the hook is removed after another thread began to run hooks
        if kwargs is None or not is_under_way(pack.cache):
            return None
        if pack.timeline is not None:
            pack.timeline.enter(self._index)
        hidden = args[0] if args else kwargs["hidden_states"]
        if hidden.shape[0] != 1:
            raise UnsupportedModelError(
                f"a batch of {hidden.shape[0]} sequences cannot be blended in one forward; "
                "blend one prompt at a time"
            )
        refuse_positional(args[1:], pack.prompt_tokens)

        def arguments(
            rows: AnyRows, indices: torch.Tensor | None
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            masked = self._masked and pack.phase is not Phase.SCOUT  # scouts mask their rows
            sliced = slice_kwargs(kwargs, rows, masked)
            if not self._masked:
                sliced[ROWS_KEYWORD] = rows
            states = hidden if indices is None else hidden[:, indices]
            if args:
                return (states, *args[1:]), sliced
            sliced["hidden_states"] = states
            return args, sliced

        def run(rows: AnyRows, indices: torch.Tensor | None) -> None:
            run_args, run_kwargs = arguments(rows, indices)
            module.forward(*run_args, **run_kwargs)

        return arguments(*pack.enter_layer(self._index, run))


class LayerEnd:
    """Forward hook of one decoder layer: its span of the timeline ends here."""

    def __init__(self, timeline: Timeline, cache: Cache, index: int) -> None:
        self._timeline = timeline
        self._cache = cache
        self._index = index

    def __call__(self, *args: Any) -> None:
        if is_under_way(self._cache):
            self._timeline.leave(self._index)


def slice_kwargs(kwargs: dict[str, Any], rows: AnyRows, masked: bool) -> dict[str, Any]:
    """Keyword arguments of a layer for ``rows`` only.

    ``masked``: the model's own attention runs and needs a mask: its rows are gathered, or built if the model
    relied on plain causality (``None``). Arguments are not copied if ``rows`` are all rows of the prompt.
    An argument of the prompt's length that is not known here is refused.
    """
    out = dict(kwargs)
    fewer = rows.count < rows.prompt_tokens
    for name, value in kwargs.items():
        if name == "attention_mask":
            out[name] = _mask_of(value, rows) if masked else None
        elif name == "position_embeddings":
            out[name] = rows.gather(value, _embedding_rows) if fewer else value
        elif name in BY_TOKEN and isinstance(value, torch.Tensor):
            out[name] = rows.gather(value, _token_rows) if fewer else value
        elif name not in UNTOUCHED:
            _refuse_token_length(name, value, rows.prompt_tokens)
    if masked and "attention_mask" not in kwargs:
        out["attention_mask"] = rows.mask()
    return out


def refuse_positional(args: tuple[Any, ...], prompt_tokens: int) -> None:
    """Refuse positional arguments after the hidden states that depend on the prompt's length."""
    for index, value in enumerate(args):
        _refuse_token_length(f"#{index + 1}", value, prompt_tokens)


def _mask_of(mask: torch.Tensor | None, rows: AnyRows) -> torch.Tensor:
    if mask is None:
        return rows.mask()
    if mask.ndim != 4 or mask.shape[-2] != rows.prompt_tokens:
        raise UnsupportedModelError(
            f"attention mask of shape {tuple(mask.shape)} has no row per prompt token "
            f"({rows.prompt_tokens}); use mode full"
        )
    fewer = rows.count < rows.prompt_tokens
    return rows.gather(mask, _mask_rows, alone=True) if fewer else mask


def _mask_rows(mask: torch.Tensor, at: At) -> torch.Tensor:
    return mask[:, :, at]


def _token_rows(value: torch.Tensor, at: At) -> torch.Tensor:
    return value[..., at]


def _embedding_rows(value: Any, at: At) -> Any:
    if isinstance(value, torch.Tensor):  # [1, N, D]
        return value[..., at, :]
    if isinstance(value, tuple | list):
        return type(value)(_embedding_rows(v, at) for v in value)
    if isinstance(value, dict):
        return {k: _embedding_rows(v, at) for k, v in value.items()}
    return value


def _refuse_token_length(name: str, value: Any, prompt_tokens: int) -> None:
    if isinstance(value, torch.Tensor) and prompt_tokens > 1 and prompt_tokens in value.shape:
        raise UnsupportedModelError(
            f"layer argument {name} of shape {tuple(value.shape)} depends on the prompt's tokens in a "
            "way blending does not know; use mode full"
        )
