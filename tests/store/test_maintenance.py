"""Survey, check, repair, gc and clear: what they find, what they change, and what they leave alone."""

import errno
import os
import shutil
import sqlite3
import subprocess
import sys
import time

import pytest

from blendrag.errors import InvalidInputError, StoreUnavailableError
from blendrag.store import DiskStore, maintenance
from blendrag.store.files import QUARANTINE_FILES, PayloadFiles
from blendrag.store.kv import KVLayout
from blendrag.store.maintenance.index_view import IndexView


@pytest.fixture
def filled(lab, root):
    """A closed store of five chunks; number 0 is pinned."""
    return fill(lab, root)


def fill(lab, root, numbers=range(5), pinned=(0,)):
    store = DiskStore(root, 1 << 30)
    for number in numbers:
        lab.put(store, number)
    for number in pinned:
        store.pin(lab.namespace, lab.key(number))
    store.close()
    return root


def add_other_namespace(lab, root, number=9):
    """One chunk of another model: another dtype, encoded, fewer tokens."""
    layout, namespace = KVLayout(lab.layout.layers, "bfloat16", "int8"), lab.key("other model")
    store = DiskStore(root, None)
    store.put(namespace, lab.key(number), lab.kv(number, layout, 10))
    store.close()
    return namespace


def payload(lab, root, number):
    (path,) = (root / "kv").rglob(f"{lab.key(number)}.*.kv")
    return path


def flip(path, offset=5000):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def snapshot(root):
    """Every file but SQLite's, which a reader may bring to life."""
    return {
        path.relative_to(root): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
        if not path.name.startswith("cache.db")
    }


def right(lab, root, numbers):
    store = DiskStore(root, None)
    try:
        return [number for number in numbers if lab.is_right(store, number)]
    finally:
        store.close()


def one(report):
    (namespace,) = report.namespaces
    return namespace


