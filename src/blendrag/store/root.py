"""The store's directory: is it ours, is it safe, is it of a version we can read.

Owns the checks made once, before anything in a store is touched. Knows nothing of payloads or of the
index. Refusals are :class:`StoreUnavailableError` in one sentence: value, expectation, remedy.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
from pathlib import Path

from blendrag.errors import StoreUnavailableError
from blendrag.store.directories import sync_directory
from blendrag.store.disk_errors import store_error
from blendrag.store.identity import FORMAT_VERSION
from blendrag.store.small_files import read_text, replace

logger = logging.getLogger("blendrag.store")

SUBDIRECTORIES = ("tmp", "kv", "index", "quarantine", "pinned")
_FORMAT_FILE = "format"
_FORMAT_TEXT = re.compile(r"blendrag-kv ([0-9]{1,9})\n", re.ASCII)


def prepare(root: Path, read_only: bool) -> bool:
    """Check ``root`` and create what is missing; whether it is usable for reading only."""
    _create(root, read_only)
    _check_trusted(root, read_only)
    if not read_only and not os.access(root, os.W_OK | os.X_OK):
        logger.warning("store %s cannot be written: reads work, nothing new is kept", root)
        read_only = True
    if not os.access(root, os.R_OK | os.X_OK):
        raise StoreUnavailableError(
            f"store {root} cannot be read by this user, expected read and write permission; "
            "change its mode or choose another --store"
        )
    _check_version(root)
    for name in SUBDIRECTORIES:
        _prepare_subdirectory(root / name, read_only)
    if not read_only:
        _write_version(root)
    return read_only


def _create(root: Path, read_only: bool) -> None:
    try:
        if root.is_symlink() and not root.exists():
            raise StoreUnavailableError(
                f"store {root} is a symbolic link to nothing, expected a directory; "
                "mend the link or choose another --store"
            )
        if not root.exists() and not read_only:
            _make(root)
        is_directory = root.is_dir()
        exists = is_directory or os.path.lexists(root)
    except NotADirectoryError as exc:
        raise StoreUnavailableError(
            f"store {root} lies below a file, expected a directory; choose another --store"
        ) from exc
    except OSError as exc:
        raise store_error(exc, f"creating store {root}") from exc
    if exists and not is_directory:
        raise StoreUnavailableError(
            f"store {root} is a file, expected a directory; choose another --store"
        )
    if not exists:
        raise StoreUnavailableError(
            f"no store at {root}, expected one to read from; run blendrag ingest first"
        )


def _make(root: Path) -> None:
    """The directory and those above it, each durably in the one above."""
    missing = [path for path in (root, *root.parents) if not path.exists()]
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in missing:
        with contextlib.suppress(OSError):  # one above may be for entering only
            sync_directory(path.parent)


def _check_trusted(root: Path, read_only: bool) -> None:
    """Refuse a directory in which others could plant files."""
    status = root.stat()
    _refuse_if_shared(f"store {root}", status.st_mode)
    if status.st_uid != os.geteuid() and not read_only:
        raise StoreUnavailableError(
            f"store {root} is owned by user {status.st_uid}, expected {os.geteuid()}; "
            "change its owner, open it read-only or choose another --store"
        )


def _refuse_if_shared(what: str, mode: int) -> None:
    if mode & stat.S_IWOTH:
        raise StoreUnavailableError(
            f"{what} can be written by every user (mode {stat.S_IMODE(mode):04o}), expected 0700; "
            "run chmod o-w on it or choose another --store"
        )


def _prepare_subdirectory(path: Path, read_only: bool) -> None:
    try:
        if not read_only:
            path.mkdir(mode=0o700, exist_ok=True)
        mode = path.lstat().st_mode
    except FileExistsError:
        mode = path.lstat().st_mode
    except FileNotFoundError as exc:
        if path.name != "kv":
            return
        raise StoreUnavailableError(
            f"{path.parent} holds no store and cannot be written, expected a store to read from; "
            "choose another --store"
        ) from exc
    except OSError as exc:
        raise store_error(exc, f"creating {path}") from exc
    if not stat.S_ISDIR(mode):
        kind = "a symbolic link" if stat.S_ISLNK(mode) else "not a directory"
        raise StoreUnavailableError(
            f"{path} is {kind}, expected a directory made by the store; "
            "move it away or choose another --store"
        )
    _refuse_if_shared(str(path), mode)


def _check_version(root: Path) -> None:
    path = root / _FORMAT_FILE
    text = read_text(path)
    if not text:
        return  # someone creates this store right now, or was interrupted while doing so
    match = _FORMAT_TEXT.fullmatch(text)
    if match is None:
        raise StoreUnavailableError(
            f"{path} reads {text[:32]!r}, expected 'blendrag-kv {FORMAT_VERSION}'; "
            "this is not a blendrag store, choose another --store"
        )
    if int(match[1]) > FORMAT_VERSION:
        raise StoreUnavailableError(
            f"store {root} has format {match[1]}, written by a newer blendrag, expected at most "
            f"{FORMAT_VERSION}; upgrade blendrag or choose another --store"
        )


def _write_version(root: Path) -> None:
    """Write the format file unless it is there; racing writers write the same bytes."""
    path = root / _FORMAT_FILE
    try:
        if not path.exists() or not path.stat().st_size:
            replace(path, f"blendrag-kv {FORMAT_VERSION}\n")
    except OSError as exc:
        raise store_error(exc, f"writing {path}", 4096) from exc
