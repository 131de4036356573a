"""Cutting a decoder layer's arguments down to the selected rows.

Knows the arguments transformers passes to decoder layers; anything else that has the prompt's length
is refused rather than passed on whole.
"""

from __future__ import annotations

from typing import Any

import torch

from blendrag.errors import UnsupportedModelError
from blendrag.fusor.packed_rows import AnyRows
from blendrag.fusor.rows import At

#: Tensor arguments indexed by token in their last dimension (``[…, N]``).
BY_TOKEN = ("position_ids", "cache_position")
#: Arguments that travel as they are.
UNTOUCHED = ("hidden_states", "past_key_values", "past_key_value", "layer_past")


def narrow_kwargs(kwargs: dict[str, Any], rows: AnyRows, masked: bool) -> dict[str, Any]:
    """Keyword arguments of a layer for ``rows`` only.

    ``masked``: the model's own attention runs, so the mask rows are gathered, or built where the model
    relied on plain causality (``None``). What is indexed by token is handed on, not copied, where
    the rows are all of the prompt's.
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