def test_nothing_of_it_loads_torch():
    code = (
        "import sys, blendrag.cli.app, blendrag.store.maintenance, blendrag.cli.store_corpus;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- survey -------------------------------------------------------------------------------------


def test_a_survey_counts_by_namespace_and_changes_nothing(lab, filled):
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
    on_disk = sum(path.stat().st_size for path in lab.payloads(filled))
    assert found.size_bytes == on_disk


def test_a_survey_counts_chunks_of_several_lengths_and_headers_that_say_nothing(lab, filled):
    store = DiskStore(filled, None)
    store.put(lab.namespace, lab.key("long"), lab.kv(7, tokens=40))
    store.close()
    payload(lab, filled, 1).write_bytes(b"no payload")
    each = one(maintenance.survey(filled))
    assert (each.chunks, each.tokens, each.unknown) == (6, 4 * lab.tokens + 40, 1)


def test_a_survey_says_what_quarantine_and_tmp_take_and_that_a_limit_is_the_default(lab, filled):
    (filled / "disk-bytes").unlink()
    (filled / "tmp" / f"{'a' * 16}.{'b' * 16}.part").write_bytes(bytes(100))
    (filled / "quarantine" / f"{lab.key(1)}.{'c' * 16}.kv").write_bytes(bytes(200))
    found = maintenance.survey(filled)
    assert (found.temporary_bytes, found.quarantine_files, found.quarantine_bytes) == (100, 1, 200)
    assert not found.limit_is_remembered


def test_a_survey_follows_nothing_and_misses_no_directory_that_is_not_there(lab, filled):
    path = payload(lab, filled, 1)
    path.rename(filled.parent / "moved")
    path.symlink_to(filled.parent / "moved")
    for name in ("tmp", "quarantine"):
        (filled / name).rmdir()
    found = maintenance.survey(filled)
    assert (found.namespaces[0].chunks, found.namespaces[0].unknown) == (5, 1)
    assert (found.quarantine_files, found.temporary_bytes) == (0, 0)


# -- check --------------------------------------------------------------------------------------


def test_a_sound_store_is_read_whole_and_found_good(lab, filled):
    before = snapshot(filled)
    told = []
    report = maintenance.check(filled, watch=lambda done, total: told.append((done, total)))
    assert report.is_good
    assert report.index == "sound"
    assert report.read_bytes == 5 * lab.entry_bytes
    assert told == [(n * lab.entry_bytes, 5 * lab.entry_bytes) for n in range(1, 6)]
    each = one(report)
    assert (each.good, each.damaged, each.missing_rows, each.dead_rows) == (5, 0, 0, 0)
    assert snapshot(filled) == before


@pytest.mark.parametrize("offset", [20, 300, 4096, 5000, -1])
def test_a_bit_flipped_anywhere_is_damage(lab, filled, offset):
    flip(payload(lab, filled, 2), offset)
    report = maintenance.check(filled)
    each = one(report)
    assert (each.good, each.damaged) == (4, 1)
    assert not report.is_good
    assert lab.key(2) in report.faults[0]


def test_every_layer_of_every_payload_is_looked_at(lab, filled):
    data_bytes = lab.entry_bytes - 4096
    for number, part in enumerate((0.0, 0.2, 0.5, 0.8, 0.999)):
        flip(payload(lab, filled, number), 4096 + int(part * data_bytes))
    assert one(maintenance.check(filled)).damaged == 5


@pytest.mark.parametrize("change", [-1, -9000, 1])
def test_a_payload_of_another_length_is_damage(lab, filled, change):
    path = payload(lab, filled, 2)
    os.truncate(path, path.stat().st_size + change)
    assert one(maintenance.check(filled)).damaged == 1


def test_swapped_payloads_links_and_pipes_are_damage_and_nothing_is_followed(lab, filled, tmp_path):
    paths = [payload(lab, filled, number) for number in range(4)]
    aside = paths[0].read_bytes()
    paths[0].write_bytes(paths[1].read_bytes())
    paths[1].write_bytes(aside)
    shutil.copy(paths[2], tmp_path / "copy")
    paths[2].unlink()
    paths[2].symlink_to(tmp_path / "copy")
    paths[3].unlink()
    os.mkfifo(paths[3])
    each = one(maintenance.check(filled))
    assert (each.good, each.damaged) == (1, 4)


def test_a_payload_that_may_not_be_read_is_not_called_damaged(lab, filled, monkeypatch):
    hidden, real = payload(lab, filled, 2).name, os.open

    def refusing(path, flags, *args, **kwargs):
        if path == hidden:
            raise PermissionError(13, "Permission denied", path)
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)
    report = maintenance.check(filled, repair=True)
    each = one(report)
    assert (each.good, each.damaged, each.unreadable) == (4, 0, 1)
    assert not report.is_good
    monkeypatch.undo()
    assert payload(lab, filled, 2).exists()


def test_rows_that_are_missing_or_dead_are_counted_and_no_damage(lab, filled):
    payload(lab, filled, 1).unlink()
    (stray,) = [path for path in lab.payloads(filled) if path.name.startswith(lab.key(2))]
    with sqlite3.connect(filled / "index" / "cache.db") as index:
        index.execute("DELETE FROM Cache WHERE value LIKE ?", (f"%{stray.name[:64]}%",))
    report = maintenance.check(filled)
    each = one(report)
    assert (each.good, each.missing_rows, each.dead_rows) == (4, 1, 1)
    assert report.is_good


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda index: (index / "cache.db").unlink(), "there is none"),
        (lambda index: (index / "cache.db").write_bytes(b"garbage" * 999), "not a database"),
        (lambda index: (index / "unfinished").touch(), "not finished"),
        (lambda index: alter(index, "UPDATE Cache SET mode = 4"), "outside"),
        (lambda index: alter(index, "UPDATE Cache SET key = upper(key)"), "64 hex"),
        (lambda index: alter(index, "CREATE TRIGGER x AFTER INSERT ON Cache BEGIN SELECT 1; END"),
         "schema"),
    ],
)  # fmt: skip
def test_an_odd_index_is_named_and_no_damage(lab, filled, break_it, words):
    break_it(filled / "index")
    report = maintenance.check(filled)
    assert words in report.index
    assert report.is_good
    assert one(report).missing_rows is None
    repaired = maintenance.check(filled, repair=True)
    assert repaired.is_good
    assert maintenance.check(filled).index == "sound"
    assert right(lab, filled, range(5)) == [0, 1, 2, 3, 4]


