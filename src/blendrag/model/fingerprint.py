"""Fingerprints of what is loaded: tensors, adapters, quantisation, geometry.

They answer whether stored KV was computed with these weights. :func:`loaded` lists every tensor that takes
part in computing and the active LoRA adapters; it is cheap enough for every request. :class:`Digests` hashes
a tensor once, and again only when it has changed, so switching between adapters hashes the base weights once.
"""

from __future__ import annotations

import json
import re
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from io import BytesIO
from typing import Any, NamedTuple

import torch
import xxhash
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from blendrag.errors import UnsupportedModelError
from blendrag.model.compat import (
    COMPILED_INNER,
    consists_of_tensors,
    modules_of,
    registered_tensors,
    saves_more,
    write_count,
)
from blendrag.store.identity import digest_fields

#: Values of each tensor that are compared before every request.
SAMPLES = 16
#: Bytes of a tensor on a GPU that are copied at a time to be hashed.
PIECE_BYTES = 32 << 20
#: What identifies the state of one tensor: name, quantizer's context, shape, dtype, address, version, sample.
Mark = tuple[str, str, torch.Size, torch.dtype, int, int, bytes]
#: By size in bytes: types that the bits of any dtype, float8 included, can be copied as.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class LoadedTensor(NamedTuple):
    """One tensor that takes part in computing."""

    name: str
    tensor: torch.Tensor
    is_kept: bool
    """Whether the same tensor object is returned next time; some quantizers make a new one per access."""
    context: str = ""
    """What a quantizer records with its tensor: block sizes, dtypes, …"""


class Loaded(NamedTuple):
    """What a model computes with now."""

    tensors: tuple[LoadedTensor, ...]
    adapters: str
    """Digest of the active PEFT adapters and their scalings; empty without any."""


