"""What there is to damage a store's index with, behind the store's back. Knows no way of doing it."""

from __future__ import annotations

import contextlib
import pickle
import random
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kv_lab import Lab

from blendrag.store.rows import row_key


class Trap:
    """Whoever unpickles this has executed it: it leaves a file."""

    def __init__(self, where: Path) -> None:
        self._where = str(where)

    def __reduce__(self) -> Any:
        return (open, (self._where, "w"))


@dataclass(frozen=True)
class IndexTarget:
    """A store's directory, and what there is to damage its index with."""

    root: Path
    other: Path
    """The root of another store, sound, with other chunks."""
    outside: Path
    """A file beside the store that nobody may touch."""
    trap: Path
    """There as soon as anybody unpickles what was planted."""
    chance: random.Random

    @property
    def index(self) -> Path:
        return self.root / "index"

    @property
    def database(self) -> Path:
        """The database or its WAL, where there is one."""
        wal = self.index / "cache.db-wal"
        return wal if wal.exists() and self.chance.random() < 0.5 else self.index / "cache.db"

    def sql(self, *statements: tuple[str, *tuple[Any, ...]]) -> None:
        """Run these; one that SQLite refuses was no damage."""
        connection = sqlite3.connect(self.index / "cache.db", timeout=0.1, isolation_level=None)
        with contextlib.closing(connection), contextlib.suppress(sqlite3.Error, OverflowError):
            connection.execute("PRAGMA writable_schema = ON")
            for statement, *values in statements:
                connection.execute(statement, values)

    def hostile(self) -> Any:
        """A value that has no business in any column."""
        key = Lab.key(self.chance.randrange(6))
        return self.chance.choice(
            [
                None,
                -1,
                0,
                2**63 - 1,
                -(2**63),
                1e308,
                float("inf"),
                "",
                "x" * 100_000,
                b"",
                b"\xff" * 64,
                key,
                key.encode(),
                row_key(Lab.namespace, key),
                str(self.outside),
                "../../../outside",
                f"{Lab.namespace}/{key}.{'0' * 16}:{self.chance.randrange(10**15)}",
                f"../../../{self.outside.name}/{key}.{'0' * 16}:1",
                pickle.dumps(Trap(self.trap)),
            ]
        )


IndexDamage = Callable[[IndexTarget], object]