def alter(index, statement):
    with sqlite3.connect(index / "cache.db") as connection:
        connection.execute(statement)


def strangers_in(lab, root):
    """Files nobody but a user can have put there, and a link out of the store."""
    directory = payload(lab, root, 2).parent
    paths = [
        root / "kv" / "notes.txt",
        root / "kv" / lab.namespace / "README",
        directory / "mine.kv",
        directory / f"{lab.key(2)}.KV",
        root / "tmp" / "download.part",
        root / "pinned" / "pin",
        root / "quarantine" / "sample.bin",
    ]
    for path in paths:
        path.write_text("mine", encoding="utf-8")
    misplaced = root / "kv" / lab.namespace / "zz"
    misplaced.mkdir()
    (misplaced / "inner.txt").write_text("mine", encoding="utf-8")
    (root / "kv" / lab.namespace / "empty").mkdir()
    elsewhere = root.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept.txt").write_text("mine", encoding="utf-8")
    (root / "kv" / lab.key("linked")).symlink_to(elsewhere)
    return [*paths, misplaced / "inner.txt", elsewhere / "kept.txt"]


def test_foreign_files_are_counted_where_they_lie_and_survive_everything(lab, filled):
    mine = strangers_in(lab, filled)
    report = maintenance.check(filled)
    assert report.is_good
    assert one(report).foreign_files == 5
    assert report.foreign_files == 10
    maintenance.check(filled, repair=True)
    maintenance.collect(filled, 0)
    maintenance.clear(filled)
    assert set(lab.payloads(filled)) <= set(mine)
    assert [path.read_text(encoding="utf-8") for path in mine] == ["mine"] * len(mine)
    assert (filled / "kv" / lab.key("linked")).is_symlink()
    assert (filled / "kv" / lab.namespace / "empty").is_dir()


def test_what_is_evicted_during_a_check_is_neither_good_nor_damaged(lab, filled):
    def evict(done, total):
        for path in lab.payloads(filled)[1:]:
            path.unlink()

    report = maintenance.check(filled, watch=evict)
    assert report.is_good
    assert (one(report).good, one(report).damaged, one(report).dead_rows) == (1, 0, 4)


def test_what_is_just_being_put_or_evicted_is_looked_at_twice(lab, filled, monkeypatch):
    knows, exists, asked = IndexView.knows, PayloadFiles.exists, set()

    def at_second_look(real):
        def look(self, name):
            if (real, name) in asked:
                return real(self, name)
            asked.add((real, name))
            return False

        return look

    monkeypatch.setattr(IndexView, "knows", at_second_look(knows))
    monkeypatch.setattr(PayloadFiles, "exists", at_second_look(exists))
    each = one(maintenance.check(filled))
    assert (each.missing_rows, each.dead_rows) == (0, 0)
    assert len(asked) == 10


def test_an_index_that_somebody_holds_to_himself_is_named_after_a_bounded_wait(lab, filled):
    connection = sqlite3.connect(filled / "index" / "cache.db", isolation_level=None)
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    connection.execute("BEGIN EXCLUSIVE")
    began = time.monotonic()
    report = maintenance.check(filled)
    assert time.monotonic() - began < 20
    connection.close()
    assert "locked" in report.index
    assert report.is_good
    assert one(report).dead_rows is None


# -- repair -------------------------------------------------------------------------------------


def test_a_repair_sets_the_damaged_aside_and_keeps_the_rest(lab, filled):
    for number in (2, 3):
        flip(payload(lab, filled, number))
    payload(lab, filled, 4).unlink()
    report = maintenance.check(filled, repair=True)
    assert not report.is_good
    assert report.repaired
    assert len(list((filled / "quarantine").glob("*.kv"))) == 2
    again = maintenance.check(filled)
    assert again.is_good
    assert (one(again).good, one(again).missing_rows, one(again).dead_rows) == (2, 0, 0)
    assert right(lab, filled, range(5)) == [0, 1]
    fill(lab, filled, pinned=())
    assert right(lab, filled, range(5)) == [0, 1, 2, 3, 4]


