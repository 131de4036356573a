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
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from pydantic import TypeAdapter, ValidationError

from blendrag.config import cache_folder, settings
from blendrag.errors import is_out_of_space, sqlite_code
from blendrag.store.databases import keep_private
from blendrag.wording import condensed

log = logging.getLogger(__name__)

T = TypeVar("T")
_warned: set[Path] = set()
"""Cache directories of which was said that they cannot be written."""
#: How a database that is damaged, locked or cannot be written shows itself.
_UNUSABLE = (OSError, sqlite3.Error)
#: Columns have no type, so a value that is not text stays as it is and is ignored.
_SCHEMA = "CREATE TABLE IF NOT EXISTS measured (what PRIMARY KEY, found) WITHOUT ROWID"


def recall(what: str, kind: type[T]) -> T | None:
    """What this machine has measured as ``what``, if it is of that ``kind``."""
    try:
        with _database() as database:
            row = database.execute("SELECT found FROM measured WHERE what = ?", [what]).fetchone()
        return TypeAdapter(kind).validate_json(row[0]) if row else None
    except (*_UNUSABLE, ValidationError):
        return None


def remember(what: str, found: Any) -> None:
    """Keep a number, a dict or a dataclass for :func:`recall`. If that fails, it is measured again."""
    try:
        text = json.dumps(found if isinstance(found, int | dict) else asdict(found))
        with _database() as database:
            database.execute("REPLACE INTO measured VALUES (?, ?)", [what, text])
    except _UNUSABLE as exc:
        warn_unwritable(exc)


def warn_unwritable(error: Exception) -> None:
    """Say once that what is found out about models is not kept, because of this ``error``."""
    if isinstance(error, sqlite3.Error) and sqlite_code(error) == sqlite3.SQLITE_BUSY:
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


def libraries() -> str:
    """The versions of what computes."""
    return f"torch {torch.__version__}, transformers {transformers.__version__}"


@contextmanager
def _database() -> Iterator[sqlite3.Connection]:
    path = cache_folder("verdicts") / "measurements.db"
    path.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    keep_private(path)
    with closing(sqlite3.connect(path, timeout=1, isolation_level=None)) as database:
        database.execute(_SCHEMA)
        yield database
