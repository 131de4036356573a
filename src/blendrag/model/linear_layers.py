"""Layers with a running state: what a chunk does to the state, so that it can be done anywhere.

For fixed inputs the state of a linear layer after a chunk is ``A · before + B``. In Mamba-2 ``A`` is a decay
of each head, in delta rules a matrix for each. A causal convolution of width w keeps its last w inputs, which
are the chunk's own (HYPIC, arXiv:2607.01299; LinearKV, arXiv:2608.11231).

Which of these a layer is, is measured and not looked up by name. The layer's own module runs again over the
same inputs, from states that tell ``A``, and from a random one, which must give what ``A`` and ``B`` say.
``A`` and ``B`` of a chunk are found in the same way while it is encoded. The module is not changed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.cache_utils import Cache

from blendrag.errors import UnsupportedModelError
from blendrag.model.sharing import is_given
from blendrag.store.kv import StateShape

#: Largest error of ``A · before + B``, relative to the largest number of the state, by the state's dtype.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
#: A state before some tokens is enlarged by these factors until the one after them is so many times larger.
ENLARGED, VISIBLE = [2.0**power for power in range(0, 73, 12)], 8.0


class Map(Enum):
    """What ``A`` is."""

    DECAY = "one factor for each number of the state"
    ROWS = "a matrix for each head, over the second to last dimension"
    COLUMNS = "a matrix for each head, over the last dimension"


@dataclass(frozen=True)
class RecurrentState:
    """One recurrent state of a layer: ``shape`` begins with a batch of 1."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    map: Map
    constant: tuple[int, ...] = ()
    """Dimensions along which a decay is the same number."""

    @property
    def map_shape(self) -> tuple[int, ...]:
        """That of ``A``."""
        if self.map is Map.DECAY:
            return tuple(1 if i in self.constant else n for i, n in enumerate(self.shape))
        *heads, rows, columns = self.shape
        size = rows if self.map is Map.ROWS else columns
        return (*heads, size, size)

    def probes(self) -> Iterator[torch.Tensor]:
        """States, the differences of whose results are the columns of ``A``, one after another."""
        if self.map is Map.DECAY:
            yield torch.ones(self.shape)
            return
        *heads, rows, columns = self.shape
        size, width = (rows, columns) if self.map is Map.ROWS else (columns, rows)
        for first in range(0, size, width):
            probe = torch.eye(size)[:, first : first + width]  # [size, ≤ width]
            probe = nn.functional.pad(probe, (0, width - probe.shape[1]))
            probe = probe if self.map is Map.ROWS else probe.T
            yield probe.expand(*heads, rows, columns)

    def map_of(self, differences: Sequence[torch.Tensor]) -> torch.Tensor:
        """``A`` (:attr:`map_shape`) from what the probes changed."""
        if self.map is Map.DECAY:
            (decay,) = differences
            for dim in self.constant:
                decay = decay.narrow(dim, 0, 1)
            return decay
        size = self.map_shape[-1]
        if self.map is Map.ROWS:
            return torch.cat([*differences], -1)[..., :size]
        return torch.cat([*differences], -2)[..., :size, :]

    def applied(self, a: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """``A · before``, float32."""
        a, before = a.float(), before.float()
        if self.map is Map.DECAY:
            return a * before
        return a @ before if self.map is Map.ROWS else before @ a


@dataclass(frozen=True)
class ConvState:
    """The last inputs of a convolution: ``shape`` is ``[1, channels, width]``."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class RunningStates(NamedTuple):
    """What a layer holds, in the order of its states."""

    recurrent: tuple[torch.Tensor, ...]
    conv: tuple[torch.Tensor, ...]


class LayerRecord(NamedTuple):
    """What a chunk does to a layer's states."""

    maps: tuple[torch.Tensor, ...]
    """``A`` of each recurrent state."""
    added: tuple[torch.Tensor, ...]
    """``B`` of each recurrent state."""
    tails: tuple[torch.Tensor, ...]
    """Each convolution's state after the chunk."""


@dataclass(frozen=True)
class Place:
    """Which running states of a layer of a cache a module writes: all of them, or some (Inkling)."""

    layer: int
    recurrent: tuple[int, ...] = ()
    conv: tuple[int, ...] = ()

    @classmethod
    def of_all(cls, cache: Cache, layer: int) -> Place:
        """All states that the layer holds."""
        held = cache.layers[layer]
        both = (getattr(held, name, {}) for name in ("recurrent_states", "conv_states"))
        return cls(
            layer, *(tuple(i for i, s in states.items() if s is not None) for states in both)
        )

    def __bool__(self) -> bool:
        return bool(self.recurrent or self.conv)


@dataclass(frozen=True, eq=False)
class LinearLayer:
    """The running states that one module writes into a layer of a cache."""

    place: Place
    mixer: nn.Module
    recurrent: tuple[RecurrentState, ...]
    conv: tuple[ConvState, ...]

    @property
    def shape(self) -> StateShape:
        """As the store keeps a record."""
        return StateShape(sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._parts))

    @property
    def _parts(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes of a record's tensors in the order of their bytes, wide numbers first."""
        parts = [(each.map_shape, each.dtype) for each in self.recurrent]
        parts += [(each.shape, each.dtype) for each in self.recurrent]
        parts += [(each.shape, each.dtype) for each in self.conv]
        return sorted(parts, key=lambda part: -part[1].itemsize)

    @property
    def _order(self) -> list[int]:
        """Which of a record's tensors each of :attr:`_parts` is."""
        dtypes = 2 * [each.dtype for each in self.recurrent] + [each.dtype for each in self.conv]
        return sorted(range(len(dtypes)), key=lambda i: -dtypes[i].itemsize)

    def packed(self, record: LayerRecord) -> torch.Tensor:
        """The bytes of a record: uint8, :meth:`StateShape.tensor_shape`."""
        tensors = [*record.maps, *record.added, *record.tails]
        flat = [tensors[i].contiguous().view(-1).view(torch.uint8) for i in self._order]
        return torch.cat(flat).view(self.shape.tensor_shape(0))

    def unpacked(self, stored: torch.Tensor) -> LayerRecord:
        """The record of these bytes; its tensors are views."""
        flat, found, begin = stored.view(-1), dict[int, torch.Tensor](), 0
        for i, (shape, dtype) in zip(self._order, self._parts, strict=True):
            end = begin + math.prod(shape) * dtype.itemsize
            found[i] = flat[begin:end].view(dtype).view(shape)
            begin = end
        tensors, n = [found[i] for i in range(len(found))], len(self.recurrent)
        return LayerRecord(tuple(tensors[:n]), tuple(tensors[n : 2 * n]), tuple(tensors[2 * n :]))

    def after(self, record: LayerRecord, before: RunningStates, tokens: int) -> RunningStates:
        """The states after a chunk of so many ``tokens`` that follows ``before``."""
        recurrent = tuple(
            (state.applied(a, s) + b.float()).to(state.dtype)
            for state, a, b, s in zip(
                self.recurrent, record.maps, record.added, before.recurrent, strict=True
            )
        )
        conv = tuple(
            torch.cat((old[..., tokens:], tail[..., -min(tokens, tail.shape[-1]) :]), -1)
            for tail, old in zip(record.tails, before.conv, strict=True)
        )
        return RunningStates(recurrent, conv)

    # -- in a cache ---------------------------------------------------------------------------------

    def held(self, cache: Cache) -> RunningStates:
        """Copies of what ``cache`` holds."""
        return held(cache, self.place)

    def put(self, cache: Cache, states: RunningStates) -> None:
        """Write ``states`` into ``cache``."""
        recurrent, conv = _tensors(cache, self.place)
        for there, given in zip(
            (*recurrent, *conv), (*states.recurrent, *states.conv), strict=True
        ):
            there.copy_(given)


def _tensors(cache: Cache, place: Place) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The recurrent states and those of convolutions at a place in ``cache``, which are written in place."""
    layer: Any = cache.layers[place.layer]
    recurrent = [layer.recurrent_states[i] for i in place.recurrent]
    return recurrent, [layer.conv_states[i] for i in place.conv]


def has_states(cache: Cache, index: int) -> bool:
    """Whether a layer of ``cache`` has running states, after a forward."""
    return bool(Place.of_all(cache, index))


def held(cache: Cache, place: Place) -> RunningStates:
    """Copies of the states that ``cache`` holds at a place."""
    recurrent, conv = _tensors(cache, place)
    return RunningStates(tuple(s.clone() for s in recurrent), tuple(s.clone() for s in conv))


def with_states(cache: Cache, place: Place, states: RunningStates) -> Cache:
    """``cache`` for one more run of a layer's module, which holds copies of ``states`` at a place."""
    scratch, layer = copy.copy(cache), copy.copy(cache.layers[place.layer])
    keys = place.recurrent, place.conv
    for name, own, given in zip(("recurrent_states", "conv_states"), keys, states, strict=True):
        if own:
            copied = {i: s.clone() for i, s in zip(own, given, strict=True)}
            setattr(layer, name, {**getattr(layer, name), **copied})
    scratch.layers = [*cache.layers]
    scratch.layers[place.layer] = layer
    return scratch


def joined(outputs: Sequence[Any]) -> Any:
    """The outputs of several parts as one: tensors ``[1, n, D]``, or tuples that begin with one."""
    if isinstance(outputs[0], torch.Tensor):
        return torch.cat([*outputs], 1)
    return (torch.cat([output[0] for output in outputs], 1), *outputs[-1][1:])


class MixerRun(NamedTuple):
    """One run of a layer's module within a forward, which can be repeated from other states."""

    mixer: nn.Module
    place: Place
    cache: Cache
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    before: RunningStates
    after: RunningStates

    def run_from(self, states: RunningStates) -> RunningStates:
        """What the layer's states are after the same inputs behind other ``states``."""
        scratch = with_states(self.cache, self.place, states)
        args = tuple(scratch if each is self.cache else each for each in self.args)
        kwargs = {k: scratch if each is self.cache else each for k, each in self.kwargs.items()}
        self.mixer.forward(*args, **kwargs)
        return held(scratch, self.place)


@contextmanager
def calls(
    mixers: Sequence[tuple[Place, nn.Module]], cache: Cache, note: Callable[[MixerRun], None]
) -> Iterator[None]:
    """Within this context ``note`` is told each run of one of the ``mixers`` (with the states that it writes)
    over ``cache``, right after it."""
    before: dict[nn.Module, RunningStates] = {}

    def hooks(place: Place, mixer: nn.Module) -> tuple[Callable[..., None], Callable[..., None]]:
        def begin(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            if is_given(cache, args, kwargs):
                before[mixer] = held(cache, place)

        def end(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            if is_given(cache, args, kwargs):
                states = before.pop(mixer), held(cache, place)
                note(MixerRun(mixer, place, cache, args, kwargs, *states))

        return begin, end

    with ExitStack() as hooked:
        for place, mixer in mixers:
            begin, end = hooks(place, mixer)
            hooked.callback(mixer.register_forward_pre_hook(begin, with_kwargs=True).remove)
            hooked.callback(mixer.register_forward_hook(end, with_kwargs=True).remove)
        yield


def record_of(layer: LinearLayer, call: MixerRun, enlarged: float = 1.0) -> LayerRecord:
    """What the call's inputs do to the layer's states, by running it once more or, for a matrix that is wider
    than the state, several times. ``enlarged``: probes are so many times as large as the state."""
    states = layer.recurrent
    # a probe as large as the state: the difference of two large numbers has few digits
    sizes = [enlarged * _power_of_two(float(s.abs().max())) for s in call.after.recurrent]
    differences: list[list[torch.Tensor]] = [[] for _ in states]
    probes = [[*state.probes()] for state in states]
    for turn in range(max(map(len, probes), default=0)):
        tried = [
            before + (size * each[min(turn, len(each) - 1)]).to(before)
            for before, size, each in zip(call.before.recurrent, sizes, probes, strict=True)
        ]
        found = call.run_from(RunningStates(tuple(tried), call.before.conv)).recurrent
        for i, (now, after, each) in enumerate(
            zip(found, call.after.recurrent, probes, strict=True)
        ):
            if turn < len(each):
                differences[i].append((now.float() - after.float()) / sizes[i])
    maps = [state.map_of(found) for state, found in zip(states, differences, strict=True)]
    added = [
        (after.float() - state.applied(a, before)).to(state.dtype)
        for state, a, before, after in zip(
            states, maps, call.before.recurrent, call.after.recurrent, strict=True
        )
    ]
    maps = [a.to(state.dtype) for state, a in zip(states, maps, strict=True)]
    return LayerRecord(tuple(maps), tuple(added), call.after.conv)


def _power_of_two(size: float) -> float:
    return 2.0 ** round(math.log2(size)) if 0 < size < math.inf else 1.0


@dataclass(frozen=True)
class KnownLinear:
    """What was measured of a :class:`LinearLayer`, without the model."""

    layer: int
    mixer: str
    """Its name within the decoder layer."""
    recurrent: tuple[int, ...]
    conv: tuple[int, ...]
    maps: tuple[str, ...]
    """Names of :class:`Map`, for each recurrent state."""
    constant: tuple[tuple[int, ...], ...]
    """:attr:`RecurrentState.constant` of each."""

    @classmethod
    def of(cls, linear: LinearLayer, layers: Sequence[nn.Module]) -> KnownLinear:
        """``layers``: the decoder layers."""
        place, states = linear.place, linear.recurrent
        modules = layers[place.layer].named_modules()
        name = next(name for name, module in modules if module is linear.mixer)
        maps, constant = (state.map.name for state in states), (state.constant for state in states)
        return cls(place.layer, name, place.recurrent, place.conv, tuple(maps), tuple(constant))

    def linear_layer(self, layers: Sequence[nn.Module], cache: Cache) -> LinearLayer:
        """It over ``cache``, which holds some tokens."""
        place = Place(self.layer, self.recurrent, self.conv)
        recurrent, conv = _tensors(cache, place)
        states = (
            RecurrentState(tuple(s.shape), s.dtype, Map[kind], constant)
            for s, kind, constant in zip(recurrent, self.maps, self.constant, strict=True)
        )
        return LinearLayer(
            place,
            layers[self.layer].get_submodule(self.mixer),
            tuple(states),
            tuple(ConvState(tuple(s.shape), s.dtype) for s in conv),
        )


def recalled(
    known: Sequence[KnownLinear], layers: Sequence[nn.Module], cache: Cache
) -> list[LinearLayer] | None:
    """The linear layers of a model whose ``cache`` holds some tokens, if they are those of which the states
    are ``known``; else ``None``."""
    held = [
        one
        for index in range(len(cache.layers))
        if has_states(cache, index)
        for one in _single(Place.of_all(cache, index))
    ]
    own = [one for each in known for one in _single(Place(each.layer, each.recurrent, each.conv))]
    if len(own) != len(held) or {*own} != {*held}:
        return None
    try:
        return [each.linear_layer(layers, cache) for each in known]
    except (AttributeError, KeyError, IndexError, ValueError):
        return None  # made by other code


# -- measured when the model is loaded ------------------------------------------------------------------


def find_mixers(
    layers: Sequence[nn.Module], cache: Cache, forward: Callable[[], object]
) -> list[tuple[Place, nn.Module]]:
    """Which modules write the running states of each layer of ``cache``, in a ``forward`` over it.

    Raises :class:`UnsupportedModelError` for states that no module writes that gets the cache.
    """
    linear = [i for i in range(min(len(layers), len(cache.layers))) if has_states(cache, i)]
    smallest: dict[Place, tuple[int, nn.Module]] = {}
    """By a single state."""

    def note(call: MixerRun) -> None:
        size = sum(1 for _ in call.mixer.modules())
        sides = ((*states.recurrent, *states.conv) for states in (call.before, call.after))
        for place, old, new in zip(_single(call.place), *sides, strict=True):
            is_larger = place in smallest and smallest[place][0] <= size
            if not is_larger and not torch.equal(old, new):
                smallest[place] = size, call.mixer

    places = [Place.of_all(cache, index) for index in linear]
    with ExitStack() as watched:
        for place in places:
            for module in layers[place.layer].modules():
                watched.enter_context(calls([(place, module)], cache, note))
        forward()
    found = list[tuple[Place, nn.Module]]()
    for place in places:
        written: dict[nn.Module, list[Place]] = {}
        for each in _single(place):
            if each not in smallest:
                raise UnsupportedModelError(
                    f"the running state of layer {place.layer} is written by no module that is given the "
                    "cache, so a chunk's part of it cannot be told; use mode full"
                )
            written.setdefault(smallest[each][1], []).append(each)
        for mixer, own in written.items():
            keys = (
                sum((getattr(each, name) for each in own), ()) for name in ("recurrent", "conv")
            )
            found.append((Place(place.layer, *keys), mixer))
    return found


def _single(place: Place) -> list[Place]:
    """The places of single states, in order."""
    recurrent = [Place(place.layer, (i,), ()) for i in place.recurrent]
    return recurrent + [Place(place.layer, (), (i,)) for i in place.conv]


def measured(call: MixerRun, tokens: int) -> LinearLayer:
    """What kind of layer made this ``call`` with so many ``tokens``: few, so that states do not decay.

    Raises :class:`UnsupportedModelError` if its states are no affine map of those before.
    """
    conv = tuple(ConvState(tuple(s.shape), s.dtype) for s in call.after.conv)
    states = tuple(call.after.recurrent)
    enlarged, other, expected = _visible(call)
    emptied = tuple(map(torch.zeros_like, call.before.conv))
    of_empty = call.run_from(
        call.before._replace(conv=emptied)
    )  # other maps, as a convolution comes first
    other, expected = other._replace(conv=emptied), expected._replace(conv=of_empty.conv)
    worst = math.inf
    for kind in Map:
        if kind is not Map.DECAY and any(s.ndim < 3 for s in states):
            continue
        kinds = tuple(RecurrentState(tuple(s.shape), s.dtype, kind) for s in states)
        layer = LinearLayer(call.place, call.mixer, kinds, conv)
        record = record_of(layer, call, enlarged)
        misfit = _misfit(layer.after(record, other, tokens), expected)
        if misfit <= 1:
            return replace(layer, recurrent=tuple(map(_narrowed, kinds, record.maps)))
        worst = min(worst, misfit)
    off = f" (off by {worst:.3g} times what is allowed)" if worst < math.inf else ""
    raise UnsupportedModelError(
        f"the state of layer {call.place.layer} ({type(call.mixer).__name__}) after a chunk is no linear "
        f"function of the state before it{off}, so what a chunk does to it cannot be stored; use mode full"
    )


def _narrowed(state: RecurrentState, a: torch.Tensor) -> RecurrentState:
    """``state`` with the dimensions along which its decay ``a`` is the same number."""
    if state.map is not Map.DECAY:
        return state
    allowed = TOLERANCE[state.dtype] / 10
    # never over the first ones: heads may be equal by chance
    spreads = {dim: (a - a.narrow(dim, 0, 1)).abs() / a.abs().max() for dim in range(2, a.ndim)}
    constant = (dim for dim, spread in spreads.items() if float(spread.max()) <= allowed)
    return replace(state, constant=tuple(constant))


def _visible(call: MixerRun) -> tuple[float, RunningStates, RunningStates]:
    """Random states before the call's inputs, so many times as large as those after the call that they count
    for more than the inputs, and what is after them. A state may decay to nothing within a few tokens."""
    after: RunningStates = call.after
    for enlarged in ENLARGED:
        before = _random_states(call, enlarged)
        after = call.run_from(before)
        pairs = zip(after.recurrent, call.after.recurrent, strict=True)
        if all(
            float((new - old).abs().max()) > VISIBLE * float(old.abs().max()) for new, old in pairs
        ):
            break
    return enlarged, before, after


def _random_states(call: MixerRun, enlarged: float) -> RunningStates:
    """States so many times as large as those after the call."""
    generator = torch.Generator().manual_seed(5)

    def like(state: torch.Tensor) -> torch.Tensor:
        scale = state.float().square().mean().sqrt()
        return (scale * torch.randn(state.shape, generator=generator).to(scale)).to(state)

    return RunningStates(tuple(enlarged * like(s) for s in call.after.recurrent), call.before.conv)


def _misfit(found: RunningStates, expected: RunningStates) -> float:
    """The largest error, in units of what is allowed; infinite for NaN."""
    worst = 0.0
    for is_conv, (some, others) in enumerate(zip(found, expected, strict=True)):
        for one, other in zip(some, others, strict=True):
            error = float((one.float() - other.float()).abs().max())
            allowed = 0.0 if is_conv else TOLERANCE[other.dtype] * float(other.float().abs().max())
            if not error <= allowed:
                worst = max(worst, error / allowed) if allowed and error == error else math.inf
    return worst