class Digests:
    """Marks and xxh3-128 of tensors; a tensor is hashed again only when its mark changes. Not thread-safe."""

    def __init__(self) -> None:
        self._known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._views: dict[int, tuple[weakref.ref[torch.Tensor], Any, torch.Tensor | None]] = {}

    def marks(self, found: Loaded) -> tuple[Mark, ...]:
        """The current marks of ``found``'s tensors: each changes when its tensor is replaced or written.

        A write through ``weight.data`` changes neither version nor address, so a few values are compared,
        too. Only such a write that spares all of them goes unnoticed.
        """
        return tuple(
            (
                each.name,
                each.context,
                each.tensor.shape,
                each.tensor.dtype,
                each.tensor.data_ptr() if each.is_kept else 0,
                write_count(each.tensor),
                sample,
            )
            for each, sample in zip(found.tensors, self._samples(found.tensors), strict=True)
        )

    def fingerprint(self, found: Loaded, marks: Sequence[Mark]) -> str:
        """xxh3-128 hex over names, shapes, dtypes and bytes of ``found``, whose marks are ``marks``."""
        lines = []
        for mark, (name, tensor, _, context) in zip(marks, found.tensors, strict=True):
            known = self._known.get(tensor)
            if known is None or known[0] != mark:
                known = self._known[tensor] = (mark, hash_bytes(tensor))
            what = f"{name}|{tuple(tensor.shape)}|{tensor.dtype}|{context}|"
            lines.append(what.encode() + known[1])
        return xxhash.xxh3_128_hexdigest(b"".join(sorted(lines)))

    def _samples(self, tensors: Sequence[LoadedTensor]) -> list[bytes]:
        """The bytes of about :data:`SAMPLES` values of every tensor; one copy per device and dtype."""
        alike: dict[Any, list[tuple[int, torch.Tensor]]] = defaultdict(list)
        samples = [b""] * len(tensors)
        for i, each in enumerate(tensors):
            view = self._view(each.tensor)
            if view is not None:
                alike[view.device, view.dtype].append((i, view))
        for views in alike.values():
            together = BytesIO(_bytes_of(torch.cat([view for _, view in views])))
            for i, view in views:
                samples[i] = together.read(view.nbytes)
        return samples

    def _view(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A view of the sampled values, ``None`` if there are none. It is cached, as making it takes longest.

        By number and weak reference: a dictionary with weak tensors as keys takes longer than the rest.
        """
        number, place = id(tensor), (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        known = self._views.get(number)
        if known is not None and known[0]() is tensor and known[1] == place:
            return known[2]
        view = None
        if tensor.numel():
            flat = tensor.detach()
            # Of a tensor that is not contiguous, sample one row: flattening it would copy the whole.
            flat = flat.reshape(-1) if flat.is_contiguous() else flat[(0,) * (flat.ndim - 1)]
            some = flat[:: max(1, flat.numel() // SAMPLES)]
            view = some.view(_WORDS.get(some.element_size(), some.dtype))
        views = self._views
        self._views[number] = (weakref.ref(tensor, lambda _: views.pop(number, None)), place, view)
        return view


def hash_bytes(tensor: torch.Tensor) -> bytes:
    """xxh3-128 over all bytes of ``tensor``."""
    if tensor.device.type != "cuda" or tensor.nbytes <= PIECE_BYTES:
        return xxhash.xxh3_128_digest(_bytes_of(tensor))
    digest = xxhash.xxh3_128()
    for piece in _pieces_of(tensor.detach().contiguous().reshape(-1).view(torch.uint8)):
        digest.update(piece.numpy().data)
    return digest.digest()


def _pieces_of(data: torch.Tensor, pinned: bool = True) -> Iterator[torch.Tensor]:
    """``data`` uint8 ``[n]`` in host memory, piece by piece; each is valid until the next but one.

    Pinned memory: copies that are far faster than :meth:`~torch.Tensor.cpu`, and run while the caller reads.
    """
    pieces = data.split(PIECE_BYTES)
    slots = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]

    def copy(number: int) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        there = slots[number % 2][: len(pieces[number])]
        there.copy_(pieces[number], non_blocking=True)
        return there, torch.cuda.current_stream(data.device).record_event() if pinned else None

    following = copy(0)
    for number in range(len(pieces)):
        piece, copied = following
        if number + 1 < len(pieces):
            following = copy(number + 1)
        if copied is not None:
            copied.synchronize()
        yield piece


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


# -- tensors and adapters ---------------------------------------------------------------------------


def loaded(model: Any) -> Loaded:
    """Parameters, buffers and what quantizers keep in addition; tied tensors once.

    Non-persistent buffers (rotary tables) are included. Left out are the weights of inactive LoRA adapters,
    and the current table of a length-dependent rotary: it follows the length of the last prompt and derives
    from another buffer.

    Raises :class:`UnsupportedModelError` for weights that are not visible as tensors: without a fingerprint,
    their KV is never stored.
    """
    tensors: list[LoadedTensor] = []
    adapters: list[bytes] = []
    seen: set[int] = set()
    modules: list[tuple[str, Any]] = modules_of(model)
    quantised = _is_quantised(model, modules)

    def add(name: str, tensor: torch.Tensor, is_kept: bool = True) -> None:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors.extend(_plain(name.replace(f"{COMPILED_INNER}.", ""), tensor, is_kept))

    for path, module in modules:
        prefix = f"{path}." if path else ""
        if hasattr(type(module), "active_adapters") and hasattr(module, "merged_adapters"):
            active = [] if getattr(module, "disable_adapters", False) else [*module.active_adapters]
            adapters.append(f"{path}:{_adapter_state(module, active)}".encode())
            seen.update(id(tensor) for tensor in _inactive(module, active))
        parameters, buffers = registered_tensors(module)
        for key, weight in parameters.items():
            if weight is not None:
                add(prefix + key, weight)
        for key, buffer in buffers.items():
            if buffer is not None and not _follows_length(module, key):
                add(prefix + key, buffer)
        if saves_more(module):
            for key, value in module.state_dict(prefix=prefix, keep_vars=True).items():
                if isinstance(value, torch.Tensor):
                    add(key, value, is_kept=False)
                elif isinstance(value, tuple | list | dict):
                    raise _packed(key, value)
        elif quantised:
            _refuse_hidden(prefix, module)
    return Loaded(tuple(tensors), digest_fields(adapters) if adapters else "")


def is_quantised(model: Any) -> bool:
    """Whether transformers quantised ``model``, or torchao or quanto did in place."""
    return _is_quantised(model, modules_of(model))


def _is_quantised(model: Any, modules: Sequence[tuple[str, nn.Module]]) -> bool:
    return getattr(model, "hf_quantizer", None) is not None or any(
        type(weight) not in _PLAIN_TENSORS and consists_of_tensors(weight)
        for _, module in modules
        for weight in registered_tensors(module)[0].values()
        if weight is not None
    )


#: They consist of no other tensors.
_PLAIN_TENSORS = (nn.Parameter, torch.Tensor)


def _plain(
    name: str, tensor: torch.Tensor, is_kept: bool, context: str = ""
) -> Iterator[LoadedTensor]:
    """``tensor``, or those that a tensor subclass consists of (torchao: data, scales, zero points)."""
    if tensor.is_meta:
        raise UnsupportedModelError(f"weight {name!r} is not loaded (meta device); use mode full")
    if type(tensor) in _PLAIN_TENSORS or not consists_of_tensors(tensor):
        yield LoadedTensor(name, tensor, is_kept, context)
        return
    parts, said = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    said = re.sub(r" at 0x[0-9a-f]+", "", f"{context}{type(tensor).__name__}{said}")
    for part in parts:
        yield from _plain(f"{name}.{part}", getattr(tensor, part), is_kept, said)


def depends_on_length(rotary: nn.Module | None) -> bool:
    """Whether the rotary table depends on the length of the sequence (dynamic, LongRoPE)."""
    kinds = getattr(rotary, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(kind in ("dynamic", "longrope") for kind in kinds)


def _follows_length(rotary: nn.Module, buffer: str) -> bool:
    is_current_table = buffer.endswith("inv_freq") and "original" not in buffer
    return is_current_table and depends_on_length(rotary)


#: Packages whose modules keep their weights as parameters and buffers.
_PLAIN_PACKAGES = ("torch.nn.", "transformers.models.", "transformers_modules.", "peft.")


def _refuse_hidden(prefix: str, module: nn.Module) -> None:
    """Refuse a quantizer's module that keeps tensors in other objects (mxfp4 on a GPU)."""
    if type(module).__module__.startswith(_PLAIN_PACKAGES):
        return
    for key, value in vars(module).items():
        is_plain = key.startswith("_") or isinstance(value, torch.Tensor | nn.Module)
        if not is_plain and _holds_tensors(value):
            raise _packed(prefix + key, value)


def _holds_tensors(value: Any, depth: int = 3) -> bool:
    inside = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    return isinstance(value, torch.Tensor) or (
        depth > 0 and any(_holds_tensors(each, depth - 1) for each in inside.values())
    )


def _packed(name: str, value: object) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"weight {name!r} is packed ({type(value).__name__}), not a tensor, so the model has no "
        "fingerprint; use mode full, or weights quantised by another method (torchao, bitsandbytes, GPTQ)"
    )


