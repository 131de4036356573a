"""Open a store for maintenance, to read it or to change it, without tensors or a model.

Refuses every directory that is not a store, so a mistyped ``--store`` changes nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from blendrag.errors import InvalidInputError, StoreUnavailableError
from blendrag.store.base import Counters
from blendrag.store.disk_writer import DiskWriter, Pins
from blendrag.store.durable import named_errors
from blendrag.store.identity import is_name
from blendrag.store.index import Index
from blendrag.store.payload_files import Name, PayloadFiles
from blendrag.store.root import prepare

#: Called with the bytes done so far and the bytes in total.
Progress = Callable[[int, int], None]


def no_progress(done_bytes: int, total_bytes: int) -> None:
    """Ignore progress."""


def unlimited() -> int:
    """A limit that evicts nothing."""
    return (1 << 63) - 1


@dataclass(frozen=True)
class OpenStore:
    """A store opened for changes."""

    root: Path
    files: PayloadFiles
    index: Index
    writer: DiskWriter
    pins: Pins


@contextlib.contextmanager
def open_for_reading(root: Path) -> Iterator[PayloadFiles]:
    """The payload files of a store. Raises :class:`StoreUnavailableError` for anything else.

    Changes nothing. The store may belong to another user, be on a read-only disk, or be in use.
    """
    require_store(root)
    with named_errors(f"opening store {root}"):
        files = PayloadFiles(root)
    try:
        yield files
    finally:
        files.close()


@contextlib.contextmanager
def open_for_changes(root: Path, limit_bytes: Callable[[], int] = unlimited) -> Iterator[OpenStore]:
    """A store after recovery from crashed writers, created if ``root`` does not exist.

    Callers that must not create one call :func:`require_writable` first. With the default limit,
    nothing is evicted.
    """
    if prepare(root, read_only=False):
        raise _read_only(root)
    with named_errors(f"opening store {root}"):
        files = PayloadFiles(root)
    index, pins = Index(root / "index"), Pins()
    writer = DiskWriter(root, files, index, limit_bytes, pins, Counters())
    try:
        writer.open()
        yield OpenStore(root, files, index, writer, pins)
    finally:
        writer.close()
        index.close()
        files.close()


def require_store(root: Path) -> None:
    """Refuse a directory that is not a store, or a store this version cannot read."""
    with named_errors(f"opening store {root}"):
        if root.is_dir() and not _has_format(root):
            raise StoreUnavailableError(
                f"{root} holds no store, expected a directory that blendrag ingest made; "
                "choose another --store"
            )
    prepare(root, read_only=True)


def require_writable(root: Path) -> None:
    """Refuse a directory that is not a store, or a store this user cannot change."""
    require_store(root)
    # prepare() refuses a store of another user, and names the owner
    if root.stat().st_uid == os.geteuid() and not os.access(root, os.W_OK | os.X_OK):
        raise _read_only(root)


def require_namespace(namespace: str | None) -> None:
    """Refuse anything but a full namespace name or ``None``, which means all namespaces."""
    if namespace is not None and not is_name(namespace):
        raise InvalidInputError(
            f"{namespace[:64]!r} is not a namespace, expected 64 lowercase hex digits; "
            "find_namespace completes a shorter prefix"
        )


def find_namespace(root: Path, prefix: str) -> str:
    """The namespace of the store at ``root`` that begins with ``prefix``.

    Raises :class:`InvalidInputError` unless there is exactly one.
    """
    with named_errors(f"listing store {root}"):
        known = [name for name in sorted(os.listdir(root / "kv")) if is_name(name)]
    found = [name for name in known if prefix and name.startswith(prefix)]
    if len(found) == 1:
        return found[0]
    problem = f"matches {len(found)} namespaces" if found else "matches no namespace"
    choices = ", ".join(name[:12] for name in (found or known)[:8]) or "none"
    raise InvalidInputError(
        f"--namespace {prefix[:64]!r} {problem} of store {root}, expected the beginning of one of: "
        f"{choices}"
    )


def walk(files: PayloadFiles, namespace: str | None) -> Iterator[Name]:
    """Every payload of one namespace, or of all, in order."""
    return files.walk() if namespace is None else files.walk_namespace(namespace)


def _has_format(root: Path) -> bool:
    try:
        return os.lstat(root / "format").st_size > 0
    except FileNotFoundError:
        return False


def _read_only(root: Path) -> StoreUnavailableError:
    return StoreUnavailableError(
        f"store {root} is read-only, expected one that can be written; "
        "change its permissions or choose another --store"
    )
