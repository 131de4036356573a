import builtins
import errno
import fcntl
import os
import pickle
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from diskcache import Timeout

from blendrag.errors import StoreError, StoreUnavailableError
from blendrag.store import DiskStore, index_check
from blendrag.store.files import new_name
from blendrag.store.index import Index
from blendrag.store.index_errors import IndexOdd, mapped
from blendrag.store.rows import Row, row_key

pytestmark = pytest.mark.alone


class Trap:
    """Unpickling this would set a flag."""

    def __reduce__(self):
        return (exec, ("import builtins; builtins._blendrag_trap = True",))


@pytest.fixture(autouse=True)
def nothing_ran():
    yield
    assert not hasattr(builtins, "_blendrag_trap")


def edit(root, *statements):
    """Change the index database behind the store's back."""
    connection = sqlite3.connect(root / "index" / "cache.db", isolation_level=None)
    for statement, *values in statements:
        connection.execute(statement, values)
    connection.close()


def filled(lab, make_store, numbers=(1, 2, 3)):
    store = make_store()
    for number in numbers:
        lab.put(store, number)
    return store


def assert_rebuilt(lab, store, numbers=(1, 2, 3)):
    assert all(lab.is_right(store, number) for number in numbers)
    stats = store.stats()
    assert (stats.entries, stats.size_bytes) == (len(numbers), len(numbers) * lab.entry_bytes)
    assert store.root.joinpath("quarantine", "cache.db").exists()


def test_the_database_we_make_passes_our_own_check(lab, make_store, root, caplog):
    filled(lab, make_store).close()
    assert lab.is_right(make_store(), 1)
    assert not (root / "quarantine" / "cache.db").exists()
    assert caplog.records == []


def test_a_missing_index_is_rebuilt_from_the_files(lab, make_store, root):
    filled(lab, make_store).close()
    for path in (root / "index").glob("cache.db*"):
        path.unlink()
    store = make_store()
    assert all(lab.is_right(store, number) for number in (1, 2, 3))
    assert store.stats().entries == 3


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1), (2, 3, 1)])
def test_after_a_rebuild_what_was_written_last_goes_last(lab, make_store, root, order):
    """Of use nothing is known any more; the chunk just acknowledged is not the first to go."""
    filled(lab, make_store).close()
    for age, number in enumerate(order):
        (path,) = root.glob(f"kv/*/*/{lab.key(number)}.*.kv")
        os.utime(path, ns=(age, age))
    for path in (root / "index").glob("cache.db*"):
        path.unlink()
    make_store(lab.entry_bytes).recover()
    assert [lab.has(make_store(), number) for number in order] == [False, False, True]


def test_a_file_that_is_back_although_it_was_evicted_goes_before_younger_ones(
    lab, make_store, root
):
    store = filled(lab, make_store)
    for age, number in enumerate((1, 2, 3)):
        (path,) = root.glob(f"kv/*/*/{lab.key(number)}.*.kv")
        os.utime(path, ns=(age, age))
    found = store._reading.find(lab.namespace, lab.key(1))
    store._index.drop([found])
    store.close()
    make_store(2 * lab.entry_bytes).recover()
    assert [lab.has(make_store(), number) for number in (1, 2, 3)] == [False, True, True]


@pytest.mark.parametrize(
    "garbage", [b"", b"not a database" * 500, b"SQLite format 3\0" + b"x" * 9000]
)
def test_a_corrupt_index_is_rebuilt_from_the_files(lab, make_store, root, garbage):
    filled(lab, make_store).close()
    (root / "index" / "cache.db").write_bytes(garbage)
    assert_rebuilt(lab, make_store())


def test_an_index_corrupted_while_open_never_stops_a_query(lab, make_store, root):
    store = filled(lab, make_store)
    for path in (root / "index").glob("cache.db*"):
        path.write_bytes(os.urandom(path.stat().st_size))
    assert lab.is_right(store, 1)
    lab.put(store, 4)
    again = make_store()
    assert all(lab.is_right(again, number) for number in (1, 2, 3, 4))


