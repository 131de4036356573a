"""Moving keys to other positions, with the loaded model's own rotary functions.

Owns: which layers of a model can be re-positioned (measured, never looked up by name), and the
rotation itself (CacheBlend, Appendix A: a key rotated to position p, rotated again by Δ, is the key
at p + Δ). Does not know stores, prompts or how a model is loaded.

Each layer is classified by comparing the keys the model computes for the same tokens at positions
0… and at Δ…:

* keys equal the model's own rotary applied by Δ → **rotary**;
* keys equal unchanged → **position-free** (NoPE layers, ALiBi);
* neither, or values differ → the model cannot be blended.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from blendrag.errors import UnsupportedModelError

LayerKind = Literal["rotary", "position-free"]
RotaryApply = Callable[..., tuple[torch.Tensor, torch.Tensor]]

#: Offsets the probe tries: a small one, and one that turns the slow frequencies too.
PROBE_OFFSETS = (7, 1531)
#: Relative error of keys and values that counts as equal; wrong rotations miss by order 1.
TOLERANCE = {torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}


@dataclass(frozen=True)
class RotaryTable:
    """Cosines and sines of a list of offsets, float32 ``[1, n, rotary_dim]``."""

    cos: torch.Tensor
    sin: torch.Tensor


class Repositioner:
    """Rotates stored keys of every layer by per-token offsets.

    ``kinds[i]`` says what layer *i* is; ``table_names[i]`` which of the model's rotary tables it uses
    (``""`` for models with one, the layer type for models with several).
    """

    def __init__(
        self,
        kinds: Sequence[LayerKind],
        table_names: Sequence[str],
        rotary: nn.Module | None,
        apply: RotaryApply | None,
    ) -> None:
        self.kinds = tuple(kinds)
        self.table_names = tuple(table_names)
        self._rotary = rotary
        self._apply = apply

    def tables(self, offsets: torch.Tensor) -> dict[str, RotaryTable]:
        """Tables for ``offsets`` ``[n]`` (int64), one per rotary table any layer uses; once a request."""
        used = {n for n, kind in zip(self.table_names, self.kinds, strict=True) if kind == "rotary"}
        return {name: self._table(name, offsets) for name in used}

    def rotate_(self, keys: torch.Tensor, layer: int, tables: dict[str, RotaryTable]) -> None:
        """Rotate ``keys`` ``[…, Hkv, n, D]`` in place: in float32, rounded once.

        They are those of ``layer``, or of several that have its kind and its table.
        """
        if self.kinds[layer] == "position-free":
            return
        table = tables[self.table_names[layer]]
        keys.copy_(apply_rotary(self._apply, keys, table))

    def _table(self, name: str, offsets: torch.Tensor) -> RotaryTable:
        assert self._rotary is not None
        return rotary_table(self._rotary, name, offsets)


def rotary_table(rotary: nn.Module, name: str, offsets: torch.Tensor) -> RotaryTable:
    """The model's own cos/sin for ``offsets`` with its attention scaling taken out again.

    The scaling (YaRN, LongRoPE) is already in the stored keys; a second time would be wrong.
    """
    like = torch.empty(1, dtype=torch.float32, device=offsets.device)
    position_ids = offsets[None]
    if name:
        cos, sin = rotary(like, position_ids, name)
        scaling = getattr(rotary, f"{name}_attention_scaling", 1.0)
    else:
        cos, sin = rotary(like, position_ids)
        scaling = getattr(rotary, "attention_scaling", 1.0)
    return RotaryTable(cos.float() / scaling, sin.float() / scaling)


def apply_rotary(apply: RotaryApply | None, keys: torch.Tensor, table: RotaryTable) -> torch.Tensor:
    """``keys`` ``[…, Hkv, n, D]`` rotated by ``table``, float32; partial rotary turns the first dims."""
    assert apply is not None
    wide = keys.float().reshape(-1, *keys.shape[-3:])  # [B, Hkv, n, D]
    rotary_dim = table.cos.shape[-1]
    no_queries = wide[:, :0]
    try:
        return apply(no_queries, wide, table.cos, table.sin)[1].view(keys.shape)
    except RuntimeError:
        if rotary_dim >= wide.shape[-1]:
            raise
    # phi, stablelm and persimmon slice the rotary part in the attention module, not in the function.
    turned = apply(no_queries[..., :rotary_dim], wide[..., :rotary_dim], table.cos, table.sin)[1]
    return torch.cat((turned, wide[..., rotary_dim:]), dim=-1).view(keys.shape)


def classify(
    keys_at: Callable[[int], tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]],
    attentions: Sequence[nn.Module],
    rotary: nn.Module | None,
    layer_types: Sequence[str],
    dtype: torch.dtype,
    offsets: Sequence[int] = PROBE_OFFSETS,
) -> Repositioner:
    """Probe every layer and return the model's :class:`Repositioner`.

    ``keys_at(Δ)`` prefills the same few tokens at positions Δ… and returns per layer K and V
    ``[Hkv, n, D]``; it is asked for 0 and for each of ``offsets``. Raises
    :class:`UnsupportedModelError` naming the first layer that is neither rotary nor position-free.
    """
    base_keys, base_values = keys_at(0)
    shifted = [(delta, *keys_at(delta)) for delta in offsets]
    apply = _module_function(attentions[0], "apply_rotary_pos_emb")
    takes_type = rotary is not None and "layer_type" in inspect.signature(rotary.forward).parameters
    tolerance = TOLERANCE.get(dtype, 6e-2)
    kinds: list[LayerKind] = []
    names = [layer_types[i] if takes_type else "" for i in range(len(attentions))]
    for i, name in enumerate(names):
        for delta, _, values in shifted:
            if not _close(values[i], base_values[i], tolerance):
                raise UnsupportedModelError(
                    f"the values of layer {i} change with position ({delta} tokens further on), so its "
                    "stored KV cannot be reused elsewhere; use mode full"
                )
        kind = _kind_of_layer(base_keys[i], shifted, i, name, rotary, apply, tolerance)
        kinds.append(kind)
    return Repositioner(kinds, names, rotary, apply)


def _kind_of_layer(
    base: torch.Tensor,
    shifted: Sequence[tuple[int, Sequence[torch.Tensor], Sequence[torch.Tensor]]],
    layer: int,
    name: str,
    rotary: nn.Module | None,
    apply: RotaryApply | None,
    tolerance: float,
) -> LayerKind:
    if all(_close(keys[layer], base, tolerance) for _, keys, _ in shifted):
        return "position-free"
    if rotary is not None and apply is not None:
        turned = []
        for delta, keys, _ in shifted:
            offsets = torch.full((base.shape[-2],), delta, device=base.device)
            try:
                moved = apply_rotary(apply, base, rotary_table(rotary, name, offsets))
            except (RuntimeError, TypeError, ValueError, AttributeError):
                break
            turned.append(_close(keys[layer], moved, tolerance))
        if turned and all(turned) and len(turned) == len(shifted):
            return "rotary"
    raise UnsupportedModelError(
        f"the keys of layer {layer} change with position in a way that is not the model's own rotary "
        "embedding, so they cannot be moved; use mode full"
    )


def _close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    """Relative error in the root mean square.

    Not of the worst element: at far positions a low-precision table is rounded coarsely, and a
    trained, sharp attention turns that into a large error of a few values. A wrong rotation, or values
    that know their position, differ all over.
    """
    scale = max(float(b.float().norm()), 1e-6)
    return float((a.float() - b.float()).norm()) <= tolerance * scale


def _module_function(attention: nn.Module, name: str) -> RotaryApply | None:
    return getattr(sys.modules[type(attention).__module__], name, None)
