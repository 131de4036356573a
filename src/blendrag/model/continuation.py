"""Going on from a cache: the rest of a prompt behind a beginning that was computed before, for any causal LM.

Layers with a running state (linear attention, Mamba, short convolutions, sliding windows) hold something that
depends on every token so far. It cannot be moved, and it cannot be cut: it continues only the tokens that it
was taken after. So a prompt can be continued from a *state*, a copy of all that a cache holds at one place.
Layers of full attention keep K and V per token, which are left out of states and stored once for all of them.

Whether a model can go on like this is measured when it is loaded, with its own ``generate``: some forwards
ignore the state when they get several tokens (Jamba, RecurrentGemma). These models get the tokens one by one.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import Cache

from blendrag.errors import UnsupportedModelError
from blendrag.model import own_states
from blendrag.model.fingerprint import depends_on_length, is_quantised
from blendrag.model.growing_layers import grow_in_place
from blendrag.model.kv_compare import LOGIT_TOLERANCE, difference_of, shows_errors
from blendrag.model.linear_layers import has_states
from blendrag.model.structure import check_placement, decoder_list, unsupported_if_raising
from blendrag.store.kv import KVLayout, LayerShape, dtype_name
from blendrag.store.tensor_bytes import DTYPES

#: Below float32, at most this many times the tolerance is allowed to models whose own logits are as noisy.
MAX_NOISE = 4
#: Tokens of the check's prompt, and where it is cut.
CHECK_TOKENS, FIRST_CUT, SECOND_CUT = 42, 23, 37
#: Counts up when something else is measured, so that earlier results are not used.
CHECKS_VERSION = 1
#: A forward of one token takes about as long as prefilling so many.
STEP_COST = 16


class KVSource(Protocol):
    """K and V of the first tokens of a prompt."""

    tokens: int

    def read_layer(self, layer: int, out: torch.Tensor) -> None: ...


@dataclass(frozen=True)
class ContinuationChecks:
    """What a :class:`Continuation` has measured of a model."""

    in_steps: bool
    """Whether tokens that follow a state are computed one by one."""
    allowed: float
    """By how much the logits behind a state may differ from those of one forward."""


@dataclass(frozen=True, eq=False)
class State:
    """What a model holds after some tokens, without the K and V of its layers of full attention.

    No forward ever gets this copy.
    """

    cache: Cache
    size_bytes: int


class LayerKV:
    """K and V of one layer, joined where they are read: ``kv[:, :, start:end]`` is ``[2, Hkv, n, D]``."""

    def __init__(self, shape: LayerShape, keys: torch.Tensor, values: torch.Tensor) -> None:
        """``keys`` and ``values``: ``[Hkv, N, D]``."""
        self._shape, self._keys, self._values = shape, keys, values

    def __getitem__(self, at: tuple[slice, slice, slice]) -> torch.Tensor:
        return self._shape.joined(self._keys[:, at[2]], self._values[:, at[2]])


class Continuation:
    """How one model continues prompts. The caller holds the model's lock and is in inference mode."""

    def __init__(
        self, model: Any, device: torch.device, known: ContinuationChecks | None = None
    ) -> None:
        """``known``: what was measured before; then a single prompt is continued, and all is measured again
        if that fails. Raises :class:`UnsupportedModelError` if a continued prompt does not give a whole one's
        logits."""
        self._model = model
        self._device = device
        self.dtype = model.dtype
        self._parameters = inspect.signature(model.forward).parameters
        self.rotary = next(filter(depends_on_length, model.modules()), None)
        """The rotary module whose table depends on the length of the sequence; ``None`` if there is none."""
        self.in_steps = False
        """Whether tokens that follow a state are computed one by one."""
        self._own_cache: Callable[[], Cache] | None = None
        """Makes the model's own kind of cache (MiniMax)."""
        self.has_states = False
        """Whether some layers have a running state."""
        self._full: list[int] = []
        """Layers of full attention."""
        with unsupported_if_raising(type(model).__name__, "go on from a stored beginning"):
            check_placement(model)
            self.checks = self._check(known)

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The decoder layers; none if they are not found."""
        return [*decoder_list(self._model)[2]]

    def is_worthwhile(self, start: int, tokens: int) -> bool:
        """Whether going on at ``start`` is faster than computing all ``tokens`` of a prompt at once."""
        return not self.in_steps or (tokens - start) * STEP_COST <= tokens

    def new_cache(self) -> Cache:
        """One that holds nothing."""
        own = self._own_cache
        cache = DynamicCache(config=self._text_config) if own is None else own()
        grow_in_place(cache)
        return cache

    @property
    def _text_config(self) -> Any:
        return self._model.config.get_text_config(decoder=True)

    def forward(
        self, ids: torch.Tensor, cache: Cache, start: int, rows: int = 1, at_once: bool = False
    ) -> torch.Tensor:
        """Compute ``ids`` ``[1, n]``, which begin at ``start``, into ``cache``. Returns the logits of the
        last ``rows`` ``[rows, V]``. ``at_once``: in one forward, whatever :attr:`in_steps` is."""
        logits: list[torch.Tensor] = []
        for part in ids.split(1, dim=1) if self.in_steps and start and not at_once else (ids,):
            given: dict[str, Any] = {
                "input_ids": part, "past_key_values": cache, "use_cache": True, "logits_to_keep": rows,
                "position_ids": torch.arange(start, start + part.shape[1], device=self._device)[None],
            }  # fmt: skip
            taken = {name: value for name, value in given.items() if name in self._parameters}
            logits.append(self._model(**taken).logits[0, -rows:])
            start += part.shape[1]
        return torch.cat(logits)[-rows:]

    def length(self, cache: Cache) -> int:
        """How many tokens ``cache`` holds."""
        if self._full:
            return int(cache.layers[self._full[0]].keys.shape[2])
        return int(cache.get_seq_length())

    def state(self, cache: Cache) -> State:
        """A copy of what ``cache`` holds now."""
        with self._without_kv(cache):
            # deepcopy would copy all of what a tensor is a view of, such as the states of other requests
            copies: dict[int, Any] = {id(each): each.clone() for each in _tensors(cache)}
            taken = copy.deepcopy(cache, copies)
        return State(taken, sum(each.nbytes for each in _tensors(taken)))

    def kv(self, cache: Cache) -> list[LayerKV]:
        """K and V of the layers of full attention, of all tokens in ``cache``."""
        layers = [cache.layers[i] for i in self._full]
        return [
            LayerKV(shape, layer.keys[0], layer.values[0])
            for shape, layer in zip(self.layout.layers, layers, strict=True)
        ]

    def restore(self, state: State, kv: KVSource) -> Cache:
        """A cache that continues ``state``, whose layers of full attention hold ``kv``."""
        cache = copy.deepcopy(state.cache)
        for number, (i, shape) in enumerate(zip(self._full, self.layout.layers, strict=True)):
            both = torch.empty(
                shape.tensor_shape(kv.tokens), dtype=self.layout.torch_dtype, device=self._device
            )
            kv.read_layer(number, both)
            keys, values = shape.split(both)
            cache.layers[i].keys, cache.layers[i].values = keys[None], values[None]
        return cache

    @contextmanager
    def _without_kv(self, cache: Cache) -> Iterator[None]:
        layers = [cache.layers[i] for i in self._full]
        held = [(layer.keys, layer.values) for layer in layers]
        for layer in layers:
            layer.keys = layer.values = None
        try:
            yield
        finally:
            for layer, (keys, values) in zip(layers, held, strict=True):
                layer.keys, layer.values = keys, values

    # -- measured when the model is loaded -----------------------------------------------------------

    def _check(self, known: ContinuationChecks | None) -> ContinuationChecks:
        vocab = self._model.get_input_embeddings().num_embeddings
        ids = torch.tensor([[(29 + 53 * i + i * i) % vocab for i in range(CHECK_TOKENS)]])
        ids = ids.to(self._device)
        self._look(ids)
        whole = self._model(input_ids=ids).logits[0].float()  # [N, V]
        if known is not None:
            self.in_steps = known.in_steps
            if self._continued(ids, whole) <= known.allowed:
                return known
            self.in_steps = False
        scale = float(whole.abs().max()) or 1.0
        precision = "bfloat16" if is_quantised(self._model) else self.layout.dtype
        allowed = clear = LOGIT_TOLERANCE[precision] * scale
        if precision != "float32":
            # Noise differs between two roundings of the same rows, as a continued prompt does; twice it,
            # because both are the largest of a few rows. Disturbed states must move more than this measures.
            alone = self._model(input_ids=ids[:, :FIRST_CUT]).logits[0].float()
            noise = difference_of(alone, whole[:FIRST_CUT])
            allowed = max(allowed, min(2 * noise, MAX_NOISE * allowed))
            clear = min(allowed, max(2 * noise, allowed / 8))
        differs = self._difference(ids, whole)
        if not differs <= clear:  # what is wrong shows beside the noise of low precision
            self.in_steps = True
            steps = self._difference(ids, whole)
            if differs <= min(allowed, 3 * steps):
                self.in_steps = False
            else:
                differs = steps
        name = type(self._model).__name__
        if not differs <= allowed:
            raise UnsupportedModelError(
                f"{name} computes something else behind a stored beginning than in one forward: logits "
                f"differ by {differs:.3g} (allowed {allowed:.3g}); use mode full"
            )
        disturbed = self._difference(ids, whole, disturb=1.0)
        if not shows_errors(disturbed, differs, scale):
            raise UnsupportedModelError(
                f"disturbing the states of {name} moves logits by only {disturbed:.3g}, so the check cannot "
                "see a wrong one; use mode full"
            )
        return ContinuationChecks(self.in_steps, allowed)

    def _continued(self, ids: torch.Tensor, whole: torch.Tensor) -> float:
        """How far logits behind a copy of a state are from ``whole`` ``[N, V]``."""
        cache, rest = self.new_cache(), ids[:, SECOND_CUT:]
        self.forward(ids[:, :SECOND_CUT], cache, 0)
        restored = self.restore(self.state(cache), _Held(self.kv(cache), SECOND_CUT, 0.0))
        ours = self.forward(rest, restored, SECOND_CUT, rest.shape[1])
        return difference_of(ours, whole[SECOND_CUT:])

    def _look(self, ids: torch.Tensor) -> None:
        """Find the model's kind of cache, and the layers of full attention."""
        output = self._model(input_ids=ids, use_cache=True)
        own = getattr(output, "past_key_values", None)
        if own is not None and type(own) is not DynamicCache:
            in_layers = own_states.layered(type(own))
            self._own_cache = partial(in_layers, self._text_config) if in_layers else type(own)
        cache = self.new_cache()
        self.forward(ids.flip(1), cache, 0)
        kept = own_states.attributes(self._model)
        if kept:
            self.forward(ids[:, :1], cache, ids.shape[1])
            own_states.keep_in_cache(self.layers, kept, own_states.attributes(self._model))
            cache = self.new_cache()
            self.forward(ids, cache, 0)
        shapes, dtypes = [], set()
        for i, layer in enumerate(cache.layers):
            self.has_states |= has_states(cache, i)
            keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            if not isinstance(keys, torch.Tensor) or not isinstance(values, torch.Tensor):
                continue
            if getattr(layer, "is_sliding", False) or keys.ndim != 4:
                continue
            if keys.shape[:3] == values.shape[:3] and keys.shape[2] == ids.shape[1]:
                self._full.append(i)
                shapes.append(LayerShape.of(keys, values))
                dtypes.add(dtype_name(keys.dtype))
        if len(dtypes) > 1 or not dtypes <= set(DTYPES):
            raise UnsupportedModelError(
                f"KV has dtypes {', '.join(sorted(dtypes))}, expected one of {sorted(DTYPES)}; use mode full"
            )
        self.layout = KVLayout(tuple(shapes), (dtypes or {dtype_name(self._model.dtype)}).pop())
        """The KV layout of the layers of full attention."""

    def _difference(self, ids: torch.Tensor, whole: torch.Tensor, disturb: float = 0.0) -> float:
        """How far logits are from ``whole`` ``[N, V]`` if the prompt is computed in parts, and goes on from a
        copy at the end of the second."""
        cache = self.new_cache()
        self.forward(ids[:, :FIRST_CUT], cache, 0)
        self.forward(ids[:, FIRST_CUT:SECOND_CUT], cache, FIRST_CUT)
        state, kv = self.state(cache), _Held(self.kv(cache), SECOND_CUT, disturb)
        if disturb:
            for each in _tensors(state.cache):
                _disturb(each, disturb)
        rest, end = ids[:, SECOND_CUT:], ids.shape[1] - 1
        self.forward(rest, cache, SECOND_CUT)  # must leave the copy alone
        ours = self.forward(rest, self.restore(state, kv), SECOND_CUT, rest.shape[1])
        cache = self.restore(state, kv)
        if self.in_steps:
            self.forward(rest[:, :-1], cache, SECOND_CUT)
        config = GenerationConfig(
            max_new_tokens=1, do_sample=False, pad_token_id=0, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        output = self._model.generate(
            ids,
            generation_config=config,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
        )
        both = torch.cat((ours, output.logits[0])), torch.cat((whole[SECOND_CUT:], whole[end:]))
        return difference_of(*both)


class _Held:
    """K and V in memory."""

    def __init__(self, layers: Sequence[LayerKV], tokens: int, disturb: float) -> None:
        self.tokens, self._disturb = tokens, disturb
        end = slice(0, tokens)
        self._layers = [layer[slice(None), slice(None), end] for layer in layers]

    def read_layer(self, layer: int, out: torch.Tensor) -> None:
        out.copy_(self._layers[layer])
        if self._disturb:
            _disturb(out, self._disturb)


def _disturb(tensor: torch.Tensor, size: float) -> None:
    """Add noise of ``size`` times the root mean square."""
    if not tensor.is_floating_point():
        return
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(3))
    scale = size * tensor.float().square().mean().sqrt()
    tensor += (scale * noise.to(tensor.device)).to(tensor.dtype)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a cache: in its attributes, and in the dicts, lists and layers there."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, Cache) or hasattr(value, "is_compileable"):
        yield from _tensors(vars(value))