def test_an_index_deleted_while_open_is_rebuilt_by_the_next_put(lab, make_store, root):
    store = filled(lab, make_store)
    for path in (root / "index").glob("cache.db*"):
        path.unlink()
    assert lab.is_right(store, 1)
    lab.put(store, 4)
    assert store.stats().entries == 4


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TRIGGER evil AFTER INSERT ON Cache BEGIN DELETE FROM Cache; END",
        "CREATE TABLE more (x)",
        "CREATE VIEW peek AS SELECT * FROM Cache",
        "DROP TRIGGER Settings_size_insert",
        "INSERT INTO Settings VALUES ('sqlite_temp_store_directory', '''/tmp''')",
        "INSERT INTO Settings VALUES ('_disk', 'x')",
        "UPDATE Settings SET value = 'least-recently-used' WHERE key = 'eviction_policy'",
        "UPDATE Settings SET value = 10 WHERE key = 'cull_limit'",
        "UPDATE Settings SET value = 'many' WHERE key = 'count'",
        "UPDATE Settings SET value = -5 WHERE key = 'size'",
        "DELETE FROM Settings WHERE key = 'sqlite_mmap_size'",
        "INSERT INTO Settings VALUES (CAST(x'ff' AS TEXT), 1)",
        "INSERT INTO Settings VALUES ('more', 1), (x'6d6f7265', 1)",
        "INSERT INTO Settings VALUES ('more', NULL)",
        "INSERT INTO Settings VALUES (x'6d6f7265', NULL)",
        "DROP TABLE Cache",
    ],
)
def test_odd_settings_and_schema_are_set_aside_before_diskcache_sees_them(
    lab, make_store, root, statement
):
    filled(lab, make_store).close()
    edit(root, (statement,))
    assert_rebuilt(lab, make_store())


@pytest.mark.parametrize("code", ["IOERR_READ", "CANTOPEN", "READONLY", "FULL", "BUSY", "LOCKED"])
def test_a_disk_that_fails_for_a_moment_costs_no_index(lab, make_store, root, monkeypatch, code):
    filled(lab, make_store).close()
    access = os.access

    def no_database_to_write(path, mode):
        return access(path, mode) and not (code == "READONLY" and str(path).endswith("cache.db"))

    def fail(connection):
        error = sqlite3.OperationalError("the disk fails")
        error.sqlite_errorcode = getattr(sqlite3, f"SQLITE_{code}")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, "access", no_database_to_write)
        patch.setattr(index_check, "_schema_fault", fail)
        store = make_store()
        assert all(lab.is_right(store, number) for number in (1, 2, 3))
        with pytest.raises(StoreError):
            lab.put(store, 4)
    assert not (root / "quarantine" / "cache.db").exists()
    assert lab.is_right(store, 1)
    lab.put(store, 4)
    assert store.stats().entries == 4


@pytest.mark.parametrize("where", ["value", "file", "key"])
def test_a_pickle_in_the_index_is_refused_and_never_loaded(lab, make_store, root, where):
    filled(lab, make_store).close()
    row = row_key(lab.namespace, lab.key(1))
    trap = pickle.dumps(Trap())
    if where == "value":
        edit(root, ("UPDATE Cache SET mode = 4, value = ? WHERE key = ?", trap, row))
    elif where == "file":
        (root / "index" / "trap.val").write_bytes(trap)
        edit(
            root,
            (
                "UPDATE Cache SET mode = 4, value = NULL, filename = 'trap.val' WHERE key = ?",
                row,
            ),
        )
    else:
        edit(root, ("UPDATE Cache SET raw = 0, key = ? WHERE key = ?", trap, row))
    store = make_store()
    if where != "key":
        with pytest.raises(IndexOdd):
            store._index.get(lab.namespace, lab.key(1))
    with pytest.raises(IndexOdd):
        list(store._index.oldest())
    lab.open(store, 1)
    store.recover()
    assert_rebuilt(lab, store)


@pytest.mark.parametrize("mode", [1, 2, 3])
def test_a_path_in_the_index_is_neither_read_nor_deleted(lab, make_store, root, tmp_path, mode):
    outside = tmp_path / "precious"
    outside.write_text("precious")
    filled(lab, make_store).close()
    row = row_key(lab.namespace, lab.key(1))
    edit(
        root,
        (
            "UPDATE Cache SET mode = ?, filename = ?, value = ? WHERE key = ?",
            mode,
            str(outside),
            "../../../precious",
            row,
        ),
    )
    store = make_store()
    lab.open(store, 1)
    store.delete(lab.namespace, lab.key(1))
    lab.put(store, 1)
    store.recover()
    assert outside.read_text() == "precious"
    assert all(lab.is_right(store, number) for number in (1, 2, 3))


