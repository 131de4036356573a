"""From a name to a loaded adapter: hub id, local directory, or ``demo``.

Foreign exceptions are mapped here, once.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError

from blendrag.config import DEMO_MODEL
from blendrag.errors import InvalidInputError, ModelLoadError
from blendrag.kv import DTYPES
from blendrag.model.adapter import ModelAdapter
from blendrag.model.tokens import Tokens

#: What transformers, safetensors and torch raise for checkpoints that cannot be loaded.
LOAD_ERRORS = (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError)


def resolve_model(name: str) -> str:
    """``demo`` → the directory inside the package; anything else unchanged."""
    if name != DEMO_MODEL:
        return name
    return str(Path(__file__).resolve().parent.parent / "demo" / "model")


def load_adapter(
    name: str = DEMO_MODEL, dtype: str = "auto", device: str = "auto", lora: str | None = None
) -> ModelAdapter:
    """Load ``name`` (hub id, directory or ``demo``) and probe it.

    ``dtype``: ``auto`` or a key of :data:`blendrag.kv.DTYPES`; ``lora``: directory of a PEFT adapter.
    Raises :class:`ModelLoadError` or :class:`InvalidInputError`.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise InvalidInputError(f"dtype {dtype!r} is not one of auto, {', '.join(DTYPES)}")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = resolve_model(name)
    target = resolve_device(device)
    torch_dtype: Any = dtype if dtype == "auto" else DTYPES[dtype]
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch_dtype)
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = model.to(target)
    except LOAD_ERRORS as exc:
        raise ModelLoadError(_load_message(name, path, exc)) from exc
    if lora is not None:
        model = _with_lora(model, lora)
    return ModelAdapter(model, tokenizer, model_id=name)


def load_tokens(name: str) -> Tokens:
    """Only the tokenizers of ``name``; raises :class:`ModelLoadError`."""
    from transformers import AutoTokenizer

    path = resolve_model(name)
    try:
        return Tokens(AutoTokenizer.from_pretrained(path))
    except LOAD_ERRORS as exc:
        raise ModelLoadError(_load_message(name, path, exc)) from exc


def resolve_device(device: str) -> torch.device:
    """``auto`` → CUDA if there is one, else the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
    except RuntimeError as exc:
        raise InvalidInputError(f"device {device!r} is not one of auto, cpu, cuda, cuda:N") from exc
    if target.type == "cuda" and not torch.cuda.is_available():
        raise InvalidInputError(
            f"device {device!r} asked for, but torch sees no CUDA device; use cpu"
        )
    return target


def model_signature(name: str) -> str:
    """Cheap signature of a checkpoint's files on this disk (name, size, mtime), ``""`` if none are.

    Lets an unchanged corpus be recognised without loading the model; it only ever saves work. What
    a query may reuse is decided by the fingerprint of the tensors really loaded.
    """
    root = Path(resolve_model(name))
    if not root.is_dir():
        cached = try_to_load_from_cache(name, "config.json") if "/" in name else None
        if not isinstance(cached, str):
            return ""
        root = Path(cached).parent
    entries = []
    for file in sorted(p for p in root.iterdir() if p.is_file()):
        stat = file.stat()
        entries.append(f"{file.name}:{stat.st_size}:{stat.st_mtime_ns}")
    return "|".join(entries)


def _with_lora(model: Any, lora: str) -> Any:
    try:
        from peft import PeftModel
    except ImportError as exc:
        raise ModelLoadError(f"adapter {lora!r} needs peft: pip install 'blendrag[lora]'") from exc
    try:
        return PeftModel.from_pretrained(model, lora)
    except (OSError, ValueError, RuntimeError) as exc:
        raise ModelLoadError(f"adapter {lora!r} cannot be loaded: {_first_line(exc)}") from exc


def _load_message(name: str, path: str, exc: Exception) -> str:
    if Path(path).exists():
        return f"{name!r} is a directory but not a loadable causal LM: {_first_line(exc)}"
    offline = os.environ.get("HF_HUB_OFFLINE") == "1"
    where = (
        "not in the local cache (HF_HUB_OFFLINE=1)" if offline else "not found on the hub either"
    )
    return (
        f"model {name!r} is no local directory and {where}; expected a hub id, a directory with "
        f"config.json and weights, or 'demo' ({_first_line(exc)})"
    )


def _first_line(exc: BaseException) -> str:
    text = str(exc).strip() or type(exc).__name__
    return text.splitlines()[0][:200]
