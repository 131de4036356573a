"""Ways to damage or forge an index's settings and schema, and the small files beside it."""

from __future__ import annotations

import contextlib
import os
import shutil

from kv_lab import Lab

from soak.index_target import IndexTarget

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


def edit_settings(target: IndexTarget) -> None:
    name = target.chance.choice(_SETTINGS)
    target.sql(("INSERT OR REPLACE INTO Settings VALUES (?, ?)", name, target.hostile()))


def odd_settings(target: IndexTarget) -> None:
    name = target.chance.choice([b"sqlite_", b"\xff", "sqlite_; ATTACH 'x' AS y", 7, ""])
    target.sql(("INSERT OR REPLACE INTO Settings VALUES (?, ?)", name, target.hostile()))


def delete_settings(target: IndexTarget) -> None:
    name = target.chance.choice(_SETTINGS)
    target.sql(("DELETE FROM Settings WHERE key = ?", name))


def change_schema(target: IndexTarget) -> None:
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


def replace_a_file(target: IndexTarget) -> None:
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


def plant_files(target: IndexTarget) -> None:
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
