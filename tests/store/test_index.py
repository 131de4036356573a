"""The index: rebuilt from the files whenever anything about it is odd, and never waited for long."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading

import pytest
from kv_lab import Lab

from blendrag.errors import StoreError, StoreUnavailableError
from blendrag.store import index
from blendrag.store.databases import database_uri
from blendrag.store.disk import DiskStore
from blendrag.store.index import DATABASE_FILES, Index, IndexCorrupt, IndexLocked
from blendrag.store.payload_files import new_name

NUMBERS = (1, 2, 3)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(index, "LOCK_WAIT_S", 0.1)
    monkeypatch.setattr(index, "BUSY_WAIT_S", 0.05)


@pytest.fixture
def empty_index(tmp_path):
    for name in ("index", "quarantine"):
        (tmp_path / name).mkdir()
    made = Index(tmp_path / "index")
    with made.exclusive():
        made.rebuild(lambda: None)
    yield made
    made.close()


def database(root):
    return root / "index" / "index.db"


def edit(root, *statements):
    """Change the index without the store."""
    connection = sqlite3.connect(database(root), isolation_level=None)
    for statement in statements:
        connection.execute(statement)
    connection.close()


def assert_rebuilt(lab, store, numbers=NUMBERS, set_aside=True):
    assert lab.right(store) == list(numbers)
    stats = store.stats()
    assert (stats.entries, stats.size_bytes) == (len(numbers), len(numbers) * lab.entry_bytes)
    assert store.root.joinpath("quarantine", "index.db").exists() == set_aside


# -- rows --------------------------------------------------------------------------------------------


@pytest.fixture
def names(lab, empty_index):
    """Five rows of 10 bytes."""
    made = [new_name(lab.namespace, lab.key(number)) for number in range(5)]
    for name in made:
        empty_index.add(name, 10)
    return made


def test_rows_are_ordered_by_use_and_counted(lab, empty_index, names):
    empty_index.touch([names[1].entry, names[0].entry])
    assert list(empty_index.oldest()) == [(names[i], 10) for i in (2, 3, 4, 1, 0)]
    assert empty_index.totals() == (5, 50)
    again = new_name(*names[3].entry)
    empty_index.drop([names[2], again])
    assert empty_index.totals() == (4, 40)
    empty_index.add(again, 7)
    assert empty_index.get(*again.entry) == again
    assert empty_index.totals() == (4, 37)


def test_listing_rows_skips_those_used_meanwhile(empty_index, names, monkeypatch):
    monkeypatch.setattr(index, "_PAGE_ROWS", 2)
    listed = empty_index.oldest()
    assert [next(listed)[0], next(listed)[0]] == names[:2]
    empty_index.touch([names[0].entry, names[3].entry])
    assert [name for name, _ in listed] == [names[2], names[4]]


def test_a_failed_transaction_changes_nothing(empty_index, names):
    def drop_and_fail():
        with empty_index.transaction():
            empty_index.drop([names[1]])
            assert empty_index.get(*names[1].entry) is None
            raise RuntimeError

    with pytest.raises(RuntimeError):
        drop_and_fail()
    assert empty_index.knows(names[1])
    assert empty_index.totals() == (5, 50)


def test_a_closed_store_has_its_rows_in_the_database_itself(lab, make_store, filled, tmp_path):
    reader = make_store()  # keeps SQLite from writing them back when the last store closes
    assert lab.open(reader, 9) is None
    filled.close()
    (tmp_path / "copy.db").write_bytes(database(filled.root).read_bytes())
    copy = sqlite3.connect(tmp_path / "copy.db")
    assert copy.execute("SELECT COUNT(*) FROM payload").fetchone() == (3,)
    copy.close()


@pytest.mark.parametrize(("root_mode", "mode"), [(0o755, 0o600), (0o770, 0o660)])
def test_the_database_is_its_owners_and_a_groups_that_may_write_to_the_store(
    lab, make_store, root, root_mode, mode
):
    root.mkdir()
    root.chmod(root_mode)
    store = make_store()
    lab.put(store, 1)
    names = ("index.db", "index.db-wal", "index.db-shm")
    assert {(root / "index" / name).stat().st_mode & 0o777 for name in names} == {mode}


def test_a_database_that_an_earlier_version_left_readable_is_tightened(make_store, filled):
    files = list((filled.root / "index").glob("index.db*"))
    assert len(files) == 3
    for path in files:
        path.chmod(0o644)
    make_store()
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


# -- damage ------------------------------------------------------------------------------------------


def write(data):
    return lambda root: database(root).write_bytes(data)


def sql(*statements):
    return lambda root: edit(root, *statements)


def mark_read_only(root):
    with open(database(root), "r+b") as file:
        file.seek(18)  # the file format's write version
        file.write(b"\x07")


def replace_with_directory(name):
    def replace(root):
        path = root / "index" / name
        path.unlink(missing_ok=True)
        path.mkdir()
        (path / "mine").touch()

    return replace


def replace_with_link(root):
    elsewhere = root.parent / "elsewhere.db"
    database(root).rename(elsewhere)
    database(root).symlink_to(elsewhere)


def plant_hot_journal(root):
    """One that SQLite leaves if it is interrupted before the database is in WAL mode."""
    scratch = root.parent / "scratch.db"
    connection = sqlite3.connect(scratch, isolation_level=None)
    connection.execute("CREATE TABLE t AS SELECT 1 AS x")
    connection.execute("PRAGMA cache_size = 1")
    connection.execute("BEGIN")
    connection.execute("INSERT INTO t VALUES (hex(randomblob(90000)))")
    data = scratch.with_name("scratch.db-journal").read_bytes()
    assert data.startswith(bytes.fromhex("d9d505f920a163d7"))  # it would be rolled back
    (root / "index" / "index.db-journal").write_bytes(data)


#: Damage that is done while the store is closed.
CLOSED = {
    "empty": write(b""),
    "garbage": write(b"not a database" * 500),
    "garbage after the magic": write(b"SQLite format 3\0" + b"x" * 9000),
    "marked as read-only": mark_read_only,
    "a link": replace_with_link,
    "a hot journal": plant_hot_journal,
    "a FIFO journal": lambda root: os.mkfifo(root / "index" / "index.db-journal"),
    **{f"a directory {n}": replace_with_directory(n) for n in DATABASE_FILES},
}
#: Damage that may also be done while the store is open.
FORGED = {
    "trigger": sql("CREATE TRIGGER evil AFTER INSERT ON payload BEGIN DELETE FROM payload; END"),
    "table": sql("CREATE TABLE more (x)"),
    "view": sql("CREATE VIEW peek AS SELECT * FROM payload"),
    "no trigger": sql("DROP TRIGGER payload_added"),
    "column": sql("ALTER TABLE payload ADD COLUMN more"),
    "no table": sql("DROP TABLE payload"),
    "a name that is no text": sql(
        "PRAGMA writable_schema = ON",
        "UPDATE sqlite_master SET name = CAST(x'b3ff' AS TEXT), sql = 'x'",
        "PRAGMA schema_version = 99",
    ),
    "the largest number": sql(
        f"UPDATE payload SET used = {2**63 - 1} WHERE used = (SELECT MAX(used) FROM payload)"
    ),
    **{
        f"totals: {change}": sql(f"UPDATE totals SET {change}")
        for change in ("entries = 'many'", "size_bytes = NULL", "size_bytes = 9e999",
                       "size_bytes = -5", f"size_bytes = {1 << 50}")
    },
    "no totals": sql("DELETE FROM totals"),
}  # fmt: skip


def overwrite_all(root):
    for name in DATABASE_FILES[:3]:
        (root / "index" / name).write_bytes(b"garbage" * 999)


#: Damage that is done only while the store is open.
LOST = {"gone": Lab.drop_index, "overwritten": overwrite_all}


@pytest.mark.parametrize("damage", [*CLOSED, *FORGED])
def test_an_index_damaged_while_closed_is_rebuilt(lab, make_store, filled, damage):
    filled.close()
    {**CLOSED, **FORGED}[damage](filled.root)
    elsewhere = filled.root.parent / "elsewhere.db"
    before = elsewhere.exists() and elsewhere.read_bytes()
    store = make_store(limit_bytes=4 * lab.entry_bytes)
    lab.put(store, 4)
    assert store.stats().evictions == 0
    assert_rebuilt(lab, store, (1, 2, 3, 4))
    assert before == (elsewhere.exists() and elsewhere.read_bytes())


@pytest.mark.parametrize("damage", [*FORGED, *LOST])
def test_an_index_damaged_while_open_is_rebuilt_by_the_next_put(lab, filled, damage):
    {**FORGED, **LOST}[damage](filled.root)
    assert lab.right(filled) == [1, 2, 3]
    lab.put(filled, 4)
    filled.delete(lab.namespace, lab.key(1))
    assert_rebuilt(lab, filled, (2, 3, 4), set_aside=damage != "gone")


@pytest.mark.parametrize("change", [lambda root: None, Lab.drop_index, CLOSED["garbage"]])
def test_a_damaged_index_is_one_warning_a_missing_one_is_none(
    lab, make_store, filled, caplog, change
):
    filled.close()
    change(filled.root)
    store = make_store()
    assert lab.right(store) == [1, 2, 3]
    assert store.stats().entries == 3
    is_damaged = change is CLOSED["garbage"]
    warning = "the store's index is damaged (file is not a database): rebuilt from the files"
    assert [record.getMessage() for record in caplog.records] == [warning] * is_damaged
    assert (filled.root / "quarantine" / "index.db").exists() == is_damaged


def test_a_recovery_notices_totals_that_do_not_fit_the_rows(lab, filled):
    edit(filled.root, "UPDATE totals SET size_bytes = size_bytes - 1")
    filled.recover()
    assert_rebuilt(lab, filled)


@pytest.mark.parametrize("column", ["namespace", "key", "nonce", "size_bytes"])
def test_a_row_that_the_store_did_not_write_is_a_rebuild(lab, make_store, filled, column):
    filled.close()
    for value in ("'../../../etc/passwd'", "-7", "NULL", "x'80042e'", "1e300"):
        edit(filled.root, f"UPDATE payload SET {column} = {value} WHERE key = '{lab.key(1)}'")
        store = make_store()
        assert lab.open(store, 1) is None or lab.is_right(store, 1)
        with pytest.raises(IndexCorrupt):
            list(store._index.oldest())
        store.recover()
        assert_rebuilt(lab, store)
        store.close()


def test_a_path_in_the_index_is_neither_read_nor_deleted(lab, make_store, filled, tmp_path):
    outside = tmp_path / f"{lab.key(1)}.precious.kv"
    outside.write_text("precious")
    filled.close()
    edit(filled.root, "UPDATE payload SET nonce = 'precious', namespace = '../..'")
    store = make_store()
    lab.open(store, 1)
    store.delete(lab.namespace, lab.key(1))
    lab.put(store, 1)
    store.recover()
    assert outside.read_text() == "precious"
    assert lab.right(store) == [1, 2, 3]


def test_a_store_path_with_special_characters_is_taken_literally(lab, tmp_path, monkeypatch):
    monkeypatch.setenv("ELSEWHERE", "elsewhere")
    for name in ("$ELSEWHERE", "~", "a?mode=memory#x%20"):
        assert database(lab.fill(tmp_path / name / "store", [1])).exists()


# -- replaced or gone while the store is open --------------------------------------------------------


def test_an_index_replaced_by_one_store_is_picked_up_by_the_other(lab, make_store, filled):
    second = make_store()
    assert lab.is_right(second, 1)
    lab.drop_index(filled.root)
    second.recover()
    lab.put(second, 4)
    assert lab.is_right(filled, 4)
    lab.put(filled, 5)
    assert lab.is_right(second, 5)
    assert filled.stats().entries == second.stats().entries == 5


def test_a_query_does_not_wait_to_follow_a_replaced_index(lab, make_store, filled, held):
    lab.drop_index(filled.root)
    make_store().recover()
    with held():
        assert lab.right(filled) == [1, 2, 3]
    assert lab.is_right(filled, 1)
    assert filled._index.totals() == (3, 3 * lab.entry_bytes)


def test_queries_in_several_threads_go_on_while_the_index_is_replaced(lab, make_store, filled):
    stop, wrong = threading.Event(), []

    def query():
        while not stop.is_set():
            wrong.extend(number for number in NUMBERS if not lab.is_right(filled, number))

    threads = [threading.Thread(target=query) for _ in range(2)]
    for thread in threads:
        thread.start()
    other = make_store()
    for _ in range(5):
        lab.drop_index(filled.root)
        other.recover()
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []


# -- in use by another process -----------------------------------------------------------------------


@pytest.mark.parametrize("what", ["held", "locked"])
def test_an_index_in_use_delays_a_put_but_not_a_query(lab, make_store, filled, request, what):
    filled.close()
    with request.getfixturevalue(what)():
        store = make_store()
        assert lab.is_right(store, 1)
        assert lab.open(store, 9) is None
        with pytest.raises(StoreUnavailableError, match="held by another process"):
            lab.put(store, 9)
    lab.put(store, 9)
    assert lab.right(store) == [1, 2, 3, 9]


def test_the_lock_is_not_shared_by_threads_and_never_waited_for_forever(empty_index):
    refused = []

    def hold():
        with pytest.raises(IndexLocked, match="another thread"), empty_index.exclusive():
            pass
        refused.append(True)

    with empty_index.exclusive():
        thread = threading.Thread(target=hold)
        thread.start()
        thread.join()
    assert refused


def test_closing_one_store_keeps_the_locks_of_another_in_the_same_process(
    lab, make_store, root, fork
):
    first, second = make_store(), make_store()
    lab.put(first, 1)
    lab.put(second, 2)
    first.close()
    assert list((root / "tmp").iterdir()) != []  # the second is still writing

    def lock_the_database():
        shared_bytes = (510, 0x4000_0002)  # locked by SQLite while the database is open
        with open(database(root), "r+b") as file, pytest.raises(BlockingIOError):
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, *shared_bytes)

    assert os.waitpid(fork(lock_the_database), 0)[1] == 0


# -- failing disks -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "message"),
    [
        *((code, "cannot be used") for code in ("IOERR_READ", "CANTOPEN", "READONLY")),
        *((code, "held by another process") for code in ("BUSY", "LOCKED")),
        ("FULL", "no space left"),
    ],
)
def test_a_disk_that_fails_for_a_moment_costs_no_index(
    lab, make_store, filled, monkeypatch, code, message
):
    filled.close()
    access = os.access

    def not_the_database(path, mode):
        return access(path, mode) and not (code == "READONLY" and str(path).endswith("index.db"))

    def fail(database):
        error = sqlite3.OperationalError("the disk fails")
        error.sqlite_errorcode = getattr(sqlite3, f"SQLITE_{code}")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, "access", not_the_database)
        patch.setattr(index, "_schema_version", fail)
        store = make_store()
        assert lab.right(store) == [1, 2, 3]
        with pytest.raises(StoreError, match=message):
            lab.put(store, 4)
    assert not (filled.root / "quarantine" / "index.db").exists()
    lab.put(store, 4)
    assert store.stats().entries == 4


def test_markers_of_a_crash_stay_until_the_rebuilt_index_is_on_disk(lab, root, filled, monkeypatch):
    filled.close()
    marker = root / "tmp" / f"{'0' * 16}.writer"
    marker.touch(0o600)
    with monkeypatch.context() as patch:
        patch.setattr(Index, "sync", lambda self: False)
        DiskStore(root, None).close()
    assert marker.exists()
    DiskStore(root, None).close()
    assert not marker.exists()


def test_a_log_that_another_process_has_just_removed_does_not_matter(root, monkeypatch):
    monkeypatch.setattr(os.path, "exists", lambda path: True)
    assert database_uri(root / "index.db", "rw").endswith("?mode=rw")
