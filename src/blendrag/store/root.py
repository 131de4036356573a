"""The store's directory: is it ours, is it safe, is it of a version we can read.

Owns the checks made once, before anything in a store is touched, and the limit that a store was
given. Knows nothing of payloads or of the index. Refusals are :class:`StoreUnavailableError` in one
sentence: value, expectation, remedy.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from blendrag.errors import StoreError, StoreFullError, StoreUnavailableError
from blendrag.identity import FORMAT_VERSION
from blendrag.store.directories import sync_directory, write_all
from blendrag.store.writers import stray_temporary

logger = logging.getLogger("blendrag.store")

SUBDIRECTORIES = ("tmp", "kv", "index", "quarantine", "pinned")
_FORMAT_FILE = "format"
_FORMAT_TEXT = re.compile(r"blendrag-kv ([0-9]{1,9})\n", re.ASCII)
_LIMIT_FILE = "disk-bytes"
_LIMIT_TEXT = re.compile(r"([0-9]{1,20})\n", re.ASCII)
#: No disk is larger; a limit beyond it is remembered as this.
_MAX_LIMIT_BYTES = (1 << 63) - 1
#: Limit of a disk tier for which nobody ever gave one.
DEFAULT_DISK_BYTES = 64 << 30
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def megabytes(size_bytes: int) -> str:
    """``1234567`` → ``"1.2 MB"``."""
    return f"{size_bytes / 1e6:.1f} MB"


def store_error(exc: OSError, doing: str, needed_bytes: int = 0) -> StoreError:
    """Our error for an ``OSError`` met while ``doing`` something; raise it ``from exc``."""
    if exc.errno in _NO_SPACE:
        return StoreFullError(
            f"no space left while {doing}, which needs {megabytes(needed_bytes)}; "
            "free some space or choose another --store",
            needed_bytes,
        )
    return StoreUnavailableError(
        f"{exc.strerror or exc} while {doing}, expected a working disk and a directory of our own; "
        "check it or choose another --store"
    )


@contextlib.contextmanager
def named_errors(doing: str, needed_bytes: int = 0) -> Iterator[None]:
    """``OSError`` met while ``doing`` something as ours."""
    try:
        yield
    except OSError as exc:
        raise store_error(exc, doing, needed_bytes) from exc


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
    if status.st_mode & stat.S_IWOTH:
        raise StoreUnavailableError(
            f"store {root} can be written by every user (mode {stat.S_IMODE(status.st_mode):04o}), "
            "expected 0700; run chmod o-w on it or choose another --store"
        )
    if status.st_uid != os.geteuid() and not read_only:
        raise StoreUnavailableError(
            f"store {root} is owned by user {status.st_uid}, expected {os.geteuid()}; "
            "change its owner, open it read-only or choose another --store"
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


def settle_limit(root: Path, given: int | None, default: int, read_only: bool) -> int:
    """Byte limit of the store at ``root``: the one given, which is remembered, or the last one.

    A store thus keeps its size when somebody opens it later without saying how large it may be.
    """
    if read_only:  # puts nothing, so that no limit matters
        return default if given is None else given
    text = _read_text(root / _LIMIT_FILE)
    if given is not None:
        remembered = min(given, _MAX_LIMIT_BYTES)
        if text != f"{remembered}\n":
            _remember_limit(root, remembered)
        return given
    if text is None:
        return default
    match = _LIMIT_TEXT.fullmatch(text)
    if match is None:
        raise StoreUnavailableError(
            f"{root / _LIMIT_FILE} reads {text[:32]!r}, expected the store's limit in bytes; "
            f"give --disk-bytes, as the default might evict what is stored in {root}"
        )
    return int(match[1])


def _remember_limit(root: Path, limit_bytes: int) -> None:
    """Replace the limit file at once; a full disk is no reason not to open the store."""
    try:
        _replace(root / _LIMIT_FILE, f"{limit_bytes}\n")
        sync_directory(root)
    except OSError as exc:
        logger.warning(
            "store %s cannot remember its limit (%s): give --disk-bytes again next time",
            root,
            exc.strerror or exc,
        )


def _replace(path: Path, text: str) -> None:
    """Write a small file of the root, at once and whole."""
    try:
        _replace_by(stray_temporary(path.parent / "tmp"), path, text)
    except FileNotFoundError:  # cleared away as left over by one who opens the store just now
        _replace_by(stray_temporary(path.parent / "tmp"), path, text)


def _replace_by(temporary: Path, path: Path, text: str) -> None:
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            write_all(fd, text.encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _read_text(path: Path) -> str | None:
    """The beginning of a small file of ours; ``None`` where there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise store_error(exc, f"reading {path}") from exc
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise StoreUnavailableError(
                f"{path} is no regular file, expected one made by the store; "
                "move it away or choose another --store"
            )
        return os.read(fd, 64).decode("ascii", "replace")
    except OSError as exc:
        raise store_error(exc, f"reading {path}") from exc
    finally:
        os.close(fd)


def _check_version(root: Path) -> None:
    path = root / _FORMAT_FILE
    text = _read_text(path)
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
            _replace(path, f"blendrag-kv {FORMAT_VERSION}\n")
    except OSError as exc:
        raise store_error(exc, f"writing {path}", 4096) from exc