@pytest.mark.parametrize("change", ["mode = 2", "mode = 4", "filename = 'x'"])
def test_a_row_of_our_form_in_another_mode_is_refused(lab, make_store, root, change):
    filled(lab, make_store).close()
    edit(root, (f"UPDATE Cache SET {change}",))
    store = make_store()
    with pytest.raises(IndexOdd):
        store._index.get(lab.namespace, lab.key(1))
    assert lab.is_right(store, 1)
    lab.put(store, 4)
    assert_rebuilt(lab, store, (1, 2, 3, 4))


@pytest.mark.parametrize(
    "value", ["../../../etc/passwd", 7, None, b"\x80\x04.", f"{'a' * 64}/{'b' * 64}.{'c' * 16}:1"]
)
def test_a_row_that_we_did_not_write_is_a_rebuild(lab, make_store, root, value):
    filled(lab, make_store).close()
    edit(
        root,
        ("UPDATE Cache SET value = ? WHERE key = ?", value, row_key(lab.namespace, lab.key(1))),
    )
    store = make_store()
    assert lab.is_right(store, 1)  # found by listing
    store.recover()
    assert_rebuilt(lab, store)


def test_a_linked_database_is_refused(lab, make_store, root, tmp_path):
    filled(lab, make_store).close()
    (root / "index" / "cache.db").rename(tmp_path / "elsewhere.db")
    (root / "index" / "cache.db").symlink_to(tmp_path / "elsewhere.db")
    before = (tmp_path / "elsewhere.db").read_bytes()
    store = make_store()
    assert all(lab.is_right(store, number) for number in (1, 2, 3))
    lab.put(store, 4)
    assert (tmp_path / "elsewhere.db").read_bytes() == before


def test_an_index_set_aside_by_one_store_is_picked_up_by_the_other(lab, make_store, root):
    first = filled(lab, make_store)
    second = make_store()
    assert lab.is_right(second, 1)
    with second._index.exclusive():
        second._index.set_aside()
    second.recover()
    lab.put(second, 4)
    assert lab.is_right(first, 4)
    lab.put(first, 5)
    assert lab.is_right(second, 5)
    assert first.stats().entries == second.stats().entries == 5


