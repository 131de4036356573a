"""How large a store may be, and that it remembers what it was told.

Owns the limit's file. Does not know how a limit is kept.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from blendrag.errors import StoreUnavailableError
from blendrag.store.directories import sync_directory
from blendrag.store.small_files import read_text, replace

logger = logging.getLogger("blendrag.store")

_LIMIT_FILE = "disk-bytes"
_LIMIT_TEXT = re.compile(r"([0-9]{1,20})\n", re.ASCII)
#: No disk is larger; a limit beyond it is remembered as this.
_MAX_LIMIT_BYTES = (1 << 63) - 1
#: Limit of a disk tier for which nobody ever gave one.
DEFAULT_DISK_BYTES = 64 << 30


def settle_limit(root: Path, given: int | None, default: int, read_only: bool) -> int:
    """Byte limit of the store at ``root``: the one given, which is remembered, or the last one.

    A store thus keeps its size when somebody opens it later without saying how large it may be.
    """
    if read_only:  # puts nothing, so that no limit matters
        return default if given is None else given
    text = read_text(root / _LIMIT_FILE)
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
            f"give it to blendrag ingest by --disk-bytes, as the default might evict what is stored in {root}"
        )
    return int(match[1])


def _remember_limit(root: Path, limit_bytes: int) -> None:
    """Replace the limit file at once; a full disk is no reason not to open the store."""
    try:
        replace(root / _LIMIT_FILE, f"{limit_bytes}\n")
        sync_directory(root)
    except OSError as exc:
        logger.warning(
            "store %s cannot remember its limit (%s): give --disk-bytes again next time",
            root,
            exc.strerror or exc,
        )
