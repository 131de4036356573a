"""The parts of a Hugging Face causal LM that blending touches, and whether they can be blended."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import DynamicCache

from blendrag.errors import UnsupportedModelError
from blendrag.store.kv import DTYPES, KVLayout, LayerShape, dtype_name

_entering = threading.Lock()
_inside = 0
_stance: Any = None


def unwrapped(module: Any) -> Any:
    """The module inside ``torch.compile(module)``; any other module unchanged."""
    while isinstance(module, nn.Module) and "_orig_mod" in module._modules:
        module = module._modules["_orig_mod"]
    return module


def is_compiled(modules: Iterable[nn.Module]) -> bool:
    """Whether one of ``modules`` was compiled: by a wrapper, by ``.compile()`` or through its ``forward``."""
    return any(
        "_orig_mod" in module._modules
        or module._compiled_call_impl is not None
        or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
        for module in modules
    )


@contextmanager
def uncompiled() -> Iterator[None]:
    """Within this context compiled functions run as the Python they were made from.

    torch's stance is one for all threads (torch 2.13), so the first to enter sets it and the last to leave
    restores it.
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


@dataclass(frozen=True)
class DecoderStack:
    """The parts of a causal LM that blending touches."""

    base: nn.Module
    """The decoder without its LM head."""
    layers: Sequence[nn.Module]
    attentions: Sequence[nn.Module]
    rotary: nn.Module | None
    config: Any
    layer_types: Sequence[str]
    around: Sequence[nn.Module]
    """The model's modules that are in no decoder layer."""


def find_stack(model: Any) -> DecoderStack:
    """Locate the decoder stack, or raise :class:`UnsupportedModelError` saying what is missing."""
    config = model.config.get_text_config(decoder=True)
    base = getattr(model, "get_decoder", lambda: None)() or getattr(
        model, model.base_model_prefix, model
    )
    base = unwrapped(base)
    expected = config.num_hidden_layers
    layers = _layer_list(base, expected)
    if layers is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no list of {expected} decoder layers to hook; use mode full"
        )
    attentions = [_attention(layer, i) for i, layer in enumerate(layers)]
    for i, attention in enumerate(attentions):
        if attention is None:
            raise UnsupportedModelError(
                f"layer {i} of {type(model).__name__} ({type(layers[i]).__name__}) is not an attention "
                "layer, so there is no KV to reuse; use mode full"
            )
    types = list(getattr(config, "layer_types", None) or ["full_attention"] * expected)
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(
                f"{type(model).__name__} has layers of type {kind!r}; only full and sliding-window "
                "attention can be blended; use mode full"
            )
    found = [a for a in attentions if a is not None]
    rotary = getattr(base, "rotary_emb", None)
    inside = {id(module) for layer in layers for module in layer.modules()}
    around = [module for module in model.modules() if id(module) not in inside]
    return DecoderStack(base, layers, found, rotary, config, types, around)


def _layer_list(base: nn.Module, expected: int) -> list[nn.Module] | None:
    for module in base.modules():
        if isinstance(module, nn.ModuleList) and len(module) == expected:
            return [unwrapped(layer) for layer in module]
    return None


def _attention(layer: nn.Module, index: int) -> nn.Module | None:
    for child in layer.children():
        if getattr(child, "layer_idx", None) == index and hasattr(child, "config"):
            return child
    return None


def layout_of(cache: DynamicCache, layers: int, tokens: int, name: str) -> KVLayout:
    """Of ``cache``, which a prefill of ``tokens`` filled; ``layers`` and ``name`` are the model's.

    Raises :class:`UnsupportedModelError` for layers without K and V of their own, for K and V of different
    shapes, and for a dtype that is not stored.
    """
    if len(cache.layers) != layers:
        raise UnsupportedModelError(
            f"{name} keeps KV for {len(cache.layers)} of {layers} layers (shared or recurrent layers), "
            "which cannot be blended; use mode full"
        )
    shapes = []
    for i, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not isinstance(keys, torch.Tensor) or not isinstance(values, torch.Tensor):
            raise UnsupportedModelError(f"layer {i} of {name} keeps no KV; use mode full")
        if keys.shape != values.shape or keys.ndim != 4 or keys.shape[-2] != tokens:
            raise UnsupportedModelError(
                f"layer {i} of {name} keeps keys {tuple(keys.shape)} and values "
                f"{tuple(values.shape)}; blending needs the same shape for both; use mode full"
            )
        shapes.append(LayerShape(int(keys.shape[1]), int(keys.shape[3])))
    dtype = dtype_name(cache.layers[0].keys.dtype)
    if dtype not in DTYPES:
        raise UnsupportedModelError(
            f"KV of dtype {dtype} is not one of {sorted(DTYPES)}; use mode full"
        )
    return KVLayout(tuple(shapes), dtype)


META = torch.device("meta")


def input_device(model: Any) -> torch.device:
    """Where token ids go: the device of the first weight, or, of an offloaded one, where it computes."""
    for hook in _accelerate_hooks(model.get_input_embeddings()):
        if hook.execution_device is not None:
            return torch.device(hook.execution_device)
    device = torch.device(model.device)
    return torch.device("cpu") if device == META else device


def check_placement(model: nn.Module) -> None:
    """Raise :class:`UnsupportedModelError` for weights that are sharded, offloaded or on several devices."""
    name = type(model).__name__
    weights = list(model.parameters())
    if any(isinstance(weight, DTensor) for weight in weights):
        raise UnsupportedModelError(
            f"the weights of {name} are sharded over processes (DTensor: tensor parallel or FSDP), and "
            "blending needs them whole in one; load the model without tp_plan, or use mode full"
        )
    places = {str(weight.device) for weight in weights}
    if str(META) in places or _is_offloaded(model):
        raise UnsupportedModelError(
            f"the weights of {name} are offloaded, and blending needs them in the memory of one device; "
            "load the model without device_map on a device that holds it, or use mode full"
        )
    mapped = {_device(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    spread = sorted(places if len(places) > 1 else mapped)
    if len(spread) > 1:
        raise UnsupportedModelError(
            f"the weights of {name} lie on {', '.join(spread)}, and blending needs them on one device; "
            f"load the model with device_map={{'': '{spread[-1]}'}}, or use mode full"
        )


def _device(place: Any) -> str:
    """A value of a device map: a number is a GPU."""
    return f"cuda:{place}" if isinstance(place, int) else str(place)


def _is_offloaded(model: nn.Module) -> bool:
    """Whether accelerate moves weights in for a forward and out again."""
    for module in model.modules():
        for hook in _accelerate_hooks(module):
            if getattr(hook, "offload", False) or type(hook).__name__ == "CpuOffload":
                return True
    return False


def _accelerate_hooks(module: Any) -> Iterator[Any]:
    hook = getattr(module, "_hf_hook", None)
    for each in getattr(hook, "hooks", (hook,)):
        if each is not None and hasattr(each, "execution_device"):
            yield each
