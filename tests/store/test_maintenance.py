"""Survey, check, repair, gc and clear: what they find, what they change and what they leave alone."""

import contextlib
import errno
import os
import shutil
import sqlite3

import pytest

from blendrag.errors import InvalidInputError, StoreUnavailableError
from blendrag.store import index as store_index
from blendrag.store import maintenance
from blendrag.store.disk import DiskStore
from blendrag.store.index import Index
from blendrag.store.kv import KVLayout
from blendrag.store.maintenance import space
from blendrag.store.payload_files import PayloadFiles
from store.test_payload import DAMAGE


@pytest.fixture
def filled(lab, root):
    """A closed store of five chunks; number 0 is pinned."""
    return lab.fill(root, pinned=(0,))


def add_other_namespace(lab, root):
    """One chunk of another model: another dtype, encoded, fewer tokens."""
    layout, namespace = KVLayout(lab.layout.layers, "bfloat16", "int8"), lab.key("other model")
    with contextlib.closing(DiskStore(root, None)) as store:
        store.put(namespace, lab.key(9), lab.kv(9, layout, 10))
    return namespace


def alter(index, statement, *values):
    with sqlite3.connect(index / "index.db") as connection:
        connection.execute(statement, values)


def snapshot(root):
    """Every file except SQLite's, which a reader may create."""
    return {
        path.relative_to(root): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
        if not path.name.startswith("index.db")
    }


def only_namespace(report):
    (namespace,) = report.namespaces
    return namespace


# -- survey ------------------------------------------------------------------------------------------


def test_survey_counts_by_namespace_and_changes_nothing(lab, filled):
    other = add_other_namespace(lab, filled)
    before = snapshot(filled)
    found = maintenance.survey(filled)
    assert snapshot(filled) == before
    by_name = {each.namespace: each for each in found.namespaces}
    first, second = by_name[lab.namespace], by_name[other]
    assert (first.chunks, first.tokens, first.pinned) == (5, 5 * lab.tokens, 1)
    assert (first.size_bytes, first.dtypes) == (5 * lab.entry_bytes, ("float32",))
    assert (second.chunks, second.tokens, second.dtypes) == (1, 10, ("bfloat16",))
    assert (first.encodings, second.encodings) == (("native",), ("int8",))
    assert (found.chunks, found.limit_bytes, found.limit_is_remembered) == (6, 1 << 30, True)
    assert found.size_bytes == sum(path.stat().st_size for path in lab.payloads(filled))


def test_survey_counts_chunks_of_several_lengths_and_unknown_headers(lab, filled):
    with contextlib.closing(DiskStore(filled, None)) as store:
        lab.put(store, 7, tokens=40)
    lab.file(filled, 1).write_bytes(b"no payload")
    link = lab.file(filled, 2)
    link.rename(filled.parent / "moved")
    link.symlink_to(filled.parent / "moved")  # not followed
    each = only_namespace(maintenance.survey(filled))
    assert (each.chunks, each.tokens, each.unknown) == (6, 3 * lab.tokens + 40, 2)


def test_survey_counts_quarantine_and_temporaries_and_reports_a_default_limit(lab, filled):
    (filled / "disk-bytes").unlink()
    (filled / "tmp" / f"{'a' * 16}.{'b' * 16}.part").write_bytes(bytes(100))
    (filled / "quarantine" / f"{lab.key(1)}.{'c' * 16}.kv").write_bytes(bytes(200))
    for size_bytes in (100, 0):
        found = maintenance.survey(filled)
        assert (found.temporary_bytes, found.quarantine_bytes) == (size_bytes, 2 * size_bytes)
        assert found.quarantine_files == bool(size_bytes)
        assert not found.limit_is_remembered
        for name in ("tmp", "quarantine"):
            shutil.rmtree(filled / name, ignore_errors=True)


# -- check -------------------------------------------------------------------------------------------


def test_check_reads_a_sound_store_and_changes_nothing(lab, filled):
    before, steps = snapshot(filled), []
    report = maintenance.check(filled, progress=lambda *step: steps.append(step))
    assert (report.is_good, report.index, report.index_fault) == (True, "sound", "")
    assert report.read_bytes == 5 * lab.entry_bytes
    assert steps == [(n * lab.entry_bytes, 5 * lab.entry_bytes) for n in range(1, 6)]
    each = only_namespace(report)
    assert (each.good, each.damaged, each.missing_rows, each.dead_rows) == (5, 0, 0, 0)
    assert snapshot(filled) == before


