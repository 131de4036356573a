"""Forward hooks on the decoder layers of an unmodified model, for one forward.

They know nothing of policies or stores: :class:`Blending` says which rows a layer computes, and they cut
the layer's arguments down to those. Who registers them removes them (:mod:`blendrag.fusor.fusor`).

Other threads may run the same modules meanwhile: the hooks act only on the forward that was given the
fusion's cache (:func:`under_way`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import nn
from transformers.cache_utils import Cache

from blendrag.errors import UnsupportedModelError
from blendrag.fusor.attention import ROWS_KEYWORD
from blendrag.fusor.fusion import Peek
from blendrag.fusor.packed_rows import AnyRows
from blendrag.fusor.rows import At
from blendrag.metrics import Timeline

#: Tensor arguments indexed by token in their last dimension (``[…, N]``).
BY_TOKEN = ("position_ids", "cache_position")
#: Arguments that travel as they are.
UNTOUCHED = ("hidden_states", "past_key_values", "past_key_value", "layer_past")


class Blending(Protocol):
    """One prompt's fusion, or several prompts' in one forward."""

    timeline: Timeline | None

    @property
    def scouts(self) -> bool:
        """Whether a scout pass must come first."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """Length of the sequence that the model is given."""
        ...

    @property
    def is_scouting(self) -> bool:
        """Whether the forward under way is a scout pass, whose attention makes its own masks."""
        ...

    def enter_layer(self, layer: int, peek: Peek) -> tuple[AnyRows, torch.Tensor | None]:
        """Rows of ``layer`` and their indices among those that arrive (``None``: all)."""
        ...

    def merge(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take a layer's new K/V ``[1, Hkv, S, D]``; what the rows attend to."""
        ...

    def start(self) -> None:
        """Begin to load."""
        ...

    def close(self) -> None:
        """Stop loading. Idempotent."""
        ...


_cache_under_way: ContextVar[Cache | None] = ContextVar("blendrag_forward", default=None)


@contextmanager
def under_way(cache: Cache) -> Iterator[None]:
    """Within this context and thread the decoder runs the forward that was given ``cache``."""
    token = _cache_under_way.set(cache)
    try:
        yield
    finally:
        # A caller may leave the fusion in another context than the forward ran in; the error that
        # brought it there is worth more than this variable.
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
    """Forward pre-hook of one decoder layer."""

    def __init__(
        self,
        blending: Blending,
        cache: Cache,
        index: int,
        masked: bool,
        check: Callable[[], None] | None,
    ) -> None:
        self._blending = blending
        self._cache = cache
        self._index = index
        self._masked = masked
        self._check = check

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        # torch passes no kwargs where the hook is removed after another thread began to run hooks
        if kwargs is None or not is_under_way(self._cache):
            return None
        if self._check is not None:
            self._check()
        if self._blending.timeline is not None:
            self._blending.timeline.enter(self._index)
        hidden = args[0] if args else kwargs["hidden_states"]
        if hidden.shape[0] != 1:
            raise UnsupportedModelError(
                f"a batch of {hidden.shape[0]} sequences cannot be blended in one forward; "
                "blend one prompt at a time"
            )
        refuse_positional(args[1:], self._blending.prompt_tokens)

        def arguments(
            rows: AnyRows, indices: torch.Tensor | None
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            masked = self._masked and not self._blending.is_scouting
            sliced = slice_kwargs(kwargs, rows, masked)
            if not self._masked:
                sliced[ROWS_KEYWORD] = rows
            states = hidden if indices is None else hidden[:, indices]
            if args:
                return (states, *args[1:]), sliced
            sliced["hidden_states"] = states
            return args, sliced

        def peek(rows: AnyRows, indices: torch.Tensor | None) -> None:
            peek_args, peek_kwargs = arguments(rows, indices)
            module.forward(*peek_args, **peek_kwargs)

        return arguments(*self._blending.enter_layer(self._index, peek))


class LayerEnd:
    """Forward hook of one decoder layer: its span of a timeline ends here."""

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
    """Positional arguments behind the hidden states must not depend on the prompt's length."""
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
