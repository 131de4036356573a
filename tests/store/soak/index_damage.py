"""Ways to damage or forge a store's index behind the store's back: its bytes and rows here, all by name."""

from __future__ import annotations

import os
import pickle

from kv_lab import Lab

from blendrag.store.rows import row_key
from soak.index_target import IndexDamage, IndexTarget, Trap
from soak.setting_damage import (
    change_schema,
    delete_settings,
    edit_settings,
    odd_settings,
    plant_files,
    replace_a_file,
)

_PAGE = 4096

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
        edit_settings,
        odd_settings,
        delete_settings,
        change_schema,
        replace_a_file,
        plant_files,
    )
}
#: After these a store may refuse to be opened or written: what is in the way is not its own.
REFUSABLE = ("index: replace_a_file", "index: plant_files")
#: These may be done while the store is open.
WHILE_OPEN = tuple(name for name in INDEX if name not in REFUSABLE)