def test_every_damaged_payload_is_found(lab, root):
    damaged = range(len(DAMAGE) + 2)
    lab.fill(root, [*damaged, 99], pinned=(0,))
    paths = [lab.file(root, number) for number in damaged]
    for path, damage in zip(paths[2:], DAMAGE.values(), strict=True):
        damage(path)
        (root.parent / "elsewhere").unlink(missing_ok=True)
    swapped = paths[0].read_bytes()
    paths[0].write_bytes(paths[1].read_bytes())
    paths[1].write_bytes(swapped)
    report = maintenance.check(root)
    each = only_namespace(report)
    assert (each.good, each.damaged, report.is_good) == (1, len(damaged), False)
    assert len(report.faults) == len(damaged)


def test_a_payload_without_read_permission_is_unreadable_and_not_repaired(lab, filled, failing):
    with failing("open", lab.key(2), errno.EACCES):
        report = maintenance.check(filled, repair=True)
    each = only_namespace(report)
    assert (each.good, each.damaged, each.unreadable) == (4, 0, 1)
    assert not report.is_good
    assert lab.file(filled, 2).exists()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda index: (index / "index.db").unlink(), "there is none"),
        (lambda index: (index / "index.db").write_bytes(b"garbage" * 999), "not a database"),
        (lambda index: alter(index, "PRAGMA user_version = 0"), "not finished"),
        (lambda index: alter(index, "UPDATE payload SET nonce = '../../x'"), "not of the form"),
    ],
)
def test_a_damaged_index_is_reported_and_rebuilt_by_a_repair(lab, filled, damage, words):
    damage(filled / "index")
    report = maintenance.check(filled)
    assert (report.index, report.is_good) == ("damaged", True)
    assert words in report.index_fault
    assert only_namespace(report).missing_rows is None
    assert maintenance.check(filled, repair=True).is_good
    assert maintenance.check(filled).index == "sound"
    assert lab.intact(filled) == [0, 1, 2, 3, 4]


def test_a_locked_index_is_unavailable_after_a_bounded_wait(filled, monkeypatch, locked):
    monkeypatch.setattr(store_index, "BUSY_WAIT_S", 0.05)
    with locked():
        report = maintenance.check(filled)
    assert (report.index, report.is_good) == ("unavailable", True)
    assert "is held by another process" in report.index_fault
    assert only_namespace(report).dead_rows is None


def test_foreign_files_survive_every_command(lab, filled):
    shard = lab.file(filled, 2).parent
    elsewhere = filled.parent / "elsewhere"
    namespace = filled / "kv" / lab.namespace
    for directory in (namespace / "zz", namespace / "empty", elsewhere):
        directory.mkdir()
    (filled / "kv" / lab.key("linked")).symlink_to(elsewhere)
    mine = [
        filled / "kv" / "notes.txt",
        namespace / "README",
        namespace / "zz" / "inner.txt",
        shard / "mine.kv",
        shard / f"{lab.key(2)}.KV",
        filled / "tmp" / "download.part",
        filled / "pinned" / "pin",
        filled / "quarantine" / "sample.bin",
        elsewhere / "kept.txt",
    ]
    for path in mine:
        path.write_text("mine", encoding="utf-8")
    assert maintenance.check(filled).is_good
    maintenance.check(filled, repair=True)
    maintenance.collect(filled, 0)
    maintenance.clear(filled)
    assert set(lab.payloads(filled)) <= set(mine)
    assert [path.read_text(encoding="utf-8") for path in mine] == ["mine"] * len(mine)
    assert (filled / "kv" / lab.key("linked")).is_symlink()
    assert (namespace / "empty").is_dir()


def test_payloads_evicted_during_a_check_are_neither_good_nor_damaged(lab, filled):
    def evict(done, total):
        for path in lab.payloads(filled)[1:]:
            path.unlink()

    report = maintenance.check(filled, progress=evict)
    each = only_namespace(report)
    assert (each.good, each.damaged, each.dead_rows) == (1, 0, 4)


def test_differences_between_files_and_index_are_looked_at_twice(lab, filled, monkeypatch):
    seen = set()

    def at_second_look(real):
        def look(self, name):
            if (real, name) in seen:
                return real(self, name)
            seen.add((real, name))
            return False

        return look

    monkeypatch.setattr(Index, "knows", at_second_look(Index.knows))
    monkeypatch.setattr(PayloadFiles, "exists", at_second_look(PayloadFiles.exists))
    each = only_namespace(maintenance.check(filled))
    assert (each.missing_rows, each.dead_rows) == (0, 0)
    assert len(seen) == 10


# -- repair ------------------------------------------------------------------------------------------


