"""Packed copies of a model's linear layers, for forwards that decode a token of one or a few requests.

Such a forward reads every weight once, so most of its time is that of reading memory. In 8 or 4 bits that
takes half or a quarter of the time; for more rows, products in the model's own dtype are faster. So a layer
keeps its weights, and :meth:`DecodeWeights.decode` multiplies by the packed copy within forwards that decode.
The idea is that of gpt-fast's ``quantize.py``, the operators are torch's.

- :data:`FORMATS`: ``int8`` (a scale for each output channel), ``int4`` (scale and zero for 32 inputs),
  ``blocks`` (8 bits, scale and zero for 16 or 32 inputs: the numbers of a GGUF file).
- :func:`linear_layers`, :func:`packed_layers`, :func:`why_not`: what is packed, and why a model keeps its own
  weights.
- :func:`pack`: the copies, which :class:`DecodeWeights` uses. :func:`joined`: those of layers with the same
  input as one.
- :func:`reorder`: copies with the same numbers in another order, for the layers that have no packed copy.
- :func:`most_rows`: measures up to how many rows they are faster.
"""

from __future__ import annotations

import functools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from blendrag.model import compat
from blendrag.model.compat import int4_pack, int4_product, int8_product, write_count
from blendrag.model.fingerprint import SAMPLES, is_quantised
from blendrag.model.shared_inputs import shared_inputs
from blendrag.model.structure import text_modules
from blendrag.model.weight_blocks import EIGHT_BITS, FOUR_BITS, Grid, grids_by_use, round_blocks

#: The name of the model's own weights.
NATIVE = "native"
#: The name of a packed copy of the LM head alone, and reordered copies of other layers.
HEAD = "head"
#: Inputs that share a scale and a zero in ``int4``, and at most in ``blocks``.
GROUP = 32
#: Layers with fewer weights keep their own: there the call takes longer than the reading.
MIN_WEIGHTS = 2**16
#: Rows of a weight that are packed at a time, so that float32 copies stay in the processor's caches.
ROWS_AT_A_TIME = 512
#: Weights of a layer, and its outputs at least, by which a format is chosen.
COMPARED_WEIGHTS, MIN_COMPARED_ROWS = 2**16, 8
#: Relative error of packed weights up to which they are the numbers of a file. Rounding to bfloat16 makes
#: 0.0017 in the weights and again in the scales; weights that are in no file's blocks differ by 0.005.
UNPACKED_ERROR = 0.0035
#: Logits of the likeliest tokens that are computed by the LM head's own weights. A few suffice to choose the
#: likeliest; the others are for sampling with ``top_k`` or ``top_p``.
EXACT_LOGITS = 512
#: Numbers of rows that are timed.
TIMED_ROWS = (1, 2, 4, 8, 16, 32)
#: Over how many layers of a shape: enough weights that no cache holds them all.
TIMED_LAYERS = 8
#: So many rounds in a row must agree with the shortest times, within at most so many.
TIMED_ROUNDS, MOST_ROUNDS = 3, 12
#: Seconds after which there are no further rounds for a shape than these few.
MOST_ROUNDS_S = 1.0
#: Difference of times, as a share, from which it matters that rounds disagree.
NEARLY_EQUAL = 0.05
#: Between the names of layers that have one copy.
AND = "+"
#: int4's operator lays out so many outputs together, so that fewer can only be the last ones.
OUTPUTS_TOGETHER = 64
#: A packed weight: the tensors that its format's product takes.
Packed = tuple[torch.Tensor, ...]


class PackedWeights(dict[str, Packed]):
    """The packed copies of a model's layers by name, which engines over the same weights share. A copy of
    several layers has all their names, with :data:`AND` between them."""


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
    takes_bias: bool = False
    """Whether the product's last argument is a bias, which it adds before it rounds."""


# -- int8 -----------------------------------------------------------------------------------------


def _pack_int8(weight: torch.Tensor) -> Packed:
    scales = (weight.abs().amax(1) / 127).clamp_min(1e-12).bfloat16()  # [N]
    rounded = (weight / scales.float()[:, None]).round_().clamp_(-127, 127)
    return rounded.to(torch.int8), scales


# -- int4 and blocks ------------------------------------------------------------------------------


