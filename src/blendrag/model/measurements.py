"""What was measured of models and of this machine, kept in this user's cache directory.

It depends on the model as loaded, the libraries and the device, but on no store. The gate's verdicts
(:mod:`blendrag.fusor.verdicts`) are kept there, too.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import diskcache
import torch
import transformers
from diskcache.core import DBNAME, MODE_RAW
from pydantic import TypeAdapter, ValidationError

from blendrag.config import cache_folder, settings
from blendrag.errors import is_out_of_space
from blendrag.store.databases import database_uri, keep_private
from blendrag.wording import condensed

log = logging.getLogger(__name__)

T = TypeVar("T")
_warned: set[Path] = set()
"""Cache directories of which was said that they cannot be written."""
#: How a cache that is damaged, locked or cannot be written shows itself.
_UNUSABLE = (OSError, ValueError, TypeError, sqlite3.Error, diskcache.Timeout)


class _Json(diskcache.Disk):
    """Values are JSON in the database. ``diskcache.JSONDisk`` compresses them."""

    def store(self, value: Any, read: bool, key: Any = None) -> tuple[int, int, None, str]:
        text = json.dumps(value)
        return len(text), MODE_RAW, None, text


def recall(what: str, kind: type[T]) -> T | None:
    """What this machine has measured as ``what``, if it is of that ``kind``.

    Read without ``diskcache``, which writes its settings whenever it opens a cache: ten times the work.
    """
    path = cache_folder("verdicts") / DBNAME
    try:
        with closing(sqlite3.connect(database_uri(path, "rw"), uri=True, timeout=1)) as database:
            [value] = database.execute(
                "SELECT value FROM Cache WHERE key = ? AND raw = 1", (what,)
            ).fetchone()
        found: T = _reader(cast(Any, kind)).validate_python(json.loads(value))
        return found
    except (*_UNUSABLE, ValidationError):
        return None


@cache  # making one takes longer than reading
def _reader(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def remember(what: str, found: Any) -> None:
    """Keep a number, a dict or a dataclass for :func:`recall`. If that fails, it is measured again."""
    try:
        with _opened() as opened:
            opened.set(what, found if isinstance(found, int | dict) else asdict(found))
    except _UNUSABLE as exc:
        warn_unwritable(exc)


def warn_unwritable(error: Exception) -> None:
    """Say once that what is found out about models is not kept, because of this ``error``."""
    if isinstance(error, diskcache.Timeout):
        return  # another process writes
    folder = settings().cache.expanduser()
    if folder in _warned:
        return
    _warned.add(folder)
    why = "no space is left" if is_out_of_space(error) else condensed(str(error))
    log.warning(
        "%s cannot be written (%s), so each process checks and measures its models again; correct that, or "
        "name another directory in BLENDRAG_CACHE",
        *(folder, why),
    )


def key_of(what: str, namespace: str, device: torch.device) -> str:
    """Names ``what`` was measured of the model of ``namespace`` with these libraries on ``device``."""
    return f"{what}, {namespace}, {libraries()}, {device.type}"


def libraries() -> str:
    """The versions of what computes."""
    return f"torch {torch.__version__}, transformers {transformers.__version__}"


@contextmanager
def _opened() -> Iterator[diskcache.Cache]:
    path = cache_folder("verdicts")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    keep_private(path / DBNAME)
    with diskcache.Cache(str(path), timeout=1, disk=_Json) as opened:
        yield opened