def test_a_held_lock_delays_a_put_and_never_a_query(lab, make_store, root):
    store = filled(lab, make_store)
    store._index._lock.timeout_s = 0.3
    with open(root / "index" / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        start = time.monotonic()
        assert lab.is_right(store, 1)
        assert lab.open(store, 9) is None
        assert time.monotonic() - start < 0.3
        with pytest.raises(StoreUnavailableError, match="another process"):
            lab.put(store, 9)
        assert time.monotonic() - start < 3
    lab.put(store, 9)
    assert lab.is_right(store, 9)


def test_a_query_does_not_wait_to_follow_an_index_that_was_replaced(lab, make_store, root):
    first, second = filled(lab, make_store), make_store()
    with second._index.exclusive():
        second._index.set_aside()
    second.recover()
    with open(root / "index" / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        start = time.monotonic()
        assert all(lab.is_right(first, number) for number in (1, 2, 3))
        assert lab.open(first, 9) is None
        assert time.monotonic() - start < 2
    assert lab.is_right(first, 1)
    assert first._index.totals() == (3, 3 * lab.entry_bytes)


def test_a_lock_that_cannot_be_opened_is_not_called_held(lab, make_store, root):
    filled(lab, make_store).close()
    (root / "index" / "lock").unlink()
    (root / "index" / "lock").mkdir()
    store = make_store()
    assert lab.is_right(store, 1)
    with pytest.raises(StoreUnavailableError, match=r"Is a directory.*; check") as caught:
        lab.put(store, 9)
    assert "held" not in str(caught.value)


def test_closing_one_store_leaves_the_locks_of_another_in_the_same_process(
    lab, make_store, root, fork
):
    first, second = make_store(), make_store()
    lab.put(first, 1)
    lab.put(second, 2)
    first.close()
    assert list((root / "tmp").iterdir()) != []  # the second is still writing

    def lock_the_database():
        shared_bytes = (510, 0x4000_0002)  # where SQLite says that somebody has the file open
        with open(root / "index" / "cache.db", "r+b") as database:
            try:
                fcntl.lockf(database, fcntl.LOCK_EX | fcntl.LOCK_NB, *shared_bytes)
            except BlockingIOError:
                os._exit(42)

    assert os.waitstatus_to_exitcode(os.waitpid(fork(lock_the_database), 0)[1]) == 42


def test_a_closed_store_has_its_rows_in_the_database_itself(lab, make_store, root, tmp_path):
    reader = make_store()  # or else SQLite would write them back as the last one closes
    assert lab.open(reader, 1) is None
    filled(lab, make_store).close()
    (tmp_path / "copy.db").write_bytes((root / "index" / "cache.db").read_bytes())
    copy = sqlite3.connect(tmp_path / "copy.db")
    assert copy.execute("SELECT COUNT(*) FROM Cache").fetchone() == (3,)
    copy.close()


def test_a_locked_database_is_survived_within_a_bounded_wait(lab, make_store, root):
    filled(lab, make_store).close()
    blocker = sqlite3.connect(root / "index" / "cache.db", isolation_level=None)
    blocker.execute("PRAGMA locking_mode = EXCLUSIVE")
    blocker.execute("BEGIN EXCLUSIVE")
    start = time.monotonic()
    store = make_store()
    assert lab.is_right(store, 1)
    with pytest.raises(StoreUnavailableError):
        lab.put(store, 9)
    assert time.monotonic() - start < 5
    blocker.close()
    lab.put(store, 9)
    assert store.stats().entries == 4


def test_rows_move_to_the_end_when_used(lab, root):
    (root / "index").mkdir(parents=True)
    (root / "quarantine").mkdir()
    index = Index(root / "index")
    with index.exclusive():
        assert not index.open()
        index.create()
    rows = [Row(new_name(lab.namespace, lab.key(number)), 10) for number in range(4)]
    for row in rows:
        index.add(row)
    index.touch([(lab.namespace, lab.key(1)), (lab.namespace, lab.key(0))])
    assert list(index.oldest()) == [rows[2], rows[3], rows[1], rows[0]]
    assert index.totals() == (4, 40)
    index.drop([rows[2].name, new_name(lab.namespace, lab.key(3))])
    assert index.totals() == (3, 30)
    index.close()


def test_a_failed_transaction_leaves_nothing_half_done(lab, make_store):
    store = filled(lab, make_store)
    row = store._index.get(lab.namespace, lab.key(1))

    def drop_and_fail():
        with store._index.transaction():
            store._index.drop([row.name])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        drop_and_fail()
    assert store._index.get(lab.namespace, lab.key(1)) == row
    assert store.stats().entries == 3
    lab.put(store, 4)
    assert lab.is_right(store, 4)


def hot_journal(root):
    """What SQLite leaves when it is cut short in a transaction before the database is in WAL mode."""
    scratch = root.parent / "scratch.db"
    connection = sqlite3.connect(scratch, isolation_level=None)
    connection.execute("CREATE TABLE t AS SELECT 1 AS x")
    connection.execute("PRAGMA cache_size = 1")
    connection.execute("BEGIN")
    connection.execute("INSERT INTO t VALUES (hex(randomblob(90000)))")
    journal = scratch.with_name("scratch.db-journal").read_bytes()
    assert journal.startswith(bytes.fromhex("d9d505f920a163d7"))  # or nobody would roll it back
    return journal


@pytest.mark.parametrize("kind", ["hot", "empty", "garbage", "fifo", "directory"])
def test_a_journal_left_by_a_crash_neither_blocks_nor_stops_the_store(lab, make_store, root, kind):
    filled(lab, make_store).close()
    journal = root / "index" / "cache.db-journal"
    if kind == "fifo":
        os.mkfifo(journal)
    elif kind == "directory":
        journal.mkdir()
    else:
        journal.write_bytes({"hot": hot_journal(root), "empty": b""}.get(kind, b"x" * 999))
    store = make_store()
    assert all(lab.is_right(store, number) for number in (1, 2, 3))
    lab.put(store, 4)
    assert_rebuilt(lab, store, (1, 2, 3, 4))


@pytest.mark.parametrize("name", ["cache.db", "cache.db-wal", "cache.db-shm"])
def test_a_directory_in_place_of_the_database_is_moved_away(lab, make_store, root, name):
    filled(lab, make_store).close()
    for _ in range(2):  # the second time, the quarantine has one already
        (root / "index" / name).unlink(missing_ok=True)
        (root / "index" / name).mkdir()
        (root / "index" / name / "mine").touch()
        store = make_store()
        lab.put(store, 4)
        assert all(lab.is_right(store, number) for number in (1, 2, 3, 4))
        store.close()
    assert len(list((root / "quarantine").rglob("mine"))) == 2


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE Settings SET value = 'many' WHERE key = 'count'",
        "UPDATE Settings SET value = NULL WHERE key = 'size'",
        "UPDATE Settings SET value = 9e999 WHERE key = 'size'",
        "UPDATE Settings SET value = -5 WHERE key = 'size'",
        "DELETE FROM Settings WHERE key = 'count'",
    ],
)
def test_totals_forged_while_the_store_is_open_are_noticed(lab, make_store, root, statement):
    store = filled(lab, make_store)
    edit(root, (statement,))
    assert store.stats().entries == 3  # counted without the index
    lab.put(store, 4)
    assert_rebuilt(lab, store, (1, 2, 3, 4))


