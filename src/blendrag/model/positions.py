"""Moving keys to other positions, with the loaded model's own rotary functions.

Owns: which layers of a model can be re-positioned (measured, never looked up by name), and the
rotation itself (CacheBlend, Appendix A: a key rotated to position p, rotated again by Δ, is the key
at p + Δ). Does not know stores, prompts or how a model is loaded.

Each layer is classified by comparing the keys the model computes for the same tokens at positions
0… and at Δ…:

* keys equal the model's own rotary applied by Δ → **rotary**;
* keys equal unchanged → **position-free** (NoPE layers, ALiBi);
* neither, or values differ → the model cannot be blended.

A kind is accepted where its keys are off by no more than noise in every dimension
(:mod:`blendrag.model.kv_compare`) and the other kind's are off by far more. Keys with large biases are why:
where rotation hardly turns a bias, keys of either kind look alike in a norm over all dimensions.
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
from blendrag.model.kv_compare import NOISE, Misfit, content, magnitude, misfit

LayerKind = Literal["rotary", "position-free"]
RotaryApply = Callable[..., tuple[torch.Tensor, torch.Tensor]]
#: K and V ``[Hkv, n, D]`` of every layer.
LayersKV = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]

#: Offsets the probe tries: a small one, and one that turns the slow frequencies too.
PROBE_OFFSETS = (7, 1531)
#: The kind of a layer must fit this many times better than the other one.
MARGIN = 4.0


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
    kv_at: Callable[[int], LayersKV],
    other_tokens: LayersKV,
    attentions: Sequence[nn.Module],
    rotary: nn.Module | None,
    layer_types: Sequence[str],
    dtype: torch.dtype,
    offsets: Sequence[int] = PROBE_OFFSETS,
) -> Repositioner:
    """Probe every layer and return the model's :class:`Repositioner`.

    ``kv_at(Δ)`` prefills the same few tokens at positions Δ…; it is asked for 0 and for each of
    ``offsets``. ``other_tokens`` is the KV of as many different tokens at positions 0…. Raises
    :class:`UnsupportedModelError` naming the first layer that is neither rotary nor position-free.
    """
    base_keys, base_values = kv_at(0)
    shifted = [(delta, *kv_at(delta)) for delta in offsets]
    other_keys, other_values = other_tokens
    apply = _module_function(attentions[0], "apply_rotary_pos_emb")
    takes_type = rotary is not None and "layer_type" in inspect.signature(rotary.forward).parameters
    kinds: list[LayerKind] = []
    names = [layer_types[i] if takes_type else "" for i in range(len(attentions))]
    for i, name in enumerate(names):
        says = content(base_values[i], other_values[i])
        for delta, _, values in shifted:
            if not _misfit(values[i], base_values[i], says, dtype).fits:
                raise UnsupportedModelError(
                    f"the values of layer {i} change with position ({delta} tokens further on), so its "
                    "stored KV cannot be reused elsewhere; use mode full"
                )
        says = content(base_keys[i], other_keys[i])
        moved = [(delta, keys[i]) for delta, keys, _ in shifted]
        kinds.append(_kind_of_layer(base_keys[i], moved, says, i, name, rotary, apply, dtype))
    return Repositioner(kinds, names, rotary, apply)


def _kind_of_layer(
    base: torch.Tensor,
    shifted: Sequence[tuple[int, torch.Tensor]],
    says: torch.Tensor,
    layer: int,
    name: str,
    rotary: nn.Module | None,
    apply: RotaryApply | None,
    dtype: torch.dtype,
) -> LayerKind:
    """The kind that explains the keys at every offset, and far better than the other one does."""
    free = [_misfit(keys, base, says, dtype, delta) for delta, keys in shifted]
    turned: list[Misfit] = []
    if rotary is not None and apply is not None:
        for delta, keys in shifted:
            offsets = torch.full((base.shape[-2],), delta, device=base.device)
            try:
                moved = apply_rotary(apply, base, rotary_table(rotary, name, offsets))
            except (RuntimeError, TypeError, ValueError, AttributeError):
                turned = []
                break
            turned.append(_misfit(keys, moved, says, dtype, delta))
    if _explains(free, turned):
        return "position-free"
    if turned and _explains(turned, free):
        return "rotary"
    raise UnsupportedModelError(
        f"the keys of layer {layer} change with position in a way that is not the model's own rotary "
        "embedding, so they cannot be moved; use mode full"
    )


def _explains(kind: Sequence[Misfit], other: Sequence[Misfit]) -> bool:
    """Whether ``kind`` fits at every offset, and :data:`MARGIN` times better than ``other``."""
    if not all(each.fits for each in kind):
        return False
    worst = max(each.overall for each in kind)
    return not other or max(each.overall for each in other) >= MARGIN * worst


def _misfit(
    actual: torch.Tensor,
    expected: torch.Tensor,
    says: torch.Tensor,
    dtype: torch.dtype,
    offset: int = 0,
) -> Misfit:
    """The error of K or V ``[Hkv, n, D]`` in units of noise, and of rounding numbers that large.

    The model's table rounds angles to float32, so at far positions that counts too.
    """
    rounding = max(torch.finfo(dtype).eps, offset * torch.finfo(torch.float32).eps)
    noise = NOISE.get(dtype, NOISE[torch.bfloat16])
    allowed = noise * says + rounding * magnitude(actual, expected)
    return misfit(actual, expected, allowed)


def _module_function(attention: nn.Module, name: str) -> RotaryApply | None:
    return getattr(sys.modules[type(attention).__module__], name, None)
