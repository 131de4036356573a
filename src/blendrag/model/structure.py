"""The parts of a Hugging Face causal LM that blending touches, and what rules blending out.

Finds the decoder layers by structure, without a list of model names, reads the KV layout from a real
prefill, checks that all weights are on one device, and runs what was compiled uncompiled.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import DynamicCache

from blendrag.errors import BlendragError, UnsupportedModelError, is_out_of_memory
from blendrag.model.compat import accelerate_hooks, unwrapped
from blendrag.model.windows import LAYER_TYPES, Window, window_of_type
from blendrag.store.kv import KVLayout, LayerShape, dtype_name
from blendrag.store.tensor_bytes import DTYPES
from blendrag.wording import condensed

#: Ends the reasons why a model's KV cannot be moved. The second if it can go on from a stored beginning.
USE_FULL = "use mode full"
USE_PREFIX = (
    f"{USE_FULL}, or prefix, which reuses system prompts and conversations, but no documents"
)
_STATE = (
    "keep a running state of all tokens so far instead of KV for each token, so a chunk cannot be reused at "
    "another place"
)
_CHOICE = "attend to tokens that they choose by more than KV, so the KV of a chunk is not enough"
#: What layers do that are not attention over the KV of tokens, by their types in configs.
OTHER_LAYERS = {
    "linear_attention": _STATE,
    "conv": _STATE,
    "mamba": _STATE,
    "recurrent": _STATE,
    "hybrid": _STATE,
    "hybrid_sliding": _STATE,
    "indexed_attention": _CHOICE,
    "deepseek_sparse_attention": _CHOICE,  # the same by its older name
    "compressed_sparse_attention": _CHOICE,
    "heavily_compressed_attention": _CHOICE,
}

# -- decoder layers ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decoder:
    """A causal LM without its LM head, and the list of its decoder layers."""

    base: nn.Module
    layers: Sequence[nn.Module]
    config: Any
    layer_types: Sequence[str]

    @property
    def windows(self) -> dict[str, Window | None]:
        """How far back tokens see, by type of layer. A config without types has its window in all layers."""
        kinds = set(self.layer_types)
        if not getattr(self.config, "layer_types", None):
            kinds = {"sliding_attention"}
        return {kind: window_of_type(self.config, kind) for kind in kinds}


@dataclass(frozen=True)
class DecoderStack(Decoder):
    """The parts of a causal LM that blending touches."""

    attentions: Sequence[nn.Module]
    rotary: nn.Module | None
    may_be_compiled: Sequence[nn.Module]
    """The decoder layers and all modules outside of them."""


def find_decoder(model: Any) -> Decoder:
    """Locate the decoder layers: the module list with one entry per hidden layer.

    Raises :class:`UnsupportedModelError` if there is none, and for other layers than of attention.
    """
    name = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    count = config.num_hidden_layers
    base, owner, layers = decoder_list(model)
    if not layers:
        raise UnsupportedModelError(
            f"{name} does not run {count} layers one after the other, as blending needs; use mode full"
        )
    # Llama 4 says it is its own decoder (transformers 5.23)
    if getattr(base, "lm_head", None) is not None:
        base = owner
    types = list(getattr(config, "layer_types", None) or ["full_attention"] * count)
    if others := set(types) - {*LAYER_TYPES}:
        kind = next((kind for kind in OTHER_LAYERS if kind in others), min(others))
        does = OTHER_LAYERS.get(kind, "blending does not know")
        raise UnsupportedModelError(f"{name} has layers of type {kind!r}, which {does}; {USE_FULL}")
    return Decoder(base, [unwrapped(layer) for layer in layers], config, types)


def decoder_list(model: Any) -> tuple[nn.Module, nn.Module, nn.ModuleList]:
    """The decoder, the module in it that has the list of layers, and the list, which may be empty."""
    count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", 0)
    # get_decoder() of ModernBERT's decoder is its LM head (transformers 5.23)
    bases = (
        getattr(model, "get_decoder", lambda: None)(),
        getattr(model, model.base_model_prefix, model),
    )
    lists = (
        (base, owner, child)
        for base in map(unwrapped, filter(None, bases))
        for owner in base.modules()
        for child in owner.children()
        if isinstance(child, nn.ModuleList) and len(child) == count
    )
    return next(lists, (model, model, nn.ModuleList()))


def text_modules(model: nn.Module) -> set[nn.Module]:
    """The modules that compute the next token of a text: those of the decoder and the LM head, without vision
    and audio towers. All of them, if there is no list of decoder layers."""
    if not hasattr(model, "config"):
        return {*model.modules()}
    _, owner, _ = decoder_list(model)
    head = model.get_output_embeddings()  # type: ignore[operator]
    return {*owner.modules(), *(() if head is None else head.modules())}


def _attention_in(
    layers: Sequence[nn.Module], index: int, model: Any, others: Collection[nn.Module] = ()
) -> nn.Module:
    """The attention of a decoder layer: the module in it, and none of ``others``, that carries ``layer_idx``
    and in most models a config. Raises :class:`UnsupportedModelError` if there is none."""
    layer = layers[index] if index < len(layers) else nn.Module()
    inner = (
        module
        for module in layer.modules()
        if module is not layer and module not in others
        if getattr(module, "layer_idx", None) == index
    )
    found = min(inner, key=lambda module: not hasattr(module, "config"), default=None)
    if found is None:
        raise UnsupportedModelError(
            f"layer {index} of {type(model).__name__} ({type(layer).__name__}) keeps no KV that blending can "
            "find; use mode full"
        )
    return found


def find_stack(model: Any) -> DecoderStack:
    """Locate what blending touches, or raise :class:`UnsupportedModelError` saying what is missing."""
    found = find_decoder(model)
    attentions = [_attention_in(found.layers, i, model) for i in range(len(found.layers))]
    rotary = getattr(found.base, "rotary_emb", None) or getattr(attentions[0], "rotary_emb", None)
    inside = {id(module) for layer in found.layers for module in layer.modules()}
    around = [module for module in model.modules() if id(module) not in inside]
    return DecoderStack(
        found.base,
        found.layers,
        found.config,
        found.layer_types,
        attentions,
        rotary,
        (*around, *found.layers),
    )


def hybrid_stack(
    model: Any, with_attention: Sequence[int], mixers: Collection[nn.Module]
) -> DecoderStack:
    """The parts of a model whose layers ``with_attention`` keep KV, while its ``mixers`` keep running states.

    Raises :class:`UnsupportedModelError` if they are not found.
    """
    config = model.config.get_text_config(decoder=True)
    base, _, layers = decoder_list(model)
    types = list(getattr(config, "layer_types", None) or ["full_attention"] * len(layers))
    attentions = [_attention_in([*layers], i, model, mixers) for i in with_attention]
    # pos_emb in LFM2-MoE
    tables = (child for child in base.children() if hasattr(child, "inv_freq"))
    rotary = getattr(base, "rotary_emb", None) or next(tables, None)
    rotary = rotary or getattr(next(iter(attentions), None), "rotary_emb", None)
    return DecoderStack(base, [*layers], config, types, attentions, rotary, [*model.modules()])


def layout_of(cache: DynamicCache, layers: int, tokens: int, name: str) -> KVLayout:
    """Layout of ``cache``, which holds a prefill of ``tokens`` by a model of that name and depth.

    Layers behind those in the cache attend to KV of an earlier one (Gemma 3n and 4). Raises
    :class:`UnsupportedModelError` for layers without K and V, for K and V of different heads, and for a
    dtype that the store does not support.
    """
    if not 0 < len(cache.layers) <= layers:
        raise UnsupportedModelError(
            f"{name} keeps KV for {len(cache.layers)} of {layers} layers, which cannot be blended; "
            "use mode full"
        )
    shapes = []
    for i, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not isinstance(keys, torch.Tensor) or not isinstance(values, torch.Tensor):
            raise UnsupportedModelError(f"layer {i} of {name} keeps no KV; use mode full")
        if keys.ndim != 4 or keys.shape[-2] != tokens or keys.shape[:3] != values.shape[:3]:
            shapes_of_one = f"keys {tuple(keys.shape[1:])} and values {tuple(values.shape[1:])}"
            raise UnsupportedModelError(
                f"layer {i} of {name} keeps {shapes_of_one} for "
                f"{tokens} tokens; blending needs one of each per token and head; use mode full"
            )
        shapes.append(LayerShape.of(keys, values))
    dtype = dtype_name(cache.layers[0].keys.dtype)
    if dtype not in DTYPES:
        raise UnsupportedModelError(
            f"KV of dtype {dtype} is not one of {sorted(DTYPES)}; use mode full"
        )
    return KVLayout(tuple(shapes), dtype)


@contextmanager
def unsupported_if_raising(name: str, attempt: str = "run with stored KV") -> Iterator[None]:
    """Turn what the forward of a model of that class raises within into :class:`UnsupportedModelError`, which
    says that the model cannot do what was attempted.

    Our own errors, and those of memory that ran out, stay as they are.
    """
    try:
        yield
    except BlendragError:
        raise
    except Exception as exc:
        if is_out_of_memory(exc):
            raise
        said = condensed(str(exc)) or "no message"
        raise UnsupportedModelError(
            f"{name} cannot {attempt} ({type(exc).__name__}: {said}); {USE_FULL}"
        ) from exc


# -- where the weights are --------------------------------------------------------------------------

_META = torch.device("meta")


def input_device(model: Any) -> torch.device:
    """The device for token ids: that of the weights or, if they are offloaded, where the model computes."""
    for hook in accelerate_hooks(model.get_input_embeddings()):
        if hook.execution_device is not None:
            return torch.device(hook.execution_device)
    device = torch.device(model.device)
    return torch.device("cpu") if device == _META else device


def check_placement(model: nn.Module) -> None:
    """Raise :class:`UnsupportedModelError` for weights that are sharded, offloaded or on several devices."""
    name = type(model).__name__
    weights = list(model.parameters())
    if any(isinstance(weight, DTensor) for weight in weights):
        raise UnsupportedModelError(
            f"the weights of {name} are sharded over processes (DTensor: tensor parallel or FSDP), and "
            "blending needs them whole in one; load the model without tp_plan, or use mode full"
        )
    devices = {str(weight.device) for weight in weights}
    if str(_META) in devices or _is_offloaded(model):
        raise UnsupportedModelError(
            f"the weights of {name} are offloaded, and blending needs them in the memory of one device; "
            "load the model without device_map on a device that holds it, or use mode full"
        )
    places = (getattr(model, "hf_device_map", None) or {}).values()
    mapped = {f"cuda:{place}" if isinstance(place, int) else str(place) for place in places}
    spread = sorted(devices if len(devices) > 1 else mapped)
    if len(spread) > 1:
        raise UnsupportedModelError(
            f"the weights of {name} are on {', '.join(spread)}, and blending needs them on one device; "
            f"load the model with device_map={{'': '{spread[-1]}'}}, or use mode full"
        )


def _is_offloaded(model: nn.Module) -> bool:
    """Whether accelerate moves weights in for a forward and out again."""
    return any(
        getattr(hook, "offload", False) or type(hook).__name__ == "CpuOffload"
        for module in model.modules()
        for hook in accelerate_hooks(module)
    )


# -- torch.compile ----------------------------------------------------------------------------------
# Hooks and a cache that changes per request cannot be traced: fullgraph compilation fails on them, and any
# other recompiles for every prompt. Blended forwards, the gate and ingest run uncompiled; mode ``full``
# runs what the caller compiled.

_entering = threading.Lock()
_inside = 0
_stance: Any = None


@contextmanager
def uncompiled() -> Iterator[None]:
    """Within this context compiled functions run as plain Python.

    torch (2.13) has one stance for all threads: the first to enter sets it, the last to leave restores it.
    """
    global _inside, _stance
    with _entering:
        if not _inside:
            _stance = torch.compiler.set_stance("force_eager")
            _stance.__enter__()
        _inside += 1
    try:
        yield
    finally:
        with _entering:
            _inside -= 1
            if not _inside:
                _stance.__exit__(None, None, None)
