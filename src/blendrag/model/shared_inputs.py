"""Which linear layers of a model get the same input: query, key and value, or gate and up.

One product can compute the outputs of them all. Modules do not tell, so a forward of one token is watched.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from blendrag.errors import is_out_of_memory
from blendrag.model.compat import write_count
from blendrag.model.sharing import only_here


def shared_inputs(model: nn.Module, layers: Mapping[str, nn.Module]) -> list[tuple[str, ...]]:
    """The names of ``layers``, those with the same input together, in the order in which they get it.

    The input is the same if it is one tensor that is not written between their calls. Layers that do not run
    once are alone, as are all if the forward fails.
    """
    calls: list[tuple[str, torch.Tensor, int]] = []  # holds the inputs, so that each has its own id

    def note(name: str, module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        if inputs:
            calls.append((name, inputs[0], write_count(inputs[0])))

    with ExitStack() as stack:
        for name, layer in layers.items():
            hook = only_here(partial(note, name))
            stack.callback(layer.register_forward_pre_hook(hook).remove)
        try:
            # tensors of inference mode do not count what is written
            with torch.inference_mode(False), torch.no_grad():
                ids = torch.ones(1, 1, dtype=torch.long, device=next(model.parameters()).device)
                model(input_ids=ids, use_cache=False)
        except Exception as exc:  # a model that takes other arguments
            if is_out_of_memory(exc):
                raise
            calls.clear()
    runs = [name for name, _, _ in calls]
    groups: dict[Any, list[str]] = defaultdict(list)
    for name, tensor, writes in calls:
        if runs.count(name) == 1:
            groups[id(tensor), writes].append(name)
    found = [tuple(names) for names in groups.values()]
    return found + [(name,) for name in layers if runs.count(name) != 1]
