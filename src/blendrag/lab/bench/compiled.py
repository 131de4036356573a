"""Stock prefill through ``torch.compile``: what a user gets who compiles the model instead of reusing KV.

Compiled for one length of prompt, before anything is timed. Where no compiler works it says so and is
left out, as the compiler is no part of what is installed here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Compiled:
    """A compiled way to the first token, or why there is none."""

    way: Callable[[], int] | None
    compile_s: float = 0.0
    refusal: str = ""


def compiled_prefill(model: Any, ids: torch.Tensor) -> Compiled:
    """A stock prefill of ``ids`` ``[1, N]``, last logits only; takes from seconds to minutes.

    Does not modify ``model``. Raises nothing: whatever a compiler raises is a refusal.
    """
    forward = torch.compile(model.forward, dynamic=False)

    def way() -> int:
        out = forward(input_ids=ids, use_cache=True, logits_to_keep=1)
        return int(out.logits[0, -1].argmax())

    began = time.perf_counter()
    try:
        way()
    except Exception as exc:
        first = str(exc).strip().splitlines() or [type(exc).__name__]
        refusal = (
            f"the stock prefill could not be compiled here ({type(exc).__name__}: {first[0]}), so that row "
            "is left out; install a C++ compiler for the CPU, Triton for a GPU"
        )
        return Compiled(None, refusal=refusal)
    return Compiled(way, time.perf_counter() - began)
