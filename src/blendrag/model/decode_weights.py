"""Packed copies of a model's linear layers, for forwards that decode a token of one or a few requests.

Such a forward reads every weight once, so most of its time is that of reading memory. In 8 or 4 bits that
takes half or a quarter of the time; for more rows, products in the model's own dtype are faster. So a layer
keeps its weights, and :meth:`DecodeWeights.decode` multiplies by the packed copy within forwards that decode.
The idea is that of gpt-fast's ``quantize.py``, the operators are torch's.

- :data:`FORMATS`: ``int8`` (a scale for each output channel), ``int4`` (scale and minimum for 32 inputs).
- :func:`linear_layers`, :func:`why_not`: what is packed, and why a model keeps its own weights.
- :func:`pack`: the copies, which :class:`DecodeWeights` uses.
- :func:`most_rows`: measures up to how many rows they are faster.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from blendrag.model.compat import int4_pack, int4_product, int8_product, write_count
from blendrag.model.fingerprint import SAMPLES, is_quantised
from blendrag.model.structure import text_modules

#: The name of the model's own weights.
NATIVE = "native"
#: Inputs that share a scale and a minimum in ``int4``.
GROUP = 32
#: Layers with fewer weights keep their own: there the call takes longer than the reading.
MIN_WEIGHTS = 2**16
#: Rows of a weight that are packed at a time, so that float32 copies stay in the processor's caches.
ROWS_AT_A_TIME = 512
#: Outputs of a layer by which a format is chosen.
COMPARED_ROWS = 64
#: Logits of the likeliest tokens that are computed by the LM head's own weights.
EXACT_LOGITS = 32
#: Numbers of rows that are timed.
TIMED_ROWS = (1, 2, 4, 8, 16, 32)
#: Over how many layers of a shape: enough weights that no cache holds them all.
TIMED_LAYERS = 8
#: So many rounds in a row must agree with the shortest times, within at most so many.
TIMED_ROUNDS, MOST_ROUNDS = 3, 12
#: Difference of times, as a share, from which it matters that rounds disagree.
NEARLY_EQUAL = 0.05
#: Steps in shares of a group's range that ``int4`` tries; the one with the smallest squared error is taken:
#: weights that were unpacked from 4 bits need not have all 16 values, and others gain by a narrower range.
_STEPS = [(levels, 1.0) for levels in range(15, 9, -1)] + [(15, 0.9), (15, 0.8)]

#: A packed weight: the tensors that its format's product takes.
Packed = tuple[torch.Tensor, ...]


class PackedWeights(dict[str, Packed]):
    """The packed copies of a model's layers by name, which engines over the same weights share."""


@dataclass(frozen=True)
class PackedFormat:
    """One way to pack a weight ``[N, K]``."""

    name: str
    pack: Callable[[torch.Tensor], Packed]
    """Rows of a weight, in float32."""
    product: Callable[..., torch.Tensor]
    """``(x [M, K], *packed)`` → ``[M, N]``"""
    axes: tuple[int, ...]
    """The axes along which the tensors of blocks of outputs are joined."""
    fits: Callable[[int, int], bool]
    """Whether the operator takes a weight of N outputs and K inputs."""


# -- int8 -----------------------------------------------------------------------------------------


def _pack_int8(weight: torch.Tensor) -> Packed:
    scales = (weight.abs().amax(1) / 127).clamp_min(1e-12).bfloat16()  # [N]
    rounded = (weight / scales.float()[:, None]).round_().clamp_(-127, 127)
    return rounded.to(torch.int8), scales


# -- int4 -----------------------------------------------------------------------------------------


def _pack_int4(weight: torch.Tensor) -> Packed:
    return packed_int4(*round_int4(weight))


