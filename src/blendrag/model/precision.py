"""Which dtype ``auto`` is: the checkpoint's, unless this CPU has no fast products in it.

Without instructions for them, products in bfloat16 or float16 take some 75 times as long as in float32 (seen
on a CPU with AVX2 alone). float32 holds every number of either exactly, in twice the memory.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from blendrag.store.kv import dtype_name

log = logging.getLogger(__name__)

_SUPPORT = {
    torch.bfloat16: "_is_mkldnn_bf16_supported",
    torch.float16: "_is_mkldnn_fp16_supported",
}


def has_fast_products(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether matrix products in ``dtype`` take a fast path on ``device``.

    On a CPU, whether oneDNN has kernels for it, which is what torch asks before it calls them.
    """
    if device.type != "cpu" or dtype not in _SUPPORT:
        return True
    supported = getattr(torch.ops.mkldnn, _SUPPORT[dtype], None)
    return supported is not None and bool(supported())


def automatic_dtype(checkpoint: torch.dtype, device: torch.device) -> torch.dtype:
    """What a model saved in ``checkpoint`` computes in on ``device`` where nobody named a dtype."""
    return checkpoint if has_fast_products(checkpoint, device) else torch.float32


def widened(model: Any, name: str) -> Any:
    """``model`` as loaded, or in float32 where :func:`automatic_dtype` says so; logs that it did.

    A quantised model stays as it is: its weights are not numbers of that dtype.
    """
    kept = model.dtype
    wanted = automatic_dtype(kept, model.device)
    if wanted == kept or getattr(model, "hf_quantizer", None) is not None:
        return model
    log.info(
        "this CPU has no fast products in %s, so %s is loaded in %s: more memory, and KV stored in %s is "
        "not used; name dtype %s to keep it",
        *(dtype_name(kept), name, dtype_name(wanted), dtype_name(kept), dtype_name(kept)),
    )
    model.config.dtype = wanted
    return model.to(wanted)


def precision_signature(dtype: str, device: torch.device) -> str:
    """What ``dtype`` comes to on ``device``, as far as it is known without the checkpoint."""
    if dtype != "auto":
        return dtype
    slow = [dtype_name(kind) for kind in _SUPPORT if not has_fast_products(kind, device)]
    return " ".join(("auto", *(f"-{name}" for name in slow)))
