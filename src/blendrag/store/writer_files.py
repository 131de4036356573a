"""The files of writers in a store: ``writers/<fingerprint>.safetensors``, each written whole.

What is in them is read by :mod:`blendrag.model.writer`, which compares it with the fingerprint, as
:func:`is_whole` does without torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import xxhash

from blendrag.store import regular_files
from blendrag.store.durable import named_errors, sync_directory
from blendrag.store.identity import digest_fields, is_name, require_name

DIRECTORY = "writers"
_ENDING = ".safetensors"
#: Largest file; a writer of rank 64 for a model of 70B in float32 has a third of it.
MAX_MIB = 8 << 10
#: Names of dtypes in torch by those in safetensors: all that the weights of a writer may have.
_DTYPES = {
    "F64": "torch.float64", "F32": "torch.float32", "F16": "torch.float16", "BF16": "torch.bfloat16",
    "F8_E5M2": "torch.float8_e5m2", "F8_E4M3": "torch.float8_e4m3fn",
}  # fmt: skip


class TensorDigest(NamedTuple):
    """What a fingerprint covers of a tensor."""

    shape: tuple[int, ...]
    dtype: str
    """As torch names it."""
    digest: bytes
    """xxh3-128 over its bytes."""


def fingerprint_of(parts: Iterable[tuple[str, float, Sequence[TensorDigest]]]) -> str:
    """64 hex digits over the names, scales and tensors of a writer's layers."""
    fields = [b"writer"]
    for name, scale, tensors in sorted(parts):
        fields += [name.encode(), repr(scale).encode()]
        for tensor in tensors:
            fields += [f"{tensor.shape} {tensor.dtype}".encode(), tensor.digest]
    return digest_fields(fields)


def about_in(data: bytes) -> dict[str, Any]:
    """What the file of a writer says besides its tensors: model, ``encode_after``, and scales by layer.

    Raises :class:`ValueError`, :class:`LookupError` or :class:`TypeError` for other bytes.
    """
    size = int.from_bytes(data[:8], "little")
    about: dict[str, Any] = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["writer"])
    return about


def is_whole(data: bytes, fingerprint: str) -> bool:
    """Whether ``data`` is the undamaged file of that writer."""
    try:
        about, tensors = about_in(data), dict(safetensors.deserialize(data))
        parts = [
            (name, float(scale), [_digest_of(tensors[f"{name}.{half}"]) for half in "AB"])
            for name, scale in about["scales"].items()
        ]
        return "model" in about and fingerprint_of(parts) == fingerprint
    except Exception:  # forged bytes raise all kinds
        return False


def _digest_of(tensor: dict[str, Any]) -> TensorDigest:
    """``tensor``: as safetensors reads it."""
    digest = xxhash.xxh3_128_digest(tensor["data"])
    return TensorDigest(tuple(tensor["shape"]), _DTYPES[tensor["dtype"]], digest)


def path_of(root: Path, fingerprint: str) -> Path:
    require_name(fingerprint)
    return Path(root) / member_of(fingerprint)


def member_of(fingerprint: str) -> str:
    """Path within a store, and in an archive of one."""
    return f"{DIRECTORY}/{fingerprint}{_ENDING}"


def kept_in(root: Path) -> list[str]:
    """Fingerprints of the writers in the store."""
    names = [path.name.removesuffix(_ENDING) for path in (root / DIRECTORY).glob(f"*{_ENDING}")]
    return sorted(filter(is_name, names))


def size_bytes(root: Path, fingerprint: str) -> int:
    """0 if it is gone."""
    try:
        return path_of(root, fingerprint).lstat().st_size
    except FileNotFoundError:
        return 0


def is_kept(root: Path, fingerprint: str) -> bool:
    """Whether the file of a writer is there; of no writer (empty), nothing is missing."""
    return not fingerprint or path_of(root, fingerprint).is_file()


def read(root: Path, fingerprint: str) -> bytes:
    """Raises :class:`OSError`."""
    return regular_files.read_bytes(path_of(root, fingerprint), MAX_MIB * regular_files.MIB)


def has_whole(root: Path, fingerprint: str) -> bool:
    """Whether the file of a writer is there, can be read and is undamaged."""
    try:
        return is_whole(read(root, fingerprint), fingerprint)
    except OSError:
        return False


def sha256_of(root: Path, fingerprint: str) -> str:
    """SHA-256 of the file, empty if it cannot be read. The file is read again only if it has changed."""
    try:
        status = path_of(root, fingerprint).stat()
        return _sha256(root, fingerprint, status.st_mtime_ns, status.st_ino, status.st_size)
    except OSError:
        return ""


@lru_cache(maxsize=16)
def _sha256(root: Path, fingerprint: str, *_: int) -> str:
    return hashlib.sha256(read(root, fingerprint)).hexdigest()


def write(root: Path, fingerprint: str, data: bytes) -> None:
    """Raises :class:`StoreFullError` and :class:`StoreUnavailableError`."""
    path = path_of(root, fingerprint)
    with named_errors(f"writing {path}", len(data)):
        with contextlib.suppress(FileExistsError):
            path.parent.mkdir(mode=0o700)
            sync_directory(root)
        regular_files.replace(path, data)
        sync_directory(path.parent)


def remove(root: Path, fingerprint: str) -> None:
    """Raises :class:`StoreUnavailableError`. Idempotent."""
    path = path_of(root, fingerprint)
    with named_errors(f"removing {path}"), contextlib.suppress(FileNotFoundError):
        path.unlink()
        sync_directory(path.parent)
