"""The files of writers in a store: ``writers/<fingerprint>.safetensors``, each written whole.

What is in them is read by :mod:`blendrag.model.writer`, which compares it with the fingerprint.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from blendrag.store import regular_files
from blendrag.store.durable import named_errors, sync_directory
from blendrag.store.identity import is_name, require_name

DIRECTORY = "writers"
_ENDING = ".safetensors"
#: Largest file; a writer of rank 64 for a model of 70B in float32 has a third of it.
MAX_MIB = 8 << 10


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


def is_kept(root: Path, fingerprint: str) -> bool:
    """Whether the file of a writer is there; of no writer (empty), nothing is missing."""
    return not fingerprint or path_of(root, fingerprint).is_file()


def read(root: Path, fingerprint: str) -> bytes:
    """Raises :class:`OSError`."""
    return regular_files.read_bytes(path_of(root, fingerprint), MAX_MIB * regular_files.MIB)


def write(root: Path, fingerprint: str, data: bytes) -> None:
    """Raises :class:`StoreFullError` and :class:`StoreUnavailableError`."""
    path = path_of(root, fingerprint)
    with named_errors(f"writing {path}", len(data)):
        with contextlib.suppress(FileExistsError):
            path.parent.mkdir(mode=0o700)
            sync_directory(root)
        regular_files.replace(path, data)
        sync_directory(path.parent)
