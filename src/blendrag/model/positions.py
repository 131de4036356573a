"""Move keys to other positions with the loaded model's own rotary functions.

A key rotated to position p and rotated again by Δ is the key at p + Δ (CacheBlend, Appendix A). Which layers
this holds for is measured, not looked up by model name. :func:`classify` compares the keys that the model
computes for the same tokens at positions 0… and at Δ…:

* they equal the model's own rotary applied by Δ → **rotary**;
* they equal the unchanged keys → **position-free** (NoPE layers, ALiBi);
* neither, or the values differ → the model cannot be blended. Except in layers that keep what K and V are
  computed from (MLA): transformers keeps the latent vector as K and the rotated part of the key as V; then
  the former stays and the latter turns → **latent**.

A kind is accepted if its keys are off by no more than noise (:mod:`blendrag.model.kv_compare`) and the other
kind's by far more.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from blendrag.errors import UnsupportedModelError
from blendrag.model.kv_compare import NOISE, Misfit, content, magnitude, misfit
from blendrag.model.structure import DecoderStack

LayerKind = Literal["rotary", "position-free", "latent"]
RotaryApply = Callable[..., tuple[torch.Tensor, torch.Tensor]]
#: K and V ``[Hkv, n, D]`` of every layer.
LayersKV = Sequence[tuple[torch.Tensor, torch.Tensor]]

#: Offsets the probe tries: a small one, and one that turns the slow frequencies, too.
PROBE_OFFSETS = (7, 1531)
#: The kind of a layer must fit this many times better than the other one.
MARGIN = 4.0
#: Values that :func:`rotate_halves_` turns at a time.
HALVES_VALUES = 3 << 15
#: A quantised model's own noise counts up to this share of a channel's content; mistakes are of order 1.
MAX_OWN_NOISE = 0.25


class RotaryTable(NamedTuple):
    """Cosines and sines of a list of offsets, float32 ``[1, n, rotary_dim]``."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True)