def _adapter_state(module: Any, active: Sequence[str]) -> str:
    scaling = getattr(module, "scaling", None) or {}
    state = {
        "active": active,
        "merged": list(module.merged_adapters),
        "scaling": {name: float(scaling[name]) for name in active if name in scaling},
    }
    return json.dumps(state, sort_keys=True)


def _inactive(module: Any, active: Sequence[str]) -> Iterator[torch.Tensor]:
    """Weights of adapters that are not active."""
    for layer in getattr(module, "adapter_layer_names", ()):
        for adapter, weights in (getattr(module, layer, None) or {}).items():
            if adapter not in active:
                yield from weights.parameters() if isinstance(weights, nn.Module) else (weights,)


# -- the config -------------------------------------------------------------------------------------


def weight_quantization(config: Any) -> str:
    """Quantisation of the weights as the config states it, canonical JSON, or ``"none"``."""
    quantization = getattr(config, "quantization_config", None)
    if not quantization:
        return "none"
    as_dict = quantization if isinstance(quantization, dict) else quantization.to_dict()
    return json.dumps(as_dict, sort_keys=True, default=str)


#: Config fields that cannot change any KV.
VOLATILE = frozenset(
    (
        "_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype",
        "use_cache", "output_attentions", "output_hidden_states", "return_dict", "id2label",
        "label2id", "problem_type", "bos_token_id", "eos_token_id", "pad_token_id",
        "_attn_implementation_autoset", "quantization_config",
    )
)  # fmt: skip


def geometry(config: Any, layer_types: Any) -> str:
    """Canonical JSON of the text config, without :data:`VOLATILE`, and the layer types."""
    found = {k: v for k, v in config.to_dict().items() if k not in VOLATILE}
    found["layer_types"] = list(layer_types)
    return json.dumps(found, sort_keys=True, default=str)