def test_a_repair_of_more_than_the_quarantine_holds_keeps_the_newest(lab, root):
    fill(lab, root, range(QUARANTINE_FILES + 4))
    for number in range(QUARANTINE_FILES + 3):
        flip(payload(lab, root, number))
    report = maintenance.check(root, repair=True)
    assert one(report).damaged == QUARANTINE_FILES + 3
    assert len(list((root / "quarantine").iterdir())) == QUARANTINE_FILES
    assert maintenance.check(root).is_good
    assert right(lab, root, range(20)) == [QUARANTINE_FILES + 3]


def test_a_disk_that_failed_for_a_moment_costs_no_chunk_in_a_repair(lab, filled, monkeypatch):
    real, failed = os.preadv, []

    def failing_once(*args):
        if not failed:
            failed.append(args)
            raise OSError(errno.EIO, "Input/output error")
        return real(*args)

    monkeypatch.setattr(os, "preadv", failing_once)
    report = maintenance.check(filled, repair=True)
    assert one(report).damaged == 1
    assert "Input/output error" in report.faults[0]
    assert right(lab, filled, range(5)) == [0, 1, 2, 3, 4]


def test_a_repair_evicts_nothing(lab, root):
    fill(lab, root)
    (root / "disk-bytes").write_text("10\n", encoding="ascii")
    maintenance.check(root, repair=True)
    assert len(lab.payloads(root)) == 5


def test_a_repair_clears_what_a_crash_left_and_keeps_a_pin_for_what_is_put_again(lab, filled):
    (filled / "tmp" / f"{'a' * 16}.writer").touch()
    (filled / "tmp" / f"{'a' * 16}.{'b' * 16}.part").write_bytes(bytes(100))
    flip(payload(lab, filled, 0))
    maintenance.check(filled, repair=True)
    assert list((filled / "tmp").iterdir()) == []
    fill(lab, filled, pinned=())
    maintenance.collect(filled, 0)
    assert right(lab, filled, range(5)) == [0]


def test_a_check_while_the_store_is_in_use_finds_nothing_wrong(lab, root, make_store):
    store = make_store(limit_bytes=3 * lab.entry_bytes)
    for number in range(8):
        lab.put(store, number)
        report = maintenance.check(root, repair=bool(number % 2))
        assert report.is_good
        assert (one(report).missing_rows, one(report).dead_rows) == (0, 0)
    assert lab.is_right(store, 7)


# -- gc -----------------------------------------------------------------------------------------


def test_gc_evicts_the_least_recently_used_down_to_a_size(lab, filled):
    store = DiskStore(filled, None)
    assert lab.is_right(store, 1)
    store.close()
    told = []
    done = maintenance.collect(
        filled, int(3.5 * lab.entry_bytes), lambda done, total: told.append((done, total))
    )
    assert (done.removed, done.left) == (2, 3)
    assert done.left_bytes == 3 * lab.entry_bytes <= done.limit_bytes
    assert right(lab, filled, range(5)) == [0, 1, 4]
    assert told[-1][0] == told[-1][1]
    assert maintenance.check(filled).is_good
    assert maintenance.collect(filled, int(3.5 * lab.entry_bytes)).removed == 0


def test_gc_never_evicts_what_is_pinned_and_says_how_much_that_is(lab, filled):
    done = maintenance.collect(filled, 0)
    assert (done.removed, done.left, done.pinned) == (4, 1, 1)
    assert done.left_bytes > done.limit_bytes
    assert right(lab, filled, range(5)) == [0]


def test_gc_without_a_size_goes_to_the_limit_that_the_store_remembers(lab, filled):
    (filled / "disk-bytes").write_text(f"{2 * lab.entry_bytes}\n", encoding="ascii")
    assert maintenance.collect(filled).left == 2
    maintenance.collect(filled, lab.entry_bytes)
    assert maintenance.survey(filled).limit_bytes == 2 * lab.entry_bytes


