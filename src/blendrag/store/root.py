"""The store's root directory: is it ours and safe to use, its format version, and its size limit.

The checks run once, before anything in a store is touched; a refusal is a :class:`StoreUnavailableError`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
from pathlib import Path

from blendrag.config import of_variable
from blendrag.errors import StoreUnavailableError
from blendrag.store import regular_files
from blendrag.store.databases import refuse_if_shared
from blendrag.store.durable import named_errors, sync_directory, whole_file, write_all
from blendrag.store.identity import FORMAT_VERSION
from blendrag.store.writers import new_temporary

logger = logging.getLogger("blendrag.store")

SUBDIRECTORIES = ("tmp", "kv", "index", "quarantine", "pinned")
#: Limit of a store for which no limit was ever given.
DEFAULT_DISK_BYTES = 64 << 30

_FORMAT_FILE = "format"
_FORMAT_TEXT = re.compile(r"blendrag-kv ([0-9]{1,9})\n", re.ASCII)
_LIMIT_FILE = "disk-bytes"
_LIMIT_TEXT = re.compile(r"([0-9]{1,20})\n", re.ASCII)
#: Larger limits are remembered as this one.
_MAX_LIMIT_BYTES = (1 << 63) - 1
#: Attempts to write a small file: each process that opens the store may remove the temporary.
_WRITE_TRIES = 20


def prepare(root: Path, read_only: bool) -> bool:
    """Check ``root`` and create what is missing; returns whether it can only be read."""
    _create(root, read_only)
    read_only = _check_owned(root, read_only)
    _check_version(root)
    for name in SUBDIRECTORIES:
        _prepare_subdirectory(root / name, read_only)
    if not read_only:
        _write_version(root)
    return read_only


def is_there(root: Path) -> bool:
    """Whether a store was created at ``root``."""
    return os.path.lexists(root / _FORMAT_FILE)


def check_place(root: Path) -> None:
    """Raise :class:`StoreUnavailableError` if no store could be created at ``root``; creates nothing."""
    if os.path.lexists(root):
        _create(root, read_only=True)
        _check_owned(root, read_only=False)
        return
    above = next(path for path in root.absolute().parents if os.path.lexists(path))
    if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
        kind = "cannot be written" if above.is_dir() else "is not a directory"
        raise StoreUnavailableError(
            f"store {root}{of_variable('store', root)} cannot be created: {above} {kind}; choose another "
            "place"
        )


def _check_owned(root: Path, read_only: bool) -> bool:
    """Check who owns the directory; returns whether it can only be read."""
    status = root.stat()
    refuse_if_shared(f"store {root}", status.st_mode)
    if status.st_uid != os.geteuid() and not read_only:
        raise _refused(
            f"store {root}{of_variable('store', root)} is owned by user {status.st_uid}, expected "
            f"{os.geteuid()}; change its owner, open it with read_only=True (--read-only)"
        )
    if not read_only and not os.access(root, os.W_OK | os.X_OK):
        logger.warning("store %s cannot be written: reads work, nothing new is kept", root)
        read_only = True
    if not os.access(root, os.R_OK | os.X_OK):
        raise _refused(
            f"store {root} cannot be read by this user, expected read and write permission; "
            "change its mode"
        )
    return read_only


def _create(root: Path, read_only: bool) -> None:
    with named_errors(f"creating store {root}"):
        if root.is_symlink() and not root.exists():
            raise _refused(
                f"store {root} is a symbolic link to nothing, expected a directory; fix the link"
            )
        if not root.exists() and not read_only:
            missing = [path for path in (root, *root.parents) if not path.exists()]
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in missing:
                with contextlib.suppress(OSError):  # the directory above may not be readable
                    sync_directory(path.parent)
        if root.is_dir():
            return
        if os.path.lexists(root):
            named = f"store {root}{of_variable('store', root)}"
            raise _refused(f"{named} is a file, expected a directory; move it away")
        raise StoreUnavailableError(
            f"no store at {root}{of_variable('store', root)}, expected one to read from; run blendrag "
            "ingest first"
        )


def _refused(why: str) -> StoreUnavailableError:
    return StoreUnavailableError(f"{why} or choose another store")


def read_only_error(root: Path) -> StoreUnavailableError:
    """For a change of a store that can only be read."""
    return _refused(
        f"store {root} is read-only, expected one that can be written; change its permissions"
    )


def _prepare_subdirectory(path: Path, read_only: bool) -> None:
    with named_errors(f"creating {path}"):
        if not read_only:
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
        elif not os.path.lexists(path):
            if path.name != "kv":
                return
            raise StoreUnavailableError(
                f"{path.parent} holds no store and cannot be written, expected a store to read "
                "from; choose another store"
            )
        mode = path.lstat().st_mode
    if not stat.S_ISDIR(mode):
        kind = "a symbolic link" if stat.S_ISLNK(mode) else "not a directory"
        raise _refused(f"{path} is {kind}, expected a directory made by the store; move it away")
    refuse_if_shared(str(path), mode)


# -- the format version --------------------------------------------------------------------------


def _check_version(root: Path) -> None:
    path = root / _FORMAT_FILE
    text = _read(path)
    if not text:
        return  # the store is being created, or its creation was interrupted
    match = _FORMAT_TEXT.fullmatch(text)
    if match is None:
        raise StoreUnavailableError(
            f"{path} reads {text[:32]!r}, expected 'blendrag-kv {FORMAT_VERSION}'; "
            "this is not a blendrag store, choose another store"
        )
    if int(match[1]) > FORMAT_VERSION:
        raise _refused(
            f"store {root} has format {match[1]}, written by a newer blendrag, expected at most "
            f"{FORMAT_VERSION}; upgrade blendrag"
        )


def _write_version(root: Path) -> None:
    """Write the format file unless it is there. Racing writers write the same bytes."""
    path = root / _FORMAT_FILE
    with named_errors(f"writing {path}", 4096):
        if not path.exists() or not path.stat().st_size:
            _write(path, f"blendrag-kv {FORMAT_VERSION}\n")


# -- the size limit ------------------------------------------------------------------------------


def settle_limit(root: Path, given: int | None, default: int, read_only: bool) -> int:
    """Byte limit of the store at ``root``: the given one, which is remembered, or the remembered one.

    ``default`` is used if no limit was ever given; it is not remembered.
    """
    if read_only:  # stores nothing, so that no limit matters
        return default if given is None else given
    path = root / _LIMIT_FILE
    text = _read(path)
    if given is not None:
        remembered = f"{min(given, _MAX_LIMIT_BYTES)}\n"
        try:
            if text != remembered:
                _write(path, remembered)
                sync_directory(root)
        except OSError as exc:  # a full disk does not keep the store from being opened
            logger.warning(
                "store %s cannot remember its limit (%s): give disk_bytes again next time",
                root,
                exc.strerror or exc,
            )
        return given
    if text is None:
        return default
    match = _LIMIT_TEXT.fullmatch(text)
    if match is None:
        raise StoreUnavailableError(
            f"{path} reads {text[:32]!r}, expected the store's limit in bytes; give it again with "
            f"blendrag ingest --disk-bytes, because the default might evict what {root} holds"
        )
    return int(match[1])


def _read(path: Path) -> str | None:
    """A small file; ``None`` if there is none."""
    with named_errors(f"reading {path}"), contextlib.suppress(FileNotFoundError):
        return regular_files.read_bytes(path, regular_files.MIB).decode("ascii", "replace")
    return None


def _write(path: Path, text: str) -> None:
    """Write a small file whole and durably."""
    for attempt in range(_WRITE_TRIES):
        try:
            with whole_file(new_temporary(path.parent / "tmp"), path) as fd:
                write_all(fd, text.encode())
            return
        except FileNotFoundError:
            if attempt == _WRITE_TRIES - 1:
                raise
