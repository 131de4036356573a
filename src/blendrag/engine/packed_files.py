"""Packed copies of a model's weights, made once and kept in the user's cache directory.

Copies of layers with the same input are joined, and other layers reordered, in each process: that takes a
fraction of a second, and what it makes is not kept.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from blendrag.config import cache_folder
from blendrag.model import decode_weights as packing
from blendrag.model import measurements
from blendrag.model.adapter import UNNAMED, ModelAdapter
from blendrag.model.decode_weights import HEAD, Packed, PackedWeights
from blendrag.model.sharing import loaded_once
from blendrag.planning.machine import available_bytes
from blendrag.store.durable import readable_size

log = logging.getLogger(__name__)

#: Counts up when copies are made in another way, so that earlier files are not used.
VERSION = 5
#: Files that are kept of a model: its weights change with an adapter (``lora``), and two may take turns.
KEPT = 2
#: Files that are kept of all models without a name together.
KEPT_UNNAMED = 4
#: Share of the available memory that copies may take.
MOST_OF_MEMORY = 0.8


def packed_weights(adapter: ModelAdapter, name: str) -> PackedWeights:
    """The packed weights of the model: those of another engine over the same weights, from the user's cache
    if they are there, or made and kept there. With a packed LM head alone, the other layers are reordered, if
    there is memory for that."""
    file = file_of(adapter, name)

    def load() -> PackedWeights:
        found = _read(file, packing.packed_layers(adapter.model, name))
        if found is None:
            found = packing.pack(adapter.model, name)
            _keep(file, found, partial(_remove_earlier, file, adapter, name))
        if name != HEAD:
            return packing.joined(adapter.model, found)
        if not no_room(packing.reordered_bytes(adapter.model)):
            found.update(packing.reorder(adapter.model))
        return found

    return loaded_once(file, load)


def no_room(size_bytes: int) -> str:
    """That copies of that size need more memory than there is, in a clause, or empty."""
    free = available_bytes()
    if size_bytes <= free * MOST_OF_MEMORY:
        return ""
    needed = readable_size(size_bytes)
    return f"packed copies need {needed} of memory, and {readable_size(free)} are free"


def _of_model(adapter: ModelAdapter, name: str) -> str:
    """What the names of all files of a model begin with."""
    return f"{xxhash.xxh3_64_hexdigest(adapter.model_id.encode())}-{name}"


def _remove_earlier(file: Path, adapter: ModelAdapter, name: str) -> None:
    """Remove the files of earlier weights of the model but the ones written last, to make room for ``file``.

    Models without a name look like one, so more of their files stay.
    """
    kept = (KEPT_UNNAMED if adapter.model_id == UNNAMED else KEPT) - 1
    with suppress(FileNotFoundError):  # another process removes one; the rest goes the next time
        files = file.parent.glob(f"{_of_model(adapter, name)}-*")
        earlier = [each for each in files if each.stem != file.stem]  # not what one writes now
        earlier.sort(key=lambda each: each.stat().st_mtime, reverse=True)
        for each in earlier[kept:]:
            each.unlink(missing_ok=True)


def file_of(adapter: ModelAdapter, name: str) -> Path:
    """Where the copies of the model's weights are kept."""
    folder = cache_folder("decode-weights")
    fingerprint = adapter.identity.tensors_fingerprint
    return folder / f"{_of_model(adapter, name)}-{VERSION}-{fingerprint}.safetensors"


def forget(adapter: ModelAdapter, name: str) -> None:
    """Remove the file of the model's copies of that name. They stay in memory where they are used."""
    with suppress(OSError):
        file_of(adapter, name).unlink()


def _digest(packed: Mapping[str, Packed]) -> str:
    """xxh3-128 over names, shapes and bytes."""
    found = xxhash.xxh3_128()
    for name in sorted(packed):
        for part in packed[name]:
            found.update(f"{name}|{part.dtype}|{tuple(part.shape)}|".encode())
            found.update(part.contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()


def _read(file: Path, layers: Iterable[str]) -> PackedWeights | None:
    """What :func:`_keep` wrote; ``None`` if it is missing or damaged."""
    if not file.is_file():
        return None
    try:
        with safe_open(str(file), framework="pt") as opened:
            found = PackedWeights(
                (at, (_copy(opened, f"{at}.0"), _copy(opened, f"{at}.1"))) for at in layers
            )
            digest = (opened.metadata() or {}).get("xxh3")
    except (OSError, SafetensorError, ValueError) as exc:
        log.warning(
            "the packed weights in %s cannot be read (%s), so they are made again", file, exc
        )
        return None
    if _digest(found) != digest:
        log.warning("the packed weights in %s are damaged, so they are made again", file)
        return None
    return found


def _copy(opened: Any, name: str) -> torch.Tensor:
    """A tensor of the file, in memory of its own: the file aligns tensors to 8 bytes, and torch's product in
    8 bits (2.13) crashes for 4 rows and more on weights that are not aligned to 16."""
    tensor: torch.Tensor = opened.get_tensor(name)
    return tensor.clone()


def _keep(file: Path, packed: Mapping[str, Packed], remove_earlier: Callable[[], None]) -> None:
    """Write ``packed``. Raises nothing: they would be made again."""
    tensors = {
        f"{name}.{i}": part for name, parts in packed.items() for i, part in enumerate(parts)
    }
    temporary = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_earlier()
        save_file(tensors, str(temporary), {"xxh3": _digest(packed)})
        temporary.chmod(0o600)
        os.replace(temporary, file)
    except (OSError, SafetensorError) as exc:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        measurements.warn_unwritable(exc)