def test_gc_of_more_than_a_batch_reaches_its_size(lab, root):
    fill(lab, root, range(150))
    done = maintenance.collect(root, 5 * lab.entry_bytes)
    assert (done.removed, done.left) == (145, 5)
    assert right(lab, root, range(150)) == [0, 146, 147, 148, 149]


def test_gc_rebuilds_an_index_with_rows_that_are_not_ours(lab, filled):
    alter(filled / "index", "UPDATE Cache SET value = '../../etc/passwd' WHERE rowid > 2")
    assert maintenance.collect(filled, 2 * lab.entry_bytes).left == 2
    assert len(lab.payloads(filled)) == 2


def test_gc_beside_an_open_store_costs_it_misses_only(lab, root, make_store):
    store = make_store()
    for number in range(5):
        lab.put(store, number)
    reader = lab.open(store, 0)
    maintenance.collect(root, 2 * lab.entry_bytes)
    assert [number for number in range(5) if lab.is_right(store, number)] == [3, 4]
    assert lab.read(reader)[0].equal(lab.kv(0).layers[0])
    assert store.stats().quarantined == 0
    lab.put(store, 0)
    assert lab.is_right(store, 0)


# -- clear --------------------------------------------------------------------------------------


def test_clear_leaves_an_empty_store_and_all_that_is_not_kv(lab, filled):
    (filled / "corpus").mkdir()
    (filled / "verified").mkdir()
    kept = [filled / "corpus" / "corpus.sqlite", filled / "verified" / "x.json", filled / "mine"]
    for path in kept:
        path.write_text("kept", encoding="utf-8")
    flip(payload(lab, filled, 3), 20)
    assert right(lab, filled, [3]) == []  # now in quarantine
    done = maintenance.clear(filled)
    assert (done.removed, done.left, done.left_bytes, done.pinned) == (4, 0, 0, 0)
    assert [path.read_text(encoding="utf-8") for path in kept] == ["kept"] * 3
    for name in ("kv", "pinned", "quarantine", "tmp"):
        assert list((filled / name).iterdir()) == []
    assert maintenance.survey(filled).limit_bytes == 1 << 30
    fill(lab, filled)
    assert right(lab, filled, range(5)) == [0, 1, 2, 3, 4]


def test_clear_of_one_namespace_leaves_the_others(lab, filled):
    other = add_other_namespace(lab, filled)
    done = maintenance.clear(filled, lab.namespace)
    assert (done.removed, done.left) == (5, 1)
    assert not (filled / "kv" / lab.namespace).exists()
    assert one(maintenance.check(filled)).namespace == other
    assert list((filled / "pinned").iterdir()) == []


@pytest.mark.parametrize("namespace", ["", ".", "../..", "/", "0" * 63, "x" * 64, "A" * 64])
def test_nothing_is_cleared_or_exported_by_a_name_that_is_no_namespace(filled, namespace):
    others = filled.parent / "ab"
    others.mkdir()
    for action in (maintenance.clear, lambda *args: maintenance.export(args[0], others, args[1])):
        with pytest.raises(InvalidInputError, match="is no namespace, expected 64"):
            action(filled, namespace)
    assert list(others.iterdir()) == []
    assert maintenance.survey(filled).chunks == 5


def test_pinned_entries_are_cleared_last(lab, filled, monkeypatch):
    class Enough(Exception):
        pass

    def stop(done, total):
        raise Enough

    from blendrag.store.maintenance import removal

    monkeypatch.setattr(removal, "BATCH", 2)
    with pytest.raises(Enough):
        maintenance.clear(filled, watch=stop)
    assert len(lab.payloads(filled)) == 3
    assert right(lab, filled, [0]) == [0]
    assert (filled / "pinned" / f"{lab.namespace}.{lab.key(0)}").exists()
    maintenance.clear(filled)
    assert lab.payloads(filled) == []


