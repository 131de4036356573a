"""Open a store for maintenance; refuses other directories, so a mistyped ``--store`` changes nothing."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from blendrag.errors import InvalidInputError, StoreUnavailableError
from blendrag.store.disk_writer import DiskWriter
from blendrag.store.durable import named_errors
from blendrag.store.identity import is_name
from blendrag.store.payload_files import PayloadFiles
from blendrag.store.root import prepare, read_only_error

#: Called with the bytes done so far and the bytes in total.
Progress = Callable[[int, int], None]


def no_progress(done_bytes: int, total_bytes: int) -> None:
    """Ignore progress."""


@contextlib.contextmanager
def open_for_reading(root: Path) -> Iterator[PayloadFiles]:
    """The payload files of a store. Raises :class:`StoreUnavailableError` for anything else.

    Changes nothing. The store may belong to another user, be on a read-only disk, or be in use.
    """
    require_store(root)
    with named_errors(f"opening store {root}"):
        files = PayloadFiles(root)
    with contextlib.closing(files):
        yield files


@contextlib.contextmanager
def open_for_changes(
    root: Path, limit_bytes: Callable[[], int] = lambda: sys.maxsize
) -> Iterator[DiskWriter]:
    """A store after recovery from crashed writers, created if ``root`` does not exist.

    Callers that must not create one call :func:`require_writable` first. With the default limit,
    nothing is evicted.
    """
    if prepare(root, read_only=False):
        raise read_only_error(root)
    with contextlib.closing(DiskWriter(root, limit_bytes)) as store:
        store.open()
        yield store


def require_store(root: Path) -> None:
    """Refuse a directory that is not a store, or a store this version cannot read."""
    with named_errors(f"opening store {root}"):
        mark = root / "format"
        if root.is_dir() and not (os.path.lexists(mark) and mark.lstat().st_size):
            raise StoreUnavailableError(
                f"{root} holds no store, expected a directory that blendrag ingest made; "
                "choose another store"
            )
    prepare(root, read_only=True)


def require_writable(root: Path) -> None:
    """Refuse a directory that is not a store, or a store this user cannot change."""
    require_store(root)
    # prepare() refuses a store of another user, and names the owner
    if root.stat().st_uid == os.geteuid() and not os.access(root, os.W_OK | os.X_OK):
        raise read_only_error(root)


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
