"""Ways to damage or forge the files of a store.

Not included: payload bytes forged together with matching checksums, which detect damage only.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import sqlite3
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from store.kv_lab import Lab

PAGE = 4096

#: Values that belong into no field of a header and no column of the index.
_HOSTILE: list[Any] = [
    2**63 - 1, 2**63, 2**31, -(2**63), -1, 0, 1, 1e308, None, True, "", "0", "9" * 5000, "x" * 100_000,
    "../../../outside", "F64", "\ud800", Lab.key(1), Lab.namespace, [], {}, [2, 2, 24, 8], [0, 2**63],
]  # fmt: skip


class Trap:
    """Unpickling this creates a file."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> Any:
        return (open, (self._path, "w"))


@dataclass(frozen=True)
class DamageTarget:
    """A store to damage, and what to do it with."""

    root: Path
    other: Path
    """The root of another, sound store with other chunks."""
    outside: Path
    """A file next to the store that must not be touched."""
    chance: Random


# -- bytes of any file -------------------------------------------------------------------------------


def _flip(data: bytes, chance: Random, end: int | None = None) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 1, 2, 8])):
        changed[chance.randrange(end or len(data))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _overwrite(data: bytes, chance: Random) -> bytes:
    size = chance.choice([1, 16, 64, PAGE])
    at = chance.randrange(max(1, len(data) - size))
    return data[:at] + chance.choice([bytes(size), chance.randbytes(size)]) + data[at + size :]


def _splice(data: bytes, chance: Random, inserted: int, removed: int) -> bytes:
    at = chance.randrange(len(data))
    return data[:at] + chance.randbytes(inserted) + data[at + removed :]


def _swap_pages(data: bytes, chance: Random) -> bytes:
    pages = [data[at : at + PAGE] for at in range(0, len(data), PAGE)]
    i, j = (chance.randrange(len(pages)) for _ in range(2))
    pages[i], pages[j] = pages[j], pages[i]
    return b"".join(pages)


_BYTES: dict[str, Callable[[bytes, Random], bytes]] = {
    "flip anywhere": _flip,
    "flip in the first page": lambda data, chance: _flip(data, chance, min(PAGE, len(data))),
    "flip in the first 8 bytes": lambda data, chance: _flip(data, chance, 8),
    "overwrite": _overwrite,
    "truncate": lambda data, chance: data[: chance.choice([0, 7, 8, PAGE, len(data) // 2, -1])],
    "extend": lambda data, chance: data + chance.randbytes(chance.choice([1, 8, PAGE, 3 * PAGE])),
    "extend with zeros": lambda data, chance: data + bytes(chance.choice([1, 8, 24, PAGE])),
    "insert": lambda data, chance: _splice(data, chance, chance.randint(1, 64), 0),
    "cut out": lambda data, chance: _splice(data, chance, 0, chance.randint(1, 64)),
    "swap pages": _swap_pages,
}


# -- payloads ----------------------------------------------------------------------------------------


def _with_header(data: bytes, header: bytes, chance: Random) -> bytes:
    """With this header, padded or not, its length right or not."""
    if chance.random() < 0.7 and len(header) < PAGE - 8:
        header = header.ljust(PAGE - 8)
    length = len(header) if chance.random() < 0.9 else chance.randrange(1 << 40)
    return struct.pack("<Q", length) + header + data[PAGE:]


def _edit_header(data: bytes, chance: Random) -> bytes:
    fields = place = json.loads(data[8:PAGE])
    name = chance.choice(list(place))
    while isinstance(place[name], dict) and chance.random() < 0.8:
        place = place[name]
        name = chance.choice(list(place))
    action = chance.randrange(3)
    if action == 1:
        del place[name]
    else:
        place[name if action == 0 else f"{name}x"] = chance.choice(_HOSTILE)
    return _with_header(data, json.dumps(fields, separators=(",", ":")).encode(), chance)


def _header_length(data: bytes, chance: Random) -> bytes:
    lengths = [0, 1, 7, PAGE - 9, PAGE - 7, 1 << 20, (1 << 20) + 1, 1 << 31, 1 << 63, (1 << 64) - 1]
    return struct.pack("<Q", chance.choice(lengths)) + data[8:]


def _duplicate_names(data: bytes, chance: Random) -> bytes:
    name = chance.choice([b"__metadata__", b"l0000", b"l0002"])
    return _with_header(data, data[8:PAGE].rstrip()[:-1] + b',"' + name + b'":{}}', chance)


def _odd_json(data: bytes, chance: Random) -> bytes:
    deep = chance.choice([b"[", b'{"a":']) * chance.choice([100, 1000, 100_000])
    odd = [deep, b"", b"null", b"[]", b'"', b"\xff\xfe" * 99, b"{", b"1e999", b"NaN"]
    return _with_header(data, chance.choice(odd), chance)


def _of_another(data: bytes, other: bytes, chance: Random) -> bytes:
    """Header, data, some layers or all of another payload."""
    begin = chance.randrange(PAGE, len(data), 512)
    end = min(begin + 512 * chance.randint(1, 8), len(data))
    return chance.choice(
        [other, other[:PAGE] + data[PAGE:], data[:PAGE] + other[PAGE:],
         data[:begin] + other[begin:end] + data[end:]]
    )  # fmt: skip


_HEADERS: dict[str, Callable[[bytes, Random], bytes]] = {
    "length of the header": _header_length,
    "edit the header": _edit_header,
    "duplicate names in the header": _duplicate_names,
    "odd JSON in the header": _odd_json,
}
PAYLOAD = [*_BYTES, *_HEADERS, "of another", "replace"]


def damage_payload(name: str, target: DamageTarget, path: Path) -> None:
    """``name`` is one of :data:`PAYLOAD`."""
    data, chance = path.read_bytes(), target.chance
    if name == "replace":
        _replace(path, target)
    elif name == "of another":
        others = Lab.payloads(target.other)
        path.write_bytes(_of_another(data, chance.choice(others).read_bytes(), chance))
    else:
        path.write_bytes({**_BYTES, **_HEADERS}[name](data, chance))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def restore(path: Path, data: bytes) -> None:
    """The file as it was, whatever is there now."""
    _remove(path)
    path.write_bytes(data)


def _replace(path: Path, target: DamageTarget) -> None:
    """Nothing, a link, a FIFO, a directory or other bytes in place of a file."""
    chance = target.chance
    data = path.read_bytes() if path.is_file() else b""
    _remove(path)
    kind = chance.randrange(7)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.mkdir()
        (path / "inside").write_bytes(b"mine")
    elif kind == 2:
        path.symlink_to(chance.choice([target.outside, path.parent, Path("nowhere")]))
    elif kind == 3:  # a link to the right bytes, which must not be followed
        elsewhere = target.outside.with_name("elsewhere")
        elsewhere.write_bytes(data)
        path.symlink_to(elsewhere)
    elif kind == 4:
        path.write_bytes(chance.randbytes(chance.choice([0, 1, 64, 5000])))


# -- index -------------------------------------------------------------------------------------------


def _database(root: Path) -> Path:
    (path,) = (root / "index").glob("*.db")
    return path


def _index_bytes(target: DamageTarget) -> None:
    """The database, or its WAL if there is one."""
    path = _database(target.root)
    wal = path.with_name(f"{path.name}-wal")
    if wal.exists() and wal.stat().st_size and target.chance.random() < 0.5:
        path = wal
    change = target.chance.choice(list(_BYTES.values()))
    path.write_bytes(change(path.read_bytes(), target.chance))


def _of_another_store(target: DamageTarget) -> None:
    shutil.copy(_database(target.other), target.root / "index")


def _edit_rows(target: DamageTarget) -> None:
    """Change, swap, add or delete rows of any table."""
    chance = target.chance
    hostile = [*_HOSTILE, b"", b"\xff" * 64, pickle.dumps(Trap(target.outside.with_name("trap")))]
    values = [value for value in hostile if not isinstance(value, list | dict)]
    with _connected(target) as database:
        tables = [
            name
            for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type='table'")
        ]
        table = chance.choice(tables)
        columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
        column = chance.choice([*columns, "rowid"])
        one = f"rowid = (SELECT rowid FROM {table} ORDER BY random() LIMIT 1)"
        where, value = chance.choice([one, "1"]), chance.choice(values)
        statement, *given = chance.choice(
            [
                (f"UPDATE OR REPLACE {table} SET {column} = ? WHERE {where}", value),
                (f"UPDATE OR REPLACE {table} SET {column} = {column} + 1 WHERE {where}",),
                (f"UPDATE OR REPLACE {table} SET {column} = "
                 f"(SELECT {column} FROM {table} ORDER BY random() LIMIT 1)",),
                (f"INSERT OR REPLACE INTO {table} VALUES ({', '.join('?' * len(columns))})",
                 *chance.choices(values, k=len(columns))),
                (f"DELETE FROM {table} WHERE {where}",),
            ]
        )  # fmt: skip
        database.execute(statement, given)


def _change_schema(target: DamageTarget) -> None:
    with _connected(target) as database:
        database.execute("PRAGMA writable_schema = ON")
        schema = database.execute(
            "SELECT type, name, tbl_name FROM sqlite_master WHERE sql NOT NULL"
        )
        kind, name, table = target.chance.choice(schema.fetchall())
        statements = [
            f"CREATE TRIGGER evil AFTER INSERT ON {table} BEGIN DELETE FROM {table}; END",
            "CREATE TABLE more (x)",
            f"CREATE VIEW peek AS SELECT * FROM {table}",
            f"DROP {kind} {name}",
            f"ALTER TABLE {table} ADD COLUMN more",
            f"ALTER TABLE {table} RENAME TO Other",
            f"UPDATE sqlite_master SET sql = 'x' WHERE name = '{name}'",
            "UPDATE sqlite_master SET rootpage = 2",
            f"UPDATE sqlite_master SET rootpage = 9999 WHERE name = '{name}'",
            f"DELETE FROM sqlite_master WHERE name = '{name}'",
            "PRAGMA user_version = 7",
            "PRAGMA journal_mode = DELETE",
        ]
        database.execute(target.chance.choice(statements))


@contextlib.contextmanager
def _connected(target: DamageTarget) -> Any:
    """Statements that SQLite refuses do no damage."""
    database = sqlite3.connect(_database(target.root), timeout=0.1, isolation_level=None)
    with (
        contextlib.closing(database),
        contextlib.suppress(sqlite3.Error, OverflowError, UnicodeError),
    ):
        yield database


def _replace_small_file(target: DamageTarget) -> None:
    """One of the files that a store opens by name."""
    database = _database(target.root).name
    names = [database, f"{database}-wal", f"{database}-journal", "lock", "unfinished"]
    paths = [*(f"index/{name}" for name in names), "format", "disk-bytes"]
    _replace(target.root / target.chance.choice(paths), target)


def _plant_file(target: DamageTarget) -> None:
    """Something unexpected under a name that the store would give."""
    owner, nonce, key = "a" * 16, "b" * 16, Lab.key(1)
    names = [
        f"tmp/{owner}.writer",
        f"tmp/{owner}.{nonce}.part",
        f"pinned/{Lab.namespace}.{key}",
        f"quarantine/{_database(target.root).name}",
        f"kv/{Lab.namespace}/{key[:2]}/{key}.{nonce}.kv",
        f"kv/{'c' * 64}/{key[:2]}/{key}.{nonce}.kv",
        f"kv/{Lab.namespace}/{key[:2]}/README",
    ]
    path = target.root / target.chance.choice(names)
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, target)


INDEX: dict[str, Callable[[DamageTarget], None]] = {
    "index: bytes": _index_bytes,
    "index: of another store": _of_another_store,
    "index: vanish": lambda target: _database(target.root).unlink(),
    "index: edit rows": _edit_rows,
    "index: change schema": _change_schema,
    "index: replace a small file": _replace_small_file,
    "index: plant a file": _plant_file,
}
#: After these a store may refuse to be opened or written, because the file in the way is not its own.
REFUSABLE = ("index: replace a small file", "index: plant a file")
#: These may happen while the store is open.
WHILE_OPEN = tuple(name for name in INDEX if name not in REFUSABLE)