def test_a_kill_while_clearing_is_made_good(lab, root, fork, monkeypatch):
    fill(lab, root, range(6))
    real, removed = PayloadFiles.remove, []

    def dying(self, name):
        if len(removed) == 2:
            os.kill(os.getpid(), 9)
        removed.append(name)
        real(self, name)

    monkeypatch.setattr(PayloadFiles, "remove", dying)
    os.waitpid(fork(lambda: maintenance.clear(root)), 0)
    monkeypatch.undo()
    assert len(lab.payloads(root)) == 4
    assert right(lab, root, range(6))  # whoever opens it next counts what is there again
    each = one(maintenance.check(root))
    assert (each.good, each.missing_rows, each.dead_rows) == (4, 0, 0)
    maintenance.clear(root)
    assert lab.payloads(root) == []


# -- refusals -----------------------------------------------------------------------------------

LOOKING = (maintenance.survey, maintenance.check)
CHANGING = (
    maintenance.collect,
    maintenance.clear,
    lambda root: maintenance.check(root, repair=True),
)


def assert_refused(action, root, *words):
    with pytest.raises(StoreUnavailableError) as caught:
        action(root)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


@pytest.mark.parametrize("action", [*LOOKING, *CHANGING])
def test_what_is_no_store_is_refused_and_not_touched(lab, root, tmp_path, action):
    assert_refused(action, tmp_path / "none", "no store at")
    (tmp_path / "file").write_text("text", encoding="utf-8")
    assert_refused(action, tmp_path / "file", "is a file")
    assert_refused(action, tmp_path / "file" / "below", "no store at")
    documents = tmp_path / "documents"
    (documents / "kv").mkdir(parents=True)
    (documents / "letter.txt").write_text("text", encoding="utf-8")
    assert_refused(action, documents, "holds no store")
    assert sorted(path.name for path in documents.iterdir()) == ["kv", "letter.txt"]
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("action", [*LOOKING, *CHANGING])
def test_a_store_of_a_newer_version_is_refused_and_untouched_by_all(lab, filled, action):
    (filled / "format").write_text("blendrag-kv 2\n", encoding="ascii")
    before = snapshot(filled)
    assert_refused(action, filled, "newer blendrag", "upgrade")
    assert snapshot(filled) == before


@pytest.mark.parametrize("action", CHANGING)
def test_a_store_that_cannot_be_written_is_refused_in_one_sentence(
    lab, filled, action, monkeypatch, caplog
):
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and real(path, mode))
    before = snapshot(filled)
    assert_refused(action, filled, "read-only")
    assert caplog.records == []
    assert snapshot(filled) == before
    assert all(look(filled) for look in LOOKING)


@pytest.mark.parametrize("action", CHANGING)
def test_a_store_of_another_user_is_refused_for_changing_only(lab, filled, action, monkeypatch):
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    assert_refused(action, filled, "is owned by user", f"expected {uid + 1}")
    assert maintenance.check(filled).is_good


def test_an_index_held_by_somebody_is_a_sentence_and_never_a_hang(lab, filled, monkeypatch):
    from blendrag.store import index_database
    from blendrag.store.index_lock import IndexLock

    briefly = lambda directory, timeout_s: IndexLock(directory, 0.05)  # noqa: E731
    monkeypatch.setattr(index_database, "IndexLock", briefly)
    with IndexLock(filled / "index", 1.0).hold():
        for action in CHANGING[:2]:
            assert_refused(action, filled, "is held by")
        assert maintenance.check(filled).is_good
    assert len(lab.payloads(filled)) == 5


def test_a_namespace_is_found_by_its_beginning_if_that_is_only_one(lab, filled):
    other = add_other_namespace(lab, filled)
    assert maintenance.find_namespace(filled, other[:6]) == other
    assert maintenance.find_namespace(filled, lab.namespace) == lab.namespace
    for prefix in ("", "zz", "../kv", lab.namespace + "0"):
        with pytest.raises(InvalidInputError, match="expected the beginning of one of"):
            maintenance.find_namespace(filled, prefix)