def round_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Whole numbers in [-8, 7] ``[N, K/32, 32]``, scales and zeros ``[N, K/32, 1]`` that stand for a float32
    ``weight`` ``[N, K]``: whole number · scale + zero."""
    groups = weight.unflatten(1, (-1, GROUP))  # [N, K/32, 32]
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    middle, half = (low + high) / 2, (high - low) / 2
    best: tuple[torch.Tensor, ...] = ()
    for levels, share in _STEPS:
        scale = (half * share * 2 / levels).clamp_min(1e-8).bfloat16().float()  # [N, K/32, 1]
        zero = (middle - half * share + 8 * scale).bfloat16().float()
        error = _rounded(groups, scale, zero).mul_(scale).add_(zero).sub_(groups)
        tried: tuple[torch.Tensor, ...] = error.square_().sum(-1, keepdim=True), scale, zero
        if best:
            better = tried[0] < best[0]
            tried = tuple(
                torch.where(better, new, old) for new, old in zip(tried, best, strict=True)
            )
        best = tried
    _, scale, zero = best
    return _rounded(groups, scale, zero), scale, zero


def _rounded(groups: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    return ((groups - zero) / scale).round_().clamp_(-8, 7)


def packed_int4(rounded: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> Packed:
    """What :func:`round_int4` returns, in the operator's layout."""
    packed = int4_pack((rounded + 8).to(torch.int32).flatten(1))
    # [K/32, N, 2], as the operator reads them
    return packed, torch.cat((scale, zero), -1).bfloat16().transpose(0, 1).contiguous()


FORMATS: Mapping[str, PackedFormat] = {
    each.name: each
    for each in (
        PackedFormat("int8", _pack_int8, int8_product, (0, 0), lambda n, k: True),
        PackedFormat(
            "int4", _pack_int4, int4_product, (0, 1),
            lambda n, k: n % 16 == 0 and k % GROUP == 0,
        ),
    )
}  # fmt: skip


# -- what is packed -------------------------------------------------------------------------------


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """By name, the layers of ``model`` that may be packed: plain ones that are large enough and decode text.

    Subclasses, hooked forwards and experts that are no modules keep their own weights.
    """
    of_text = text_modules(model)
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and module in of_text
        and "forward" not in vars(module)
        and module.weight.numel() >= MIN_WEIGHTS
        # torch's products (2.13) read 16 inputs or a group at a time, also beyond the end of a row
        and module.in_features % GROUP == 0
        and module.weight.is_contiguous()
    }


def why_not(model: nn.Module) -> str:
    """Why ``model`` decodes with its own weights, in a clause; empty if it may be packed."""
    if is_quantised(model):
        return "its weights are quantised already"
    layers = linear_layers(model).values()
    if not layers:
        return f"it has no linear layer of at least {MIN_WEIGHTS:,} weights"
    weights = [layer.weight for layer in layers]
    if any(weight.device.type != "cpu" for weight in weights):
        return "packed weights are for CPUs"
    if any(weight.dtype != torch.bfloat16 for weight in weights):
        return "packed weights are multiplied in bfloat16, and the model computes in another dtype"
    if not is_available():
        return "this build of torch has no products of packed weights for this CPU"
    return ""


@functools.cache
def is_available() -> bool:
    """Whether torch has all :data:`FORMATS` on this CPU."""
    weight = torch.ones(16, GROUP)
    row = torch.ones(1, GROUP, dtype=torch.bfloat16)
    try:
        for each in FORMATS.values():
            each.product(row, *each.pack(weight))
    except (RuntimeError, NotImplementedError, AttributeError):
        return False
    return True


def size_bytes(model: nn.Module) -> int:
    """Memory that packed copies of ``model`` take at most."""
    return sum(layer.weight.numel() for layer in linear_layers(model).values())


@torch.inference_mode()
def pack(model: nn.Module, name: str) -> PackedWeights:
    """Packed copies of the :func:`linear_layers` of ``model`` for decode weights ``name``.

    With ``int8``, a layer whose weights are nearer to a copy in 4 bits gets that: they were unpacked from a
    file with 4 bits. With ``int4``, all have 4 bits but the LM head, whose rounding changes more tokens than
    that of all others.
    """
    eight, four = FORMATS["int8"], FORMATS["int4"]
    head = model.get_output_embeddings()  # type: ignore[operator]

    def kind_of(layer: nn.Linear) -> PackedFormat:
        if not four.fits(*layer.weight.shape):
            return eight
        if name == "int4":
            return eight if layer is head else four
        return four if _is_nearer_in_4_bits(layer.weight) else eight

    return PackedWeights(
        (at, packed(one.weight, kind_of(one))) for at, one in linear_layers(model).items()
    )


