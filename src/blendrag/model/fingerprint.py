"""Fingerprints of what is loaded: tensors, adapters, quantisation, geometry, tokenizer.

Owns the answer to "are these the weights the KV was computed with?". The full hash reads every
byte once per engine; :func:`change_token` is the cheap per-request check that nothing was swapped
or changed in place since.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import xxhash
from torch import nn

from blendrag.errors import UnsupportedModelError
from blendrag.identity import digest_fields

#: Rotary variants whose table depends on the length of the sequence (transformers' names).
LENGTH_DEPENDENT = ("dynamic", "longrope")
#: Values of each tensor that are compared before every request.
SAMPLES = 16


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers, non-persistent ones (rotary tables) included, tied ones once.

    Left out is the table that a length-dependent rotary has in use: it follows the last prompt's
    length, and the one it follows from is among the buffers.
    """
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        if not (name.endswith("inv_freq") and _follows_length(model, name)):
            yield name, buffer


def _follows_length(model: nn.Module, name: str) -> bool:
    owner, _, buffer = name.rpartition(".")
    kinds = getattr(model.get_submodule(owner), "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return "original" not in buffer and any(kind in LENGTH_DEPENDENT for kind in kinds)


def tensors_fingerprint(model: nn.Module) -> str:
    """xxh3-128 hex over names, shapes, dtypes and bytes of all loaded tensors.

    Raises :class:`UnsupportedModelError` where weights are not visible as tensors (torch's packed
    quantised modules): their identity could not be told, so their KV is never stored.
    """
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor) and not name.endswith("_extra_state"):
            raise UnsupportedModelError(
                f"weight {name!r} is packed ({type(value).__name__}), not a tensor, so the model has no "
                "fingerprint; use mode full, or weights quantised by a transformers quantizer"
            )
    sha = xxhash.xxh3_128()
    for name, tensor in sorted(named_tensors(model), key=lambda item: item[0]):
        if tensor.device.type == "meta":
            raise UnsupportedModelError(
                f"weight {name!r} is not loaded (meta device); use mode full"
            )
        sha.update(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}|".encode())
        sha.update(_bytes_of(tensor))
    return sha.hexdigest()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    if not flat.numel():
        return memoryview(b"")
    return flat.view(torch.uint8).numpy().data


def change_token(model: Any) -> tuple[int, tuple[object, ...], str, str]:
    """Changes whenever a weight is replaced, written in place, or another adapter is activated.

    Writing through ``weight.data`` moves neither version nor address, so a few values of every tensor
    are looked at, too; of such writes only one that spares all of them goes unnoticed.
    """
    versions = 0
    places = []
    # Once: walking a deep model costs most of this.
    tensors = [tensor for _, tensor in named_tensors(model)]
    for tensor in tensors:
        if not tensor.is_inference():
            versions += tensor._version
        places.append((tensor.data_ptr(), tuple(tensor.shape)))
    loaded_as = f"{model.dtype} {model.config._attn_implementation}"
    return versions, tuple(places), _sampled(tensors), adapters_of(model) + loaded_as


def _sampled(tensors: Sequence[torch.Tensor]) -> str:
    """xxh3-128 hex over :data:`SAMPLES` values of every tensor; one copy per device."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() and tensor.device.type != "meta":
            flat = tensor.detach()
            # A row of what is not contiguous: flattening it would copy the whole.
            flat = flat.reshape(-1) if flat.is_contiguous() else flat[(0,) * (flat.ndim - 1)]
            some = flat[:: max(1, flat.numel() // SAMPLES)].contiguous().view(torch.uint8)
            by_device.setdefault(tensor.device, []).append(some)
    sha = xxhash.xxh3_128()
    for samples in by_device.values():
        sha.update(_bytes_of(torch.cat(samples)))
    return sha.hexdigest()


def adapters_of(model: nn.Module) -> str:
    """Digest of the active PEFT adapters, their state and scalings; empty without any."""
    seen: list[bytes] = []
    for name, module in model.named_modules():
        if not hasattr(module, "active_adapters") or not hasattr(module, "merged_adapters"):
            continue
        scaling = getattr(module, "scaling", None)
        state = {
            "active": list(module.active_adapters),
            "disabled": bool(getattr(module, "disable_adapters", False)),
            "merged": list(module.merged_adapters),
            "scaling": {k: float(v) for k, v in scaling.items()} if scaling else {},
        }
        seen.append(f"{name}:{json.dumps(state, sort_keys=True)}".encode())
    return digest_fields(seen) if seen else ""


def weight_quantization(config: Any) -> str:
    """Quantisation of the weights as the config states it, canonical JSON, or ``"none"``."""
    quantization = getattr(config, "quantization_config", None)
    if not quantization:
        return "none"
    as_dict = quantization if isinstance(quantization, dict) else quantization.to_dict()
    return json.dumps(as_dict, sort_keys=True, default=str)


#: What a config says that cannot change any KV.
VOLATILE = frozenset(
    (
        "_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype",
        "use_cache", "output_attentions", "output_hidden_states", "return_dict", "id2label",
        "label2id", "problem_type", "bos_token_id", "eos_token_id", "pad_token_id",
        "_attn_implementation_autoset", "quantization_config",
    )
)  # fmt: skip


def geometry(config: Any, layer_types: Any) -> str:
    """Canonical JSON of the whole text config but for what cannot change any KV, and layer types."""
    found = {k: v for k, v in config.to_dict().items() if k not in VOLATILE}
    found["layer_types"] = list(layer_types)
    return json.dumps(found, sort_keys=True, default=str)