def test_a_repair_quarantines_damage_drops_dead_rows_and_indexes_files(lab, filled):
    lab.flip(lab.file(filled, 3))
    lab.file(filled, 4).unlink()
    with contextlib.closing(DiskStore(filled, None)) as store:
        store._index.drop([store.find(lab.namespace, lab.key(2))])
    each = only_namespace(maintenance.check(filled))
    assert (each.good, each.damaged, each.missing_rows, each.dead_rows) == (3, 1, 1, 1)
    report = maintenance.check(filled, repair=True)
    assert (report.is_good, report.repaired) == (False, True)
    assert len(list((filled / "quarantine").glob("*.kv"))) == 1
    again = maintenance.check(filled)
    each = only_namespace(again)
    assert (again.is_good, each.good, each.missing_rows, each.dead_rows) == (True, 3, 0, 0)
    lab.fill(filled)
    assert lab.intact(filled) == [0, 1, 2, 3, 4]


def test_a_read_error_that_does_not_repeat_costs_no_chunk(lab, filled, failing):
    with failing("read", "kv", times=1):
        report = maintenance.check(filled, repair=True)
    assert only_namespace(report).damaged == 1
    assert "Input/output error" in report.faults[0]
    assert lab.intact(filled) == [0, 1, 2, 3, 4]


def test_a_repair_clears_what_a_crash_left_keeps_pins_and_evicts_nothing(lab, filled):
    (filled / "disk-bytes").write_text("10\n", encoding="ascii")
    (filled / "tmp" / f"{'a' * 16}.writer").touch()
    (filled / "tmp" / f"{'a' * 16}.{'b' * 16}.part").write_bytes(bytes(100))
    lab.flip(lab.file(filled, 0))
    maintenance.check(filled, repair=True)
    assert list((filled / "tmp").iterdir()) == []
    assert len(lab.payloads(filled)) == 4
    lab.fill(filled)
    maintenance.collect(filled, 0)
    assert lab.intact(filled) == [0]


# -- gc ----------------------------------------------------------------------------------------------


def test_gc_evicts_the_least_recently_used_down_to_a_size(lab, filled):
    assert lab.intact(filled, [1]) == [1]  # and now the most recently used
    steps, size = [], int(3.5 * lab.entry_bytes)
    done = maintenance.collect(filled, size, lambda *step: steps.append(step))
    assert (done.removed, done.left, done.left_bytes) == (2, 3, 3 * lab.entry_bytes)
    assert lab.intact(filled) == [0, 1, 4]
    assert steps[-1][0] == steps[-1][1]
    assert maintenance.check(filled).is_good
    assert maintenance.collect(filled, size).removed == 0
    done = maintenance.collect(filled, 0)
    assert (done.removed, done.left, done.pinned) == (2, 1, 1)
    assert done.left_bytes > done.limit_bytes


def test_gc_without_a_size_uses_the_limit_of_the_store_and_rebuilds_its_index(lab, filled):
    alter(filled / "index", "UPDATE payload SET nonce = '../../etc/passwd' WHERE used > 2")
    (filled / "disk-bytes").write_text(f"{2 * lab.entry_bytes}\n", encoding="ascii")
    assert maintenance.collect(filled).left == 2
    maintenance.collect(filled, lab.entry_bytes)
    assert maintenance.survey(filled).limit_bytes == 2 * lab.entry_bytes


def test_gc_and_clear_work_in_batches(lab, root, monkeypatch):
    monkeypatch.setattr(space, "BATCH", 4)
    lab.fill(root, range(15), pinned=(0,))
    done = maintenance.collect(root, 5 * lab.entry_bytes)
    assert (done.removed, done.left) == (10, 5)
    assert lab.intact(root, range(15)) == [0, 11, 12, 13, 14]
    assert maintenance.clear(root).removed == 5


def test_check_and_gc_of_an_open_store_only_cost_misses(lab, root, make_store):
    store = make_store()
    for number in range(5):
        lab.put(store, number)
    reader = lab.open(store, 0)
    assert maintenance.check(root, repair=True).is_good
    maintenance.collect(root, 2 * lab.entry_bytes)
    assert lab.right(store) == [3, 4]
    assert lab.gives(reader, lab.kv(0))
    assert store.stats().quarantined == 0
    lab.put(store, 0)
    assert lab.is_right(store, 0)


# -- clear -------------------------------------------------------------------------------------------


def test_clear_removes_all_kv_and_nothing_else(lab, filled):
    kept = [filled / "corpus" / "corpus.sqlite", filled / "verified" / "x.json", filled / "mine"]
    for path in kept:
        path.parent.mkdir(exist_ok=True)
        path.write_text("kept", encoding="utf-8")
    lab.flip(lab.file(filled, 3), 20)
    assert lab.intact(filled, [3]) == []  # now in quarantine
    done = maintenance.clear(filled)
    assert (done.removed, done.left, done.left_bytes, done.pinned) == (4, 0, 0, 0)
    assert [path.read_text(encoding="utf-8") for path in kept] == ["kept"] * 3
    assert lab.payloads(filled) == []
    for name in ("pinned", "quarantine", "tmp"):
        assert list((filled / name).iterdir()) == []
    assert maintenance.survey(filled).limit_bytes == 1 << 30
    lab.fill(filled)
    assert lab.intact(filled) == [0, 1, 2, 3, 4]