def _is_nearer_in_4_bits(weight: torch.Tensor) -> bool:
    """Whether 4 bits give a smaller squared error than 8, measured on some of the outputs."""
    rows = weight.detach()[:: -(-len(weight) // COMPARED_ROWS)].float()
    rounded, scales = _pack_int8(rows)
    eight = (rounded.float() * scales.float()[:, None] - rows).square().sum()
    numbers, scale, zero = round_int4(rows)
    return bool(((numbers * scale + zero).flatten(1) - rows).square().sum() < eight)


def packed(weight: torch.Tensor, kind: PackedFormat) -> Packed:
    """A packed copy of ``weight`` ``[N, K]``."""
    blocks = [kind.pack(rows.float()) for rows in weight.detach().split(ROWS_AT_A_TIME)]
    return tuple(
        torch.cat(parts, axis)
        for axis, parts in zip(kind.axes, zip(*blocks, strict=True), strict=True)
    )


def format_of(copy: Packed) -> PackedFormat:
    """The format of a packed weight."""
    return FORMATS["int8" if copy[0].dtype == torch.int8 else "int4"]


# -- decoding with them ---------------------------------------------------------------------------


class _Thread:
    """The thread whose forwards use the copies now; others compute as without them."""

    ident = 0


class PackedLayer:
    """A linear layer and its packed copy."""

    def __init__(self, layer: nn.Linear, packed: Packed, is_head: bool, using: _Thread) -> None:
        """``is_head``: its outputs are logits."""
        self.layer = layer
        self.packed = packed
        self.kind = format_of(packed)
        self.is_head = is_head
        self.max_rows = TIMED_ROWS[-1]
        """Most rows for which the copy is used."""
        product, weight, bias, outputs = (
            self.kind.product,
            layer.weight,
            layer.bias,
            layer.out_features,
        )
        exact = min(EXACT_LOGITS, outputs)

        def multiply(x: torch.Tensor) -> torch.Tensor:
            """``[..., K]`` → ``[..., N]``"""
            out = product(x.reshape(-1, x.shape[-1]).contiguous(), *packed)
            if bias is not None:
                out += bias
            return out.view(*x.shape[:-1], outputs)

        def logits(x: torch.Tensor) -> torch.Tensor:
            """Those that are highest by the copy are computed again by the layer's own weights."""
            rows = x.reshape(-1, x.shape[-1])  # [R, K]
            out = multiply(rows)
            highest = out.topk(exact).indices  # [R, E]
            own = torch.bmm(weight[highest], rows[:, :, None]).squeeze(2)
            if bias is not None:
                own += bias[highest]
            return out.scatter_(1, highest, own).view(*x.shape[:-1], outputs)

        def forward(x: torch.Tensor) -> torch.Tensor:
            return mine(x) if get_ident() == using.ident else F.linear(x, weight, bias)

        mine = logits if is_head else multiply
        self.multiply = mine
        self.forward = forward


class DecodeWeights:
    """The packed copies of one model. Used under the model's lock."""

    def __init__(self, model: nn.Module, name: str, packed: PackedWeights) -> None:
        """``packed``: what :func:`pack` made of ``model``, or of one with the same weights, for that
        ``name``."""
        self.name = name
        self._packed = packed
        self._using = _Thread()
        head = model.get_output_embeddings()  # type: ignore[operator]
        layers = linear_layers(model)
        self.layers = {
            at: PackedLayer(layers[at], copy, layers[at] is head, self._using)
            for at, copy in [*packed.items()]  # an engine over another model may drop some
        }
        self._by_rows: dict[int, list[tuple[dict[str, Any], Callable[..., Any]]]] = {}
        self._marks, self._samples = self._state()

    @property
    def size_bytes(self) -> int:
        """Memory of the copies."""
        return sum(part.nbytes for layer in self.layers.values() for part in layer.packed)

    def limit_rows(self, names: Collection[str], rows: int) -> None:
        """Use the copies of these layers for at most so many rows; forget them if that is 0."""
        for name in names:
            self.layers[name].max_rows = rows
            if not rows:
                del self.layers[name]
                self._packed.pop(name, None)
        self._by_rows.clear()
        self._marks, self._samples = self._state()

    @property
    def are_current(self) -> bool:
        """Whether the layers have the weights that were packed, and nobody has replaced their forwards."""
        marks, samples = self._state()
        hooked = any("forward" in vars(each.layer) for each in self.layers.values())
        return not hooked and marks == self._marks and torch.equal(samples, self._samples)

    def _state(self) -> tuple[list[tuple[int, int]], torch.Tensor]:
        """Addresses and write counts of the weights, and some of their values, which a write through
        ``weight.data`` changes alone."""
        weights = [each.layer.weight.detach() for each in self.layers.values()]
        marks = [(each.data_ptr(), write_count(each)) for each in weights]
        samples = [each.view(-1)[:: max(1, each.numel() // SAMPLES)] for each in weights]
        return marks, torch.cat(samples) if samples else torch.empty(0)

    def decode(self, forward: Callable[..., Any], **kwargs: Any) -> Any:
        """``forward`` of the model with ``input_ids`` ``[R, 1]``, with the copies where they are faster for
        so many rows."""
        with self.used(len(kwargs["input_ids"])):
            return forward(**kwargs)

    @contextmanager
    def used(self, rows: int) -> Iterator[None]:
        """Within this context this thread's forwards, of so many rows, use the copies."""
        chosen = self._by_rows.get(rows)
        if chosen is None:
            faster = [each for each in self.layers.values() if rows <= each.max_rows]
            chosen = self._by_rows[rows] = [(vars(each.layer), each.forward) for each in faster]
        try:
            self._using.ident = get_ident()
            for attributes, forward in chosen:  # Module.__setattr__ takes far longer
                attributes["forward"] = forward
            yield
        finally:
            self._using.ident = 0
            for attributes, _ in chosen:
                attributes.pop("forward", None)


class FastRows(NamedTuple):
    """For how many rows packed copies are faster, as measured."""

    most: int
    """0: for none."""
    is_steady: bool
    """Whether rounds of the measurement agreed; on a busy machine they may not."""


def most_rows(
    layers: Sequence[PackedLayer], clock: Callable[[], float] = time.perf_counter
) -> FastRows:
    """Up to how many rows the packed copies of ``layers``, which have one shape, are faster."""
    layers, most, is_steady = layers[:TIMED_LAYERS], 0, True
    first = layers[0].layer

    def seconds(products: Sequence[Callable[[torch.Tensor], Any]], x: torch.Tensor) -> float:
        began = clock()
        for product in products:
            product(x)
        return clock() - began

    own = [partial(F.linear, weight=one.layer.weight, bias=one.layer.bias) for one in layers]
    copies = [one.multiply for one in layers]

    def timed(x: torch.Tensor) -> tuple[float, float]:
        return seconds(own, x), seconds(copies, x)

    with torch.inference_mode():
        for rows in TIMED_ROWS:
            x = torch.ones(rows, first.in_features, dtype=first.weight.dtype)
            is_faster, agreed = _compared(partial(timed, x))
            is_steady = is_steady and agreed
            if not is_faster:
                break
            most = rows
    return FastRows(most, is_steady)


def _compared(timed: Callable[[], tuple[float, float]]) -> tuple[bool, bool]:
    """Whether the second of two is faster, by the shortest time of each, and whether rounds agree.

    ``timed()`` times both once. What disturbs some rounds is outvoted by the next ones.
    """
    times: list[tuple[float, float]] = []
    for _ in range(MOST_ROUNDS):
        times.append(timed())
        first, second = (min(each) for each in zip(*times, strict=True))
        is_faster = second < first
        last = times[-TIMED_ROUNDS:]
        if len(last) == TIMED_ROUNDS and all((b < a) is is_faster for a, b in last):
            return is_faster, True
    return is_faster, abs(second - first) <= NEARLY_EQUAL * first
