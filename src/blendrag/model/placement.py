"""Where a model's weights are, and that blending can work there: whole, in memory, on one device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from blendrag.errors import UnsupportedModelError

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