def test_a_size_forged_beyond_the_limit_does_not_stop_puts(lab, make_store, root):
    filled(lab, make_store).close()
    edit(root, ("UPDATE Settings SET value = ? WHERE key = 'size'", 1 << 50))
    store = make_store()
    lab.put(store, 4)
    assert store.stats().evictions == 0
    assert_rebuilt(lab, store, (1, 2, 3, 4))


def test_a_recovery_notices_totals_that_are_not_those_of_the_rows(lab, make_store, root):
    store = filled(lab, make_store)
    edit(root, ("UPDATE Settings SET value = value - 1 WHERE key = 'size'",))
    store.recover()
    assert_rebuilt(lab, store)


def test_a_row_with_the_last_number_there_is_does_no_harm(lab, make_store, root):
    store = filled(lab, make_store)
    edit(root, ("UPDATE Cache SET rowid = ? WHERE rowid = 3", 2**63 - 1))
    with pytest.raises(IndexOdd, match="out of range"):
        list(store._index.oldest())
    store.recover()
    assert_rebuilt(lab, store)


def in_thread(action):
    """What ``action`` returns, run by a thread that has no connection yet."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(action).result()


@pytest.mark.parametrize("name", ["sqlite_journal_mode", b"sqlite_", 7])
def test_settings_planted_while_open_are_not_executed_by_the_next_thread(
    lab, make_store, root, name
):
    store = filled(lab, make_store)
    edit(root, ("INSERT OR REPLACE INTO Settings VALUES (?, 'delete')", name))
    assert in_thread(lambda: lab.is_right(store, 1))
    cache = store._index._cache
    assert in_thread(lambda: cache._sql("PRAGMA journal_mode").fetchone()) == ("wal",)
    assert in_thread(lambda: cache._sql("PRAGMA mmap_size").fetchone()) == (0,)


def test_a_thread_that_meets_a_locked_database_waits_for_a_bounded_time(lab, make_store, root):
    store = filled(lab, make_store)
    store._index.close()
    with store._index.exclusive():
        assert store._index.open()
    store._index._cache.close()  # nobody has it open but the blocker
    blocker = sqlite3.connect(root / "index" / "cache.db", isolation_level=None)
    blocker.execute("PRAGMA locking_mode = EXCLUSIVE")
    blocker.execute("BEGIN EXCLUSIVE")
    start = time.monotonic()
    assert in_thread(lambda: lab.is_right(store, 1))
    assert time.monotonic() - start < 10  # diskcache itself would wait for a minute
    blocker.close()


def test_a_store_whose_path_looks_like_a_variable_stays_where_it_is(lab, tmp_path, monkeypatch):
    monkeypatch.setenv("ELSEWHERE", "elsewhere")
    for name in ("$ELSEWHERE", "${ELSEWHERE}", "~"):
        store = DiskStore(tmp_path / name / "store", 1 << 30)
        lab.put(store, 1)
        store.close()
        assert (tmp_path / name / "store" / "index" / "cache.db").exists()
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("BUSY", "is held by another process"),
        ("FULL", "no space left"),
        ("IOERR_READ", "cannot be used"),
    ],
)
def test_a_transaction_that_cannot_begin_says_why(tmp_path, code, expected):
    def begin():
        error = sqlite3.OperationalError("the disk says no")
        error.sqlite_errorcode = getattr(sqlite3, f"SQLITE_{code}")
        try:
            raise error
        except sqlite3.OperationalError:
            raise Timeout from None  # as diskcache does

    with pytest.raises(StoreError, match=expected), mapped(tmp_path, 1.0):
        begin()


def test_a_mark_that_cannot_be_looked_for_is_not_taken_for_absent(
    lab, make_store, root, monkeypatch
):
    filled(lab, make_store).close()
    (root / "index" / "unfinished").touch()
    edit(root, ("DELETE FROM Cache",))  # as if the rebuild had just begun
    real = os.lstat

    def fail(path, *args, **kwargs):
        if str(path).endswith("unfinished"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", fail)
        store = make_store()
        assert all(lab.is_right(store, number) for number in (1, 2, 3))
    store.recover()
    assert store.stats().entries == 3


def test_a_damaged_name_that_is_no_text_is_a_rebuild(lab, make_store, root):
    filled(lab, make_store).close()
    database = root / "index" / "cache.db"
    data = database.read_bytes()
    assert b"tableCacheCache" in data
    database.write_bytes(data.replace(b"tableCacheCache", b"table\xb3acheCache"))
    assert_rebuilt(lab, make_store())


def test_a_name_damaged_while_the_store_is_open_is_a_rebuild(lab, make_store, root):
    store = filled(lab, make_store)
    connection = sqlite3.connect(root / "index" / "cache.db", isolation_level=None)
    connection.execute("PRAGMA writable_schema = ON")
    connection.execute("UPDATE sqlite_master SET name = CAST(x'b3ff' AS TEXT), sql = 'x'")
    connection.execute("PRAGMA schema_version = 99")
    connection.close()
    assert lab.is_right(store, 1)
    lab.put(store, 4)
    assert_rebuilt(lab, store, (1, 2, 3, 4))


def test_a_database_that_calls_itself_read_only_is_rebuilt(lab, make_store, root):
    filled(lab, make_store).close()
    with open(root / "index" / "cache.db", "r+b") as file:
        file.seek(18)  # the version of whom it lets write
        file.write(b"\x07")
    store = make_store()
    lab.put(store, 4)
    assert_rebuilt(lab, store, (1, 2, 3, 4))


@pytest.mark.parametrize("event", ["INSERT", "DELETE"])
def test_a_trigger_planted_while_open_is_not_executed(lab, make_store, root, event):
    store = filled(lab, make_store)
    edit(root, (f"CREATE TRIGGER evil AFTER {event} ON Cache BEGIN DELETE FROM Cache; END",))
    lab.put(store, 4)
    store.delete(lab.namespace, lab.key(1))
    assert_rebuilt(lab, store, (2, 3, 4))


def test_a_setting_that_is_gone_when_the_next_process_looks_is_a_rebuild(
    lab, make_store, root, monkeypatch
):
    filled(lab, make_store).close()
    edit(
        root,
        ("DELETE FROM Settings WHERE key = 'count'",),
        ("CREATE TRIGGER gone AFTER INSERT ON Settings BEGIN DELETE FROM Settings; END",),
    )
    monkeypatch.setattr(index_check, "_schema_fault", lambda connection: None)  # just before that
    monkeypatch.setattr(index_check, "_settings_fault", lambda connection: None)
    assert_rebuilt(lab, make_store())


def test_that_an_index_is_odd_is_said_once(lab, root, make_store, caplog):
    lab.put(make_store(), 1)
    (root / "index" / "cache.db").write_bytes(b"no database" * 500)
    make_store()
    assert [r.getMessage() for r in caplog.records if "is odd" in r.getMessage()] == [
        "index of the store is odd (file is not a database): rebuilt from the files"
    ]
