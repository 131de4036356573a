"""A store opened to be looked after: its files and its index, no tensors, no model.

Owns the refusals: what is not a store is never taken for one, so nothing in somebody's directory is
changed because ``--store`` was mistyped. Imports neither torch nor numpy.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from blendrag.errors import InvalidInputError, StoreUnavailableError
from blendrag.store.disk_errors import named_errors
from blendrag.store.files import PayloadFiles
from blendrag.store.format import is_name
from blendrag.store.index import Index
from blendrag.store.index_errors import IndexLocked, IndexOdd
from blendrag.store.pins import Pins
from blendrag.store.room import Room
from blendrag.store.root import prepare
from blendrag.store.tally import Tally
from blendrag.store.writing import DiskWriter

_T = TypeVar("_T")


def unlimited() -> int:
    """A limit that evicts nothing."""
    return (1 << 63) - 1


@dataclass(frozen=True)
class Opened:
    """A store that may be changed."""

    root: Path
    files: PayloadFiles
    index: Index
    writer: DiskWriter
    pins: Pins

    def held(self, action: Callable[[], _T]) -> _T:
        """Run ``action`` with the index held, after a rebuild should the index turn out odd."""
        try:
            with self.index.exclusive():
                try:
                    return action()
                except IndexOdd:
                    self.writer.recover()
                    return action()
        except IndexLocked as exc:
            raise StoreUnavailableError(str(exc)) from exc


@contextlib.contextmanager
def looking(root: Path) -> Iterator[PayloadFiles]:
    """The files of a store, to be read only; raises :class:`StoreUnavailableError` for anything else.

    Creates and changes nothing; the store may be another user's, on a read-only disk, or in use.
    """
    require_store(root)
    with named_errors(f"opening store {root}"):
        files = PayloadFiles(root)
    try:
        yield files
    finally:
        files.close()


@contextlib.contextmanager
def changing(root: Path, limit_bytes: Callable[[], int] = unlimited) -> Iterator[Opened]:
    """A store to be changed, after whatever crashed writers left was made good.

    With the default limit nothing is evicted that nobody asked for. ``root`` is made where there is
    nothing; see :func:`require_writable` for those who must not.
    """
    if prepare(root, read_only=False):
        raise _read_only(root)
    with named_errors(f"opening store {root}"):
        files = PayloadFiles(root)
    index, pins, tally = Index(root / "index"), Pins(), Tally()
    room = Room(root, files, index, limit_bytes, pins, lambda: None, tally)
    writer = DiskWriter(root, files, index, room, tally)
    try:
        writer.open()
        yield Opened(root, files, index, writer, pins)
    finally:
        writer.close()
        index.close()
        files.close()


def require_store(root: Path) -> None:
    """Refuse what is not a store, or one that this version cannot read."""
    with named_errors(f"opening store {root}"):
        if root.is_dir() and not _has_format(root):
            raise StoreUnavailableError(
                f"{root} holds no store, expected a directory that blendrag ingest made; "
                "choose another --store"
            )
    prepare(root, read_only=True)


def require_writable(root: Path) -> None:
    """Refuse what is not a store, or one that this user cannot change."""
    require_store(root)
    if root.stat().st_uid == os.geteuid() and not os.access(root, os.W_OK | os.X_OK):
        raise _read_only(root)  # of another owner, opening says whose it is


def require_namespace(namespace: str | None) -> None:
    """Refuse what is no whole name of a namespace; ``None`` is all of them."""
    if namespace is not None and not is_name(namespace):
        raise InvalidInputError(
            f"{namespace[:64]!r} is no namespace, expected 64 lowercase hex digits; "
            "find_namespace gives the one that begins with fewer"
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
    many = f"fits {len(found)} namespaces" if found else "is no namespace"
    among = ", ".join(name[:12] for name in (found or known)[:8]) or "none"
    raise InvalidInputError(
        f"--namespace {prefix[:64]!r} {many} of store {root}, expected the beginning of one of: {among}"
    )


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