def test_clear_of_one_namespace_leaves_the_others(lab, filled):
    other = add_other_namespace(lab, filled)
    done = maintenance.clear(filled, lab.namespace)
    assert (done.removed, done.left) == (5, 1)
    assert len(lab.payloads(filled)) == 1
    assert only_namespace(maintenance.check(filled)).namespace == other
    assert list((filled / "pinned").iterdir()) == []


@pytest.mark.parametrize("namespace", ["", "../..", "/", "0" * 63, "A" * 64])
def test_a_malformed_namespace_is_refused(lab, filled, tmp_path, namespace):
    for action in (
        lambda: maintenance.clear(filled, namespace),
        lambda: maintenance.export_archive(filled, tmp_path / "kv.tar", namespace),
    ):
        with pytest.raises(InvalidInputError, match="not a key or namespace, expected 64"):
            action()
    assert len(lab.payloads(filled)) == 5
    assert not (tmp_path / "kv.tar").exists()


def test_a_kill_during_clear_leaves_a_sound_store_and_pinned_entries(
    lab, filled, killed, monkeypatch
):
    monkeypatch.setattr(space, "BATCH", 2)
    killed(lambda: maintenance.clear(filled), PayloadFiles, "remove", 3)
    assert len(lab.intact(filled)) == 3  # opening it recovers the index
    assert lab.intact(filled, [0]) == [0]
    assert (filled / "pinned" / f"{lab.namespace}.{lab.key(0)}").exists()
    each = only_namespace(maintenance.check(filled))
    assert (each.good, each.missing_rows, each.dead_rows) == (3, 0, 0)
    maintenance.clear(filled)
    assert lab.payloads(filled) == []


# -- refusals ----------------------------------------------------------------------------------------

READING = (maintenance.survey, maintenance.check)
CHANGING = (
    maintenance.collect,
    maintenance.clear,
    lambda root: maintenance.check(root, repair=True),
)


def assert_refused(action, root, *words):
    with pytest.raises(StoreUnavailableError) as caught:
        action(root)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("action", [*READING, *CHANGING])
def test_other_directories_and_newer_stores_are_refused_and_not_touched(filled, tmp_path, action):
    (tmp_path / "file").write_text("text", encoding="utf-8")
    (tmp_path / "documents" / "kv").mkdir(parents=True)
    (tmp_path / "documents" / "letter.txt").write_text("text", encoding="utf-8")
    (filled / "format").write_text("blendrag-kv 2\n", encoding="ascii")
    before = snapshot(tmp_path)
    assert_refused(action, tmp_path / "none", "no store at")
    assert_refused(action, tmp_path / "file", "is a file")
    assert_refused(action, tmp_path / "file" / "below", "no store at")
    assert_refused(action, tmp_path / "documents", "holds no store")
    assert_refused(action, filled, "newer blendrag", "upgrade")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("action", CHANGING)
def test_read_only_stores_and_stores_of_other_users_are_refused_for_changes(
    lab, filled, action, monkeypatch, caplog
):
    real, uid = os.access, os.geteuid()
    before = snapshot(filled)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and real(path, mode))
        assert_refused(action, filled, "read-only")
        assert all(look(filled) for look in READING)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: uid + 1)
        assert_refused(action, filled, "is owned by user", f"expected {uid + 1}")
        assert maintenance.check(filled).is_good
    assert caplog.records == []
    assert snapshot(filled) == before


def test_a_held_index_is_an_error_and_never_a_hang(lab, filled, monkeypatch):
    monkeypatch.setattr(store_index, "LOCK_WAIT_S", 0.05)
    with Index(filled / "index").exclusive():
        for action in CHANGING[:2]:
            assert_refused(action, filled, "is held by")
        assert maintenance.check(filled).is_good
    assert len(lab.payloads(filled)) == 5


def test_a_namespace_is_found_by_a_unique_prefix(lab, filled):
    other = add_other_namespace(lab, filled)
    assert maintenance.find_namespace(filled, other[:6]) == other
    assert maintenance.find_namespace(filled, lab.namespace) == lab.namespace
    for prefix in ("", "zz", "../kv", lab.namespace + "0"):
        with pytest.raises(InvalidInputError, match="expected the beginning of one of"):
            maintenance.find_namespace(filled, prefix)
