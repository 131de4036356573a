"""Running states that a model keeps elsewhere than in the layers of transformers' cache are kept there.

transformers 5.23 has two such models. RecurrentGemma keeps states in attributes of its modules, whatever
cache it gets: the module that holds them gets a ``forward`` that reads them from the cache and writes them
back. MiniMax wants a cache of its own class with a list of states: it gets a subclass whose list is the
layers. So states of these models are copied, composed and decoded as those of any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import Cache

Attributes = Mapping[tuple[nn.Module, str], torch.Tensor]


def attributes(model: nn.Module) -> dict[tuple[nn.Module, str], torch.Tensor]:
    """Copies of the tensors that modules keep besides parameters and buffers."""
    return {
        (module, name): value.clone()
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


def keep_in_cache(layers: Sequence[nn.Module], before: Attributes, after: Attributes) -> None:
    """Let modules of ``layers`` keep their states in the layers of the cache that they get.

    ``before`` and ``after`` one more token: what modules kept in attributes. Those that changed are states.
    """
    states = [
        at
        for at, old in before.items()
        if at in after and old.shape == after[at].shape and not torch.equal(old, after[at])
    ]
    for index, layer in enumerate(layers):
        inside = {*layer.modules()}
        own = [(module, name) for module, name in states if module in inside]
        if not own:
            continue
        # a window of inputs moves by one with each token
        conv = [at for at in own if torch.equal(before[at][..., 1:], after[at][..., :-1])]
        recurrent = [at for at in own if at not in conv]
        holds_all = (
            module for module in inside if all(part in {*module.modules()} for part, _ in own)
        )
        holder = min(holds_all, key=lambda module: sum(1 for _ in module.modules()))
        if "forward" not in vars(holder):
            _keep(holder, index, *(_paths(holder, some) for some in (conv, recurrent)))


def _paths(
    holder: nn.Module, states: Sequence[tuple[nn.Module, str]]
) -> tuple[tuple[str, str], ...]:
    """Where attributes are, by names that hold for a copy of the ``holder``, too."""
    names = {module: name for name, module in holder.named_modules()}
    return tuple((names[module], attribute) for module, attribute in states)


def _keep(
    holder: nn.Module,
    index: int,
    conv: Sequence[tuple[str, str]],
    recurrent: Sequence[tuple[str, str]],
) -> None:
    """Replace the ``forward`` of the module that holds the states of layer ``index``."""

    def forward(
        self: nn.Module, *args: Any, past_key_values: Cache | None = None, **kwargs: Any
    ) -> Any:
        stock = type(self).forward
        layers = getattr(past_key_values, "layers", [])
        layer: Any = layers[index] if index < len(layers) else None
        if not hasattr(layer, "recurrent_states"):
            return stock(self, *args, past_key_values=past_key_values, **kwargs)
        held = (
            (conv, layer.conv_states, layer.update_conv_state),
            (recurrent, layer.recurrent_states, layer.update_recurrent_state),
        )
        for paths, states, _ in held:
            for number, (path, name) in enumerate(paths):
                setattr(self.get_submodule(path), name, states[number])
        output = stock(self, *args, past_key_values=past_key_values, **kwargs)
        for paths, _, update in held:
            for number, (path, name) in enumerate(paths):
                update(getattr(self.get_submodule(path), name), number)
                setattr(self.get_submodule(path), name, None)
        return output

    holder.forward = MethodType(forward, holder)


def layered(cls: Any) -> Callable[[Any], Cache] | None:
    """A subclass of a model's own class of cache, made from its config, that keeps states in its layers;
    ``None`` for other classes than that of MiniMax."""
    if not {"get_linear_cache", "set_linear_cache"} <= {*dir(cls)}:
        return None

    class Layered(cls):
        def __init__(self, config: Any) -> None:
            super().__init__()
            DynamicCache.__init__(self, config=config)

        def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
            state: torch.Tensor | None = self.layers[layer_idx].recurrent_states[0]
            # nothing before: the module then computes tokens in blocks, not one by one
            return state if state is not None and bool(state.any()) else None

        def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
            self.layers[layer_idx].update_recurrent_state(linear_cache)

    return Layered
