"""Models under ``torch.compile``: unwrapped, and run as plain Python while blendrag's hooks are in them.

Hooks and a cache that changes per request cannot be traced: fullgraph compilation fails on them, and any
other recompiles for every prompt. Blended forwards, the gate and ingest therefore run uncompiled; mode
``full`` runs what the caller compiled.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

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
