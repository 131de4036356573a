"""Ways to damage or forge a store's index, and the small files beside it, behind the store's back."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab import Lab

from blendrag.store.rows import row_key

_PAGE = 4096


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


# -- bytes ----------------------------------------------------------------------------------------------


def _flip_bits(target: IndexTarget) -> None:
    path = target.database
    data = bytearray(path.read_bytes())
    for _ in range(target.chance.choice([1, 1, 4, 64])):
        data[target.chance.randrange(len(data))] ^= 1 << target.chance.randrange(8)
    path.write_bytes(data)


def _flip_in_first_page(target: IndexTarget) -> None:
    path = target.index / "cache.db"
    data = bytearray(path.read_bytes())
    data[target.chance.randrange(min(len(data), _PAGE))] ^= 1 << target.chance.randrange(8)
    path.write_bytes(data)


def _overwrite_bytes(target: IndexTarget) -> None:
    path = target.database
    data = bytearray(path.read_bytes())
    at, size = target.chance.randrange(len(data)), target.chance.choice([4, 100, _PAGE])
    data[at : at + size] = target.chance.choice([bytes(size), target.chance.randbytes(size)])
    path.write_bytes(data)


def _cut_short(target: IndexTarget) -> None:
    path = target.database
    os.truncate(path, target.chance.randrange(path.stat().st_size))


def _make_longer(target: IndexTarget) -> None:
    with open(target.database, "ab") as file:
        file.write(target.chance.randbytes(target.chance.choice([1, 24, _PAGE, 3 * _PAGE])))


def _swap_pages(target: IndexTarget) -> None:
    path = target.index / "cache.db"
    data = path.read_bytes()
    pages = [data[at : at + _PAGE] for at in range(0, len(data), _PAGE)]
    target.chance.shuffle(pages)
    path.write_bytes(b"".join(pages))


def _of_another_store(target: IndexTarget) -> None:
    name = target.chance.choice(["cache.db", "cache.db-wal"])
    source = target.other / "index" / name
    if source.exists():
        (target.index / name).write_bytes(source.read_bytes())


def _vanish(target: IndexTarget) -> None:
    target.database.unlink()


# -- rows -----------------------------------------------------------------------------------------------

_COLUMNS = [
    "key",
    "raw",
    "store_time",
    "expire_time",
    "access_time",
    "access_count",
    "tag",
    "size",
    "mode",
    "filename",
    "value",
    "rowid",
]
_ONE = "rowid = (SELECT rowid FROM Cache ORDER BY random() LIMIT 1)"


def _edit_rows(target: IndexTarget) -> None:
    column = target.chance.choice(_COLUMNS)
    where = target.chance.choice([_ONE, "1"])
    target.sql((f"UPDATE OR REPLACE Cache SET {column} = ? WHERE {where}", target.hostile()))


def _swap_rows(target: IndexTarget) -> None:
    target.sql(("UPDATE Cache SET value = (SELECT value FROM Cache ORDER BY random() LIMIT 1)",))


def _add_rows(target: IndexTarget) -> None:
    rowid = target.chance.choice([None, -7, 2**63 - 1, 10**6])
    key = target.chance.choice([row_key(Lab.namespace, Lab.key(1)), target.hostile()])
    mode, size = target.chance.randrange(6), target.chance.choice([0, 1, -1, 10**15, "x"])
    filename = target.chance.choice([None, None, str(target.outside), "../../../outside"])
    target.sql(
        (
            "INSERT OR REPLACE INTO Cache (rowid, key, raw, size, mode, filename, value)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            rowid,
            key,
            target.chance.choice([0, 1, 1, None]),
            size,
            mode,
            filename,
            target.hostile(),
        )
    )


def _delete_rows(target: IndexTarget) -> None:
    target.sql((f"DELETE FROM Cache WHERE {target.chance.choice([_ONE, '1'])}",))


def _plant_pickle(target: IndexTarget) -> None:
    trap = pickle.dumps(Trap(target.trap))
    if target.chance.random() < 0.5:
        target.sql((f"UPDATE Cache SET mode = 4, value = ? WHERE {_ONE}", trap))
    else:
        (target.index / "trap.val").write_bytes(trap)
        target.sql(
            (f"UPDATE Cache SET mode = 4, value = NULL, filename = 'trap.val' WHERE {_ONE}",)
        )


# -- settings and schema ------------------------------------------------------------------------------------

_SETTINGS = [
    "count",
    "size",
    "hits",
    "misses",
    "statistics",
    "eviction_policy",
    "cull_limit",
    "size_limit",
    "tag_index",
    "disk_pickle_protocol",
    "disk_min_file_size",
    "sqlite_journal_mode",
    "sqlite_mmap_size",
    "sqlite_synchronous",
    "sqlite_temp_store_directory",
    "sqlite_wal_checkpoint",
    "_disk",
    "_directory",
    "close",
]


def _edit_settings(target: IndexTarget) -> None:
    name = target.chance.choice(_SETTINGS)
    target.sql(("INSERT OR REPLACE INTO Settings VALUES (?, ?)", name, target.hostile()))


def _odd_settings(target: IndexTarget) -> None:
    name = target.chance.choice([b"sqlite_", b"\xff", "sqlite_; ATTACH 'x' AS y", 7, ""])
    target.sql(("INSERT OR REPLACE INTO Settings VALUES (?, ?)", name, target.hostile()))


def _delete_settings(target: IndexTarget) -> None:
    name = target.chance.choice(_SETTINGS)
    target.sql(("DELETE FROM Settings WHERE key = ?", name))


def _change_schema(target: IndexTarget) -> None:
    statement = target.chance.choice(
        [
            "CREATE TRIGGER evil AFTER INSERT ON Cache BEGIN DELETE FROM Cache; END",
            "CREATE TRIGGER evil AFTER UPDATE ON Settings BEGIN UPDATE Cache SET value = 'x'; END",
            "CREATE TABLE more (x)",
            "CREATE VIEW peek AS SELECT * FROM Cache",
            "DROP TRIGGER Settings_size_insert",
            "DROP TRIGGER Settings_count_delete",
            "DROP INDEX Cache_key_raw",
            "DROP TABLE Cache",
            "DROP TABLE Settings",
            "ALTER TABLE Cache ADD COLUMN more",
            "ALTER TABLE Cache RENAME TO Other",
            "UPDATE sqlite_master SET sql = 'x' WHERE name = 'Cache'",
            "UPDATE sqlite_master SET rootpage = 2",
            "UPDATE sqlite_master SET rootpage = 9999 WHERE name = 'Cache_key_raw'",
            "DELETE FROM sqlite_master WHERE name = 'Settings_count_insert'",
            "PRAGMA user_version = 7",
            "PRAGMA journal_mode = DELETE",
            "PRAGMA auto_vacuum = 0",
        ]
    )
    target.sql((statement,))


# -- files ------------------------------------------------------------------------------------------------

#: What a store opens by name.
_SMALL_FILES = [
    "index/cache.db",
    "index/cache.db-wal",
    "index/cache.db-journal",
    "index/lock",
    "index/unfinished",
    "format",
    "disk-bytes",
]


def _replace_a_file(target: IndexTarget) -> None:
    path = target.root / target.chance.choice(_SMALL_FILES)
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    kind = target.chance.randrange(5)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.mkdir()
    elif kind == 2:
        path.symlink_to(target.chance.choice([target.outside, "nowhere"]))
    elif kind == 3:
        path.write_bytes(target.chance.randbytes(target.chance.choice([0, 1, 64, 5000])))


def _plant_files(target: IndexTarget) -> None:
    owner, nonce = "a" * 16, "b" * 16
    name = target.chance.choice(
        [
            f"tmp/{owner}.writer",
            f"tmp/{owner}.{nonce}.part",
            f"pinned/{Lab.namespace}.{Lab.key(1)}",
            "quarantine/cache.db",
            "quarantine/cache.db-wal",
            f"kv/{Lab.namespace}/{Lab.key(1)[:2]}/{Lab.key(1)}.{nonce}.kv",
            f"kv/{'c' * 64}/{Lab.key(1)[:2]}/{Lab.key(1)}.{nonce}.kv",
            f"kv/{Lab.namespace}/{Lab.key(1)[:2]}/README",
        ]
    )
    path = target.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        target.chance.choice(
            [
                path.touch,
                path.mkdir,
                lambda: os.mkfifo(path),
                lambda: path.symlink_to(target.outside),
                lambda: path.symlink_to("nowhere"),
                lambda: path.write_bytes(b"x" * 5000),
            ]
        )()


INDEX: dict[str, IndexDamage] = {
    f"index: {function.__name__.strip('_')}": function
    for function in (
        _flip_bits,
        _flip_bits,
        _flip_in_first_page,
        _overwrite_bytes,
        _cut_short,
        _make_longer,
        _swap_pages,
        _of_another_store,
        _vanish,
        _edit_rows,
        _swap_rows,
        _add_rows,
        _delete_rows,
        _plant_pickle,
        _edit_settings,
        _odd_settings,
        _delete_settings,
        _change_schema,
        _replace_a_file,
        _plant_files,
    )
}
#: After these a store may refuse to be opened or written: what is in the way is not its own.
REFUSABLE = ("index: replace_a_file", "index: plant_files")
#: These may be done while the store is open.
WHILE_OPEN = tuple(name for name in INDEX if name not in REFUSABLE)