def _pack_int4(weight: torch.Tensor, grids: Sequence[Grid] = ()) -> Packed:
    blocks = round_blocks(weight, GROUP, FOUR_BITS, grids)
    return int4_pack(_nibbles(blocks.numbers).flatten(1)), _pairs(blocks.scale, blocks.zero)


def _pack_blocks(weight: torch.Tensor, size: int = GROUP, grids: Sequence[Grid] = ()) -> Packed:
    """A number of 8 bits is 16 · high nibble + low nibble: of each block, the high nibbles and then the low
    ones make a group of int4's operator, with one scale."""
    blocks = round_blocks(weight, size, EIGHT_BITS, grids)
    high = ((blocks.numbers + 8) / 16).floor_()
    nibbles = torch.cat((high, blocks.numbers - 16 * high), -1)  # [N, K/B, 2B]
    zero = blocks.zero / EIGHT_BITS.parts
    return int4_pack(_nibbles(nibbles).flatten(1)), _pairs(blocks.scale, zero)


def _nibbles(numbers: torch.Tensor) -> torch.Tensor:
    return (numbers + 8).to(torch.int32)


def _pairs(scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Scales and zeros as the operator reads them: ``[K/B, N, 2]``."""
    return torch.cat((scale, zero), -1).bfloat16().transpose(0, 1).contiguous()


def _blocks_product(x: torch.Tensor, packed: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """``x`` ``[M, K]`` once times 16 for the high nibbles, which is exact in bfloat16, and once as it is."""
    rows = x.shape[0]
    blocks = x.view(rows, pairs.shape[0], 1, -1)  # [M, K/B, 1, B]
    return int4_product((blocks * _PLACES).view(rows, -1), packed, pairs)


#: What a high and a low nibble count.
_PLACES = torch.tensor([[16.0], [1.0]], dtype=torch.bfloat16)


FORMATS: Mapping[str, PackedFormat] = {
    each.name: each
    for each in (
        PackedFormat("int8", _pack_int8, int8_product, (0, 0)),
        PackedFormat("int4", _pack_int4, int4_product, (0, 1)),
        PackedFormat("blocks", _pack_blocks, _blocks_product, (0, 1)),
    )
}
#: The values of ``decode_weights`` for which copies are made.
CHOICES = ("int8", "int4")

# -- reordered ------------------------------------------------------------------------------------

#: A weight's own numbers in the order in which oneDNN multiplies by them. For ``linear`` (torch 2.13) it
#: reorders them in each product.
REORDERED = PackedFormat(
    "reordered",
    lambda weight: (compat.reorder(weight),),
    compat.reordered_product,
    (),
    takes_bias=True,
)


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


def packed_layers(model: nn.Module, name: str) -> dict[str, nn.Linear]:
    """By name, the :func:`linear_layers` of which decode weights ``name`` have copies."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    layers = linear_layers(model)
    return {at: layer for at, layer in layers.items() if name != HEAD or layer is head}


def size_bytes(model: nn.Module, name: str) -> int:
    """Memory that packed copies of ``model`` take at most: 8 bits, and a scale and a zero for 16 inputs."""
    return sum(layer.weight.numel() for layer in packed_layers(model, name).values()) * 5 // 4


@torch.inference_mode()
def pack(model: nn.Module, name: str) -> PackedWeights:
    """Packed copies of the :func:`packed_layers` of ``model`` for decode weights ``name``.

    With ``int8``, a layer that was unpacked from a file with blocks of 4 to 8 bits gets the numbers of the
    file. The LM head always has 4 bits, which only find the tokens whose logits its own weights compute.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]

    def kind_of(layer: nn.Linear) -> PackedFormat:
        if layer.out_features % 16:  # int4's operator takes 16 outputs at a time
            return FORMATS["int8"]
        if name == "int4" or layer is head:
            return FORMATS["int4"]
        return _unpacked_from(layer.weight) or FORMATS["int8"]

    return PackedWeights(
        (at, packed(one.weight, kind_of(one))) for at, one in packed_layers(model, name).items()
    )


def _unpacked_from(weight: torch.Tensor) -> PackedFormat | None:
    """The format that holds the numbers of the file from which ``weight`` ``[N, K]`` was unpacked, found in
    some of its outputs; ``None`` if there is no such file."""
    rows = min(len(weight), max(MIN_COMPARED_ROWS, COMPARED_WEIGHTS // weight.shape[1]))
    some = weight.detach()[:: -(-len(weight) // rows)].float()
    most = (UNPACKED_ERROR * some.square().sum().sqrt()) ** 2
    four, eight = FORMATS["int4"], FORMATS["blocks"]
    for width, size in ((FOUR_BITS, GROUP), (EIGHT_BITS, GROUP), (EIGHT_BITS, GROUP // 2)):
        grids = grids_by_use(some, size, width)
        if (round_blocks(some, size, width, grids).weight() - some).square().sum() <= most:
            if width is FOUR_BITS:
                return replace(four, pack=partial(_pack_int4, grids=grids))
            return replace(eight, pack=partial(_pack_blocks, size=size, grids=grids))
    return None


def packed(weight: torch.Tensor, kind: PackedFormat) -> Packed:
    """A packed copy of ``weight`` ``[N, K]``."""
    blocks = [kind.pack(rows.float()) for rows in weight.detach().split(ROWS_AT_A_TIME)]
    return tuple(map(_joined, kind.axes, zip(*blocks, strict=True)))


@torch.inference_mode()
def joined(model: nn.Module, copies: PackedWeights) -> PackedWeights:
    """What :func:`pack` made of ``model``, with one copy, for one product, of layers with the same input and
    format. Empties ``copies``, so that memory holds few of them twice."""
    layers, found = layers_below_head(model), PackedWeights()
    for names in shared_inputs(model, {at: one for at, one in layers.items() if at in copies}):
        groups: dict[Any, list[str]] = defaultdict(list)
        for name in names:
            kind = format_of(copies[name], layers[name].in_features)
            others = [
                (*part.shape[:axis], *part.shape[axis + 1 :])
                for axis, part in zip(kind.axes, copies[name], strict=True)
            ]
            is_apart = layers[name].out_features % OUTPUTS_TOGETHER > 0
            groups[kind.name, *others, name if is_apart else ""].append(name)
        for (kind_name, *_), group in groups.items():
            axes = FORMATS[kind_name].axes
            parts = zip(*(copies.pop(name) for name in group), strict=True)
            found[AND.join(group)] = tuple(map(_joined, axes, parts))
    found.update(copies)  # that of the LM head
    return found


def _joined(axis: int, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), axis)


@torch.inference_mode()
def reorder(model: nn.Module) -> PackedWeights:
    """:data:`REORDERED` copies of the :func:`layers_below_head` of ``model``, where their products are bit
    for bit those of the layers. Layers with the same input have one copy."""
    layers, found = layers_below_head(model), PackedWeights()
    exact: dict[Any, bool] = {}
    for names in shared_inputs(model, layers):
        group = [layers[name] for name in names]
        shape = tuple(
            (each.out_features, each.in_features, each.bias is not None) for each in group
        )
        if shape not in exact:
            exact[shape] = _is_exact(group)
        if exact[shape]:
            found[AND.join(names)] = REORDERED.pack(_weight_of(group))
    return found


def layers_below_head(model: nn.Module) -> dict[str, nn.Linear]:
    """By name, the :func:`linear_layers` of ``model`` except its LM head."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    return {at: layer for at, layer in linear_layers(model).items() if layer is not head}


def reordered_bytes(model: nn.Module) -> int:
    """Memory that the copies of :func:`reorder` take."""
    return sum(layer.weight.nbytes for layer in layers_below_head(model).values())


def _weight_of(layers: Sequence[nn.Linear]) -> torch.Tensor:
    """``[ΣN, K]``"""
    return torch.cat([each.weight for each in layers]) if len(layers) > 1 else layers[0].weight


def _bias_of(layers: Sequence[nn.Linear]) -> torch.Tensor | None:
    """``[ΣN]``; ``None`` if none has one."""
    if len(layers) == 1 or all(each.bias is None for each in layers):
        return layers[0].bias
    return torch.cat(
        [
            each.weight.new_zeros(each.out_features) if each.bias is None else each.bias
            for each in layers
        ]
    )


def _products(layers: Sequence[nn.Linear], x: torch.Tensor) -> list[torch.Tensor]:
    """Those of the layers' own weights."""
    return [F.linear(x, each.weight, each.bias) for each in layers]


def _is_exact(layers: Sequence[nn.Linear]) -> bool:
    """Whether a reordered copy gives the same numbers as ``layers``, for all numbers of rows that are timed.
    This depends on the processor and on the shape of the weights, not on their values."""
    generator, weight, bias = torch.Generator().manual_seed(1), _weight_of(layers), _bias_of(layers)
    try:
        [copy] = REORDERED.pack(weight)
        for rows in TIMED_ROWS:
            x = torch.randn(rows, weight.shape[1], generator=generator).to(weight.dtype)
            found = REORDERED.product(x, copy, bias)
            if not torch.equal(found, torch.cat(_products(layers, x), -1)):
                return False
    except (RuntimeError, NotImplementedError, AttributeError):  # a build of torch without oneDNN
        return False
    return True


def format_of(copy: Packed, inputs: int) -> PackedFormat:
    """The format of a packed weight with so many inputs."""
    if copy[0].is_mkldnn:
        return REORDERED
    if copy[0].dtype == torch.int8:
        return FORMATS["int8"]
    return FORMATS["blocks" if copy[0].shape[1] == inputs else "int4"]


# -- decoding with them ---------------------------------------------------------------------------


class _Thread:
    """The thread whose forwards use the copies now; others compute as without them."""

    def __init__(self) -> None:
        self.ident = 0
        self.computed: dict[nn.Linear, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        """Of a copy of several layers, by the first of them: its input, and the outputs of all."""


class PackedLayer:
    """A linear layer and its packed copy, or several that get the same input and have one copy."""

    @torch.inference_mode()
    def __init__(
        self,
        layer: nn.Linear,
        packed: Packed,
        is_head: bool,
        using: _Thread,
        others: Sequence[nn.Linear] = (),
    ) -> None:
        """``is_head``: its outputs are logits. ``others``: of the copy, after ``layer``."""
        self.layer = layer
        self.layers = [layer, *others]
        self.packed = packed
        self.kind = format_of(packed, layer.in_features)
        self.is_head = is_head
        self.max_rows = TIMED_ROWS[-1]
        """Most rows for which the copy is used."""
        product, weight = self.kind.product, layer.weight
        bias, outputs = _bias_of(self.layers), self.out_features
        exact = min(EXACT_LOGITS, outputs)
        arguments = (*packed, bias) if self.kind.takes_bias else packed
        added = None if self.kind.takes_bias else bias

        def multiply(x: torch.Tensor) -> torch.Tensor:
            """``[..., K]`` → ``[..., N]``"""
            out = product(x.reshape(-1, x.shape[-1]).contiguous(), *arguments)
            if added is not None:
                out += added
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
        self.forwards = _forwards_of(self.layers, multiply, using) if others else [forward]
        """One for each of ``layers``."""

    @property
    def out_features(self) -> int:
        return sum(each.out_features for each in self.layers)

    @property
    def sources(self) -> Iterator[torch.Tensor]:
        """The weights and biases that products by the copy replace."""
        for each in self.layers:
            yield each.weight.detach()
            if each.bias is not None:
                yield each.bias.detach()


def _forwards_of(
    layers: Sequence[nn.Linear], multiply: Callable[[torch.Tensor], torch.Tensor], using: _Thread
) -> list[Callable[..., torch.Tensor]]:
    """Forwards of ``layers``, whose outputs ``multiply`` gives side by side.

    The first layer computes the outputs of all. The others return theirs if they get the same input, and
    multiply other inputs by their own weights.
    """
    sizes = [each.out_features for each in layers]
    first, last = layers[0], layers[-1]

    def forward(index: int, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        if get_ident() != using.ident:
            return F.linear(x, layer.weight, layer.bias)
        if layer is first:
            # contiguous as those of any linear layer: models call view
            using.computed[first] = x, [y.contiguous() for y in multiply(x).split(sizes, -1)]
        of, outputs = using.computed.get(first, (None, []))
        if of is not x:
            return F.linear(x, layer.weight, layer.bias)
        if layer is last:
            del using.computed[first]
        return outputs[index]

    return [partial(forward, *each) for each in enumerate(layers)]


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
        self.layers: dict[str, PackedLayer] = {}
        for at, copy in [*packed.items()]:  # an engine over another model may drop some
            one, *others = (layers[name] for name in at.split(AND))
            self.layers[at] = PackedLayer(one, copy, one is head, self._using, others)
        self._by_rows: dict[int, list[tuple[dict[str, Any], Callable[..., Any]]]] = {}
        self._marks, self._samples = self._state()

    @property
    def size_bytes(self) -> int:
        return sum(part.nbytes for layer in self.layers.values() for part in layer.packed)

    @property
    def head(self) -> PackedLayer | None:
        """The copy of the LM head."""
        return next((each for each in self.layers.values() if each.is_head), None)

    @property
    def layers_by_format(self) -> dict[str, int]:
        """How many layers have copies of each of :data:`FORMATS`."""
        return dict(Counter(one.kind.name for one in self.layers.values() for _ in one.layers))

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
        layers = (layer for each in self.layers.values() for layer in each.layers)
        hooked = any("forward" in vars(layer) for layer in layers)
        return not hooked and marks == self._marks and torch.equal(samples, self._samples)

    def _state(self) -> tuple[list[tuple[int, int]], torch.Tensor]:
        """Addresses and write counts of weights and biases, and some of their values, which a write through
        ``weight.data`` changes alone."""
        weights = [source for each in self.layers.values() for source in each.sources]
        marks = [(each.data_ptr(), write_count(each)) for each in weights]
        samples = [each.view(-1)[:: max(1, each.numel() // SAMPLES)] for each in weights]
        return marks, torch.cat(samples) if samples else torch.empty(0)

    def decode(self, forward: Callable[..., Any], **kwargs: Any) -> Any:
        """``forward`` of the model with ``input_ids`` ``[R, 1]``, by the copies where these are faster."""
        with self.used(len(kwargs["input_ids"])):
            return forward(**kwargs)

    @contextmanager
    def used(self, rows: int) -> Iterator[None]:
        """Within this context this thread's forwards, of so many rows, use the copies."""
        chosen = self._by_rows.get(rows)
        if chosen is None:
            faster = [each for each in self.layers.values() if rows <= each.max_rows]
            chosen = self._by_rows[rows] = [
                (vars(layer), forward)
                for each in faster
                for layer, forward in zip(each.layers, each.forwards, strict=True)
            ]
        try:
            self._using.ident = get_ident()
            for attributes, forward in chosen:  # Module.__setattr__ takes far longer
                attributes["forward"] = forward
            yield
        finally:
            self._using.ident = 0
            self._using.computed.clear()  # of forwards that were abandoned
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
    first, until = layers[0].layer, clock() + MOST_ROUNDS_S

    def seconds(products: Sequence[Callable[[torch.Tensor], Any]], x: torch.Tensor) -> float:
        began = clock()
        for product in products:
            product(x)
        return clock() - began

    own = [partial(_products, one.layers) for one in layers]
    copies = [one.multiply for one in layers]

    def timed(x: torch.Tensor) -> tuple[float, float]:
        return seconds(own, x), seconds(copies, x)

    with torch.inference_mode():
        for rows in TIMED_ROWS:
            x = torch.ones(rows, first.in_features, dtype=first.weight.dtype)
            is_faster, agreed = _compared(partial(timed, x), lambda: clock() < until)
            is_steady = is_steady and agreed
            if not is_faster:
                break
            most = rows
    return FastRows(most, is_steady)


def _compared(
    timed: Callable[[], tuple[float, float]], has_time: Callable[[], bool]
) -> tuple[bool, bool]:
    """Whether the second of two is faster, by the shortest time of each, and whether rounds agree.

    ``timed()`` times both once. What disturbs some rounds is outvoted by the next ones while it
    ``has_time()``.
    """
    times: list[tuple[float, float]] = []
    for _ in range(MOST_ROUNDS):
        times.append(timed())
        first, second = (min(each) for each in zip(*times, strict=True))
        is_faster = second < first
        last = times[-TIMED_ROUNDS:]
        if len(last) < TIMED_ROUNDS:
            continue
        if all((b < a) is is_faster for a, b in last):
            return is_faster, True
        if not has_time():
            break
    return is_faster, abs(second - first) <= NEARLY_EQUAL * first