class Repositioner:
    """Rotates the stored keys of every layer by per-token offsets."""

    kinds: Sequence[LayerKind]
    table_names: Sequence[str]
    """Each layer's rotary table: ``""`` in models with one, the layer type in models with several."""
    rotary: Any
    apply: RotaryApply
    _halves: dict[tuple[int, int], bool] = field(default_factory=dict, repr=False, compare=False)
    """By heads and width: what :meth:`_turns_halves` found."""

    def tables(self, offsets: torch.Tensor) -> dict[str, RotaryTable]:
        """Tables for ``offsets`` ``[n]`` (int64), one per rotary table in use."""
        turning = zip(self.table_names, self.kinds, strict=True)
        used = {name for name, kind in turning if kind != "position-free"}
        return {name: rotary_table(self.rotary, name, offsets) for name in used}

    def part(self, layer: int) -> int:
        """What of a layer's KV turns: K (0), or V (1) in latent layers."""
        return 1 if self.kinds[layer] == "latent" else 0

    def rotate_(self, keys: torch.Tensor, layer: int, tables: dict[str, RotaryTable]) -> None:
        """Rotate ``keys`` ``[…, Hkv, n, D]`` in place: in float32, rounded once.

        They belong to ``layer``, or to several layers of its kind and table.
        """
        if self.kinds[layer] == "position-free" or not keys.numel():
            return
        table = tables[self.table_names[layer]]
        if keys.device.type == "cpu" and self._turns_halves(keys, table):
            rotate_halves_(keys, table)
        else:
            keys.copy_(apply_rotary(self.apply, keys, table))

    def rotated(
        self, keys: torch.Tensor, layer: int, tables: dict[str, RotaryTable]
    ) -> torch.Tensor:
        """What :meth:`rotate_` makes of ``keys``, in a new tensor that gradients pass through."""
        if self.kinds[layer] == "position-free":
            return keys
        return apply_rotary(self.apply, keys, tables[self.table_names[layer]]).to(keys.dtype)

    def _turns_halves(self, keys: torch.Tensor, table: RotaryTable) -> bool:
        """Whether :func:`rotate_halves_` does what ``apply`` does to such keys, found out once by trying."""
        heads, _, width = keys.shape[-3:]
        if table.cos.shape[-1] != width or width % 2:
            return False
        if (heads, width) not in self._halves:
            random = torch.Generator().manual_seed(0)
            keys = torch.randn((heads, 2, width), generator=random)
            angles = torch.rand((1, 2, width // 2), generator=random).repeat(1, 1, 2)
            table = RotaryTable(angles.cos(), angles.sin())
            expected = apply_rotary(self.apply, keys, table)
            rotate_halves_(keys, table)
            self._halves[heads, width] = torch.equal(keys, expected)
        return self._halves[heads, width]


def rotate_halves_(keys: torch.Tensor, table: RotaryTable) -> None:
    """:func:`apply_rotary` in place for models that turn the first half of each head against the second, as
    Llama does: fewer passes, over blocks that stay in a core's cache."""
    half, tokens = keys.shape[-1] // 2, keys.shape[-2]
    step = max(1, HALVES_VALUES * tokens // keys.numel())
    for a in range(0, tokens, step):
        cos, sin = (part[0, a : a + step] for part in table)  # [n, D]
        part = keys[..., a : a + step, :]
        wide = part.float()
        first, second = wide[..., :half], wide[..., half:]
        to_second, from_first = first * sin[..., half:], second * sin[..., :half]
        first.mul_(cos[..., :half]).sub_(from_first)
        second.mul_(cos[..., half:]).add_(to_second)
        part.copy_(wide)


def rotary_table(rotary: Any, name: str, offsets: torch.Tensor) -> RotaryTable:
    """The model's own cos/sin for ``offsets``, without its attention scaling.

    The stored keys already include the scaling (YaRN, LongRoPE); applying it twice would be wrong.
    """
    like = torch.empty(1, dtype=torch.float32, device=offsets.device)
    positions, kind = offsets[None], [name] if name else []
    try:
        table = rotary(like, positions, *kind)
    except (
        IndexError
    ):  # M-RoPE (Qwen-VL, transformers 5.17) takes three streams, which are equal for text
        table = rotary(like, positions.expand(3, -1, -1), *kind)
    if isinstance(table, torch.Tensor) and table.is_complex():
        cos, sin = (part.repeat_interleave(2, dim=-1) for part in (table.real, table.imag))
    else:
        cos, sin = table
    scaling = getattr(rotary, f"{name}_attention_scaling" if name else "attention_scaling", 1.0)
    return RotaryTable(cos.float() / scaling, sin.float() / scaling)


def apply_rotary(apply: RotaryApply, keys: torch.Tensor, table: RotaryTable) -> torch.Tensor:
    """``keys`` ``[…, Hkv, n, D]`` rotated by ``table``, float32; partial rotary turns the first dims."""
    wide = keys.float().reshape(-1, *keys.shape[-3:])  # [B, Hkv, n, D]
    rotary_dim = table.cos.shape[-1]
    no_queries = wide[:, :0]
    try:
        return apply(no_queries, wide, *table)[1].view(keys.shape)
    except RuntimeError:
        if rotary_dim >= wide.shape[-1]:
            raise
    # phi, stablelm and persimmon slice the rotary part in the attention module, not in the function.
    turned = apply(no_queries[..., :rotary_dim], wide[..., :rotary_dim], *table)[1]
    return torch.cat((turned, wide[..., rotary_dim:]), dim=-1).view(keys.shape)


def rotary_functions(stack: DecoderStack) -> list[RotaryApply]:
    """The rotary functions beside the model's attention, as ``apply(q, k, cos, sin) -> (q, k)``.

    Most take queries and keys, some (Gemma 3n and 4) one of them, some (DeepSeek V2, Llama 4) a table of
    complex numbers, with the heads before or after the tokens.
    """
    module = sys.modules[type(stack.attentions[0]).__module__]
    found: list[RotaryApply] = []
    for name in ("apply_rotary_pos_emb", "apply_rotary_emb"):
        function: Any = getattr(module, name, None)
        names = [] if function is None else list(inspect.signature(function).parameters)
        if "freqs_cis" in names:
            found += [partial(_by_complex, function, dims) for dims in ((1, 1), (1, 2))]
        elif names.index("cos") == 1 if "cos" in names else False:
            found.append(partial(_by_one, function))
        elif names:
            found.append(function)
    return found


def _by_one(
    function: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return q, function(k, cos, sin)


def _by_complex(
    function: Any,
    heads: tuple[int, int],
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``heads``: the two dimensions that the function has in the other order."""
    table = torch.complex(cos[..., ::2].contiguous(), sin[..., ::2].contiguous())
    k = k.transpose(*heads)
    return q, function(k, k, table)[1].transpose(*heads)  # it cannot take no queries


class Rotation(NamedTuple):
    """Rotations as ``x * cos + (x @ half) * sin``: many rotations of the same x share ``x @ half``."""

    cos: torch.Tensor
    sin: torch.Tensor
    """Float32 ``[n, D]`` both."""
    half: torch.Tensor
    """Float32 ``[D, D]`` of 0, 1 and -1."""

    @classmethod
    def of(cls, apply: RotaryApply, table: RotaryTable, width: int) -> Rotation:
        """What :func:`apply_rotary` does with ``table`` to vectors of this width."""
        cos, sin = table
        none, no_turn = torch.zeros_like(cos), torch.zeros_like(cos[:, :1])

        def applied(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            return apply_rotary(apply, x[None], RotaryTable(cos, sin))[0]

        basis = torch.eye(width, device=cos.device)
        half = applied(basis, no_turn, no_turn + 1) - applied(basis, no_turn, no_turn)
        ones = basis.new_ones(cos.shape[1], width)
        turned = applied(ones, none, sin) - applied(ones, none, none)  # less dims that never turn
        return cls(applied(ones, cos, none), turned * half.sum(0), half)


def classify(
    base: LayersKV,
    shifted: Mapping[int, LayersKV],
    others: LayersKV,
    still: LayersKV | None,
    stack: DecoderStack,
    dtype: torch.dtype,
    again: LayersKV | None = None,
) -> Repositioner:
    """Tell the kind of every layer and return the model's :class:`Repositioner`.

    Args:
        base: KV of a few tokens at positions 0….
        shifted: of the same tokens at positions Δ…, by Δ.
        others: of as many different tokens at positions 0….
        still: of one token as many times, all at position 0; ``None`` for models with running states.
        again: ``base`` as computed in a longer prompt, for models whose noise exceeds their dtype's.

    Raises :class:`UnsupportedModelError` naming the first layer of no kind, and for models that do not place
    tokens by the positions that they are given.
    """
    takes_none = all(
        torch.equal(one, other)
        for moved in shifted.values()
        for both in zip(base, moved, strict=True)
        for one, other in zip(*both, strict=True)
    )
    # Where positions are ignored (BLOOM), nothing may depend on the order: one token repeated is the same
    for layer in range(0 if still is None else len(base) if takes_none else 1):
        assert still is not None
        for kept, one, other in zip(still[layer], base[layer], others[layer], strict=True):
            same = _misfit(kept, kept[:, :1].expand_as(kept), content(one, other), 0.0, dtype)
            if not same.fits:
                raise UnsupportedModelError(
                    "the model places tokens by their order, whatever positions it is given, so its KV "
                    "cannot be moved; use mode full"
                )
    refused: UnsupportedModelError | None = None
    rotary: Any = stack.rotary  # may be missing: then no layer is rotary
    by_type = rotary is not None and "layer_type" in inspect.signature(rotary.forward).parameters
    names = [kind if by_type else "" for kind in stack.layer_types][: len(base)]
    for apply in rotary_functions(stack) or [_no_rotary]:
        kinds: list[LayerKind] = []
        try:
            for i, name in enumerate(names):
                turn = partial(_turned, apply, rotary, name)
                moved = {delta: layers[i] for delta, layers in shifted.items()}
                noisy = again[i] if again else None
                kinds.append(_kind_of(i, base[i], moved, others[i], noisy, turn, dtype))
        except UnsupportedModelError as exc:
            refused = refused or exc
        else:
            return Repositioner(tuple(kinds), names, rotary, apply)
    assert refused is not None
    raise refused


def _turned(
    apply: RotaryApply, rotary: Any, name: str, keys: torch.Tensor, offset: int
) -> torch.Tensor:
    """``keys``, all moved by ``offset``."""
    offsets = torch.full((keys.shape[-2],), offset, device=keys.device)
    return apply_rotary(apply, keys, rotary_table(rotary, name, offsets))


def _no_rotary(*_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    raise TypeError("the model has no rotary function")


def _kind_of(
    layer: int,
    base: tuple[torch.Tensor, torch.Tensor],
    shifted: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
    other: tuple[torch.Tensor, torch.Tensor],
    again: tuple[torch.Tensor, torch.Tensor] | None,
    turn: Callable[[torch.Tensor, int], torch.Tensor],
    dtype: torch.dtype,
) -> LayerKind:
    """The kind of one layer; arguments as of :func:`classify`. ``turn(keys, Δ)`` is the model's rotary."""

    def fits(part: int, turns: bool) -> list[Misfit]:
        """The misfit of K (0) or V (1) at every offset; empty if the rotary functions do not take them."""
        carries = content(base[part], other[part])
        own = _own_noise(again[part], base[part], carries) if again else 0.0
        found = []
        with suppress(Exception):  # rotary functions of any model, given any keys
            for delta, moved in shifted.items():
                expected = base[part]
                if turns:
                    expected = turn(expected, delta)
                found.append(_misfit(moved[part], expected, carries, own, dtype, delta))
        return found if len(found) == len(shifted) else []

    keys_stay = _explains(fits(0, turns=False), fits(0, turns=True))
    if all(each.fits for each in fits(1, turns=False)):
        if keys_stay:
            return "position-free"
        if _explains(fits(0, turns=True), fits(0, turns=False)):
            return "rotary"
        raise UnsupportedModelError(
            f"the keys of layer {layer} change with position in another way than by the model's rotary "
            "functions, so they cannot be moved; use mode full"
        )
    if keys_stay and _explains(fits(1, turns=True), fits(1, turns=False)):
        return "latent"
    if layer:
        why = f"the attention below layer {layer} depends on where in the prompt a token is"
    else:
        why = "the values of layer 0 change with position, as where positions are added to the embeddings"
    raise UnsupportedModelError(f"{why}, so the KV of a chunk fits only one place; use mode full")


def _explains(kind: Sequence[Misfit], other: Sequence[Misfit]) -> bool:
    """Whether ``kind`` fits at every offset, and :data:`MARGIN` times better than ``other``."""
    if not kind or not all(each.fits for each in kind):
        return False
    worst = max(each.overall for each in kind)
    return not other or max(each.overall for each in other) >= MARGIN * worst


def _misfit(
    actual: torch.Tensor,
    expected: torch.Tensor,
    carries: torch.Tensor,
    own: torch.Tensor | float,
    dtype: torch.dtype,
    offset: int = 0,
) -> Misfit:
    """The error of K or V ``[Hkv, n, D]`` in units of noise and rounding.

    The model's table rounds angles to float32, which counts at far positions.
    """
    rounding = max(torch.finfo(dtype).eps, offset * torch.finfo(torch.float32).eps)
    noise = NOISE.get(dtype, NOISE[torch.bfloat16])
    allowed = noise * carries + rounding * magnitude(actual, expected) + own
    return misfit(actual, expected, allowed)


def _own_noise(again: torch.Tensor, base: torch.Tensor, carries: torch.Tensor) -> torch.Tensor:
    """What two exact computations may differ by, per channel: ``[Hkv, 1, D]``, float32."""
    error = (again.float() - base.float()).square().mean(-2, keepdim=True).sqrt()
    return 2 * error.minimum(MAX_OWN_NOISE * carries)
