"""Between two steps: what is gone, shorter, full or busy by the time that it is come back to."""

from __future__ import annotations

import errno
import os

import pytest

from blendrag.errors import CorruptKVError, StoreUnavailableError
from blendrag.store import MemoryStore, TieredStore, disk, maintenance
from blendrag.store.payload import open_payload, sequential_reader, verified_pieces
from blendrag.store.payload_files import PayloadFiles


@pytest.fixture
def store(lab, make_store):
    made = make_store()
    for number in (1, 2, 3):
        lab.put(made, number)
    return made


@pytest.fixture
def evicted(lab, monkeypatch):
    """``evicted(2, walk=3)``: chunk 2 goes while all files are walked over for the third time."""
    real = PayloadFiles.walk

    def begin(number, walk=1):
        walks = []

        def walked(files):
            walks.append(files)
            for name in real(files):
                if name.key == lab.key(number) and len(walks) == walk:
                    files.remove(name)
                yield name

        monkeypatch.setattr(PayloadFiles, "walk", walked)

    return begin


# -- put and recover --------------------------------------------------------------------------------


def test_a_put_that_cannot_find_out_whether_its_payload_is_still_there_is_not_acknowledged(
    lab, store, root, failing
):
    with failing("stat", f"{lab.key(4)}."), pytest.raises(StoreUnavailableError, match="output er"):
        lab.put(store, 4)
    assert len(lab.payloads(root)) == store.stats().entries == 3
    lab.put(store, 4)
    assert lab.is_right(store, 4)


def test_a_recovery_out_of_descriptors_sets_nothing_aside(lab, store, failing):
    store._index.drop([store.find(lab.namespace, lab.key(2))])
    with (
        failing("open", ".kv", errno.EMFILE),
        pytest.raises(StoreUnavailableError, match="Too many"),
    ):
        store.recover()
    store.recover()
    assert lab.is_right(store, 2)
    assert store.stats().quarantined == 0


def test_only_the_last_uses_are_remembered_until_they_are_written_down(lab, store, monkeypatch):
    store.flush_recency()
    monkeypatch.setattr(disk, "MAX_RECENT", 2)
    for number in (1, 3, 2):
        lab.open(store, number).close()
    store.flush_recency()
    used = [row.name.key for row in store._index.oldest()]
    assert used == [lab.key(1), lab.key(3), lab.key(2)]
    for number in (3, 2, 1):
        lab.open(store, number).close()  # that 3 is used is forgotten
    store.flush_recency()
    used = [row.name.key for row in store._index.oldest()]
    assert used == [lab.key(3), lab.key(2), lab.key(1)]


# -- the index ----------------------------------------------------------------------------------------


# -- tiers --------------------------------------------------------------------------------------------


def test_what_does_not_fit_any_more_when_its_turn_comes_stays_on_disk(lab, store):
    tiers = TieredStore(MemoryStore(1 << 20), store)
    before = lab.descriptors()
    found = lab.open(tiers, 1)
    lab.read(found)
    tiers.memory.limit_bytes = 0
    found.close()
    found.close()  # once is enough
    tiers.drain()
    assert tiers.stats().promotions == tiers.memory.stats().entries == 0
    assert lab.descriptors() == before
    assert lab.is_right(tiers, 1)
    tiers.close()


# -- looking after a store ------------------------------------------------------------------------------


def test_what_is_evicted_during_a_check_is_no_damage(lab, store, root, evicted):
    evicted(2, walk=2)
    (namespace,) = maintenance.check(root).namespaces
    assert (namespace.good, namespace.damaged, namespace.unreadable) == (2, 0, 0)


def test_what_is_evicted_during_an_export_is_not_in_it(lab, store, root, tmp_path, evicted):
    evicted(2, walk=3)
    report = maintenance.export_archive(root, tmp_path / "kv.tar")
    assert (report.payloads, report.left_out) == (2, [])
    assert maintenance.import_archive(tmp_path / "other", tmp_path / "kv.tar").imported == 2


def test_what_was_damaged_and_is_gone_before_the_repair_is_nothing_to_set_aside(lab, store, root):
    path = lab.file(store, 2)
    path.write_bytes(path.read_bytes()[:-1] + b"?")

    def watch(done, total):
        if done == total:
            path.unlink()

    report = maintenance.check(root, repair=True, progress=watch)
    (namespace,) = report.namespaces
    assert namespace.damaged == 1
    assert os.listdir(root / "quarantine") == []
    (after,) = maintenance.check(root).namespaces
    assert (after.good, after.missing_rows, after.dead_rows) == (2, 0, 0)


def test_a_header_that_cannot_be_read_makes_a_check_say_damaged(lab, store, root, failing):
    with failing("pread", lab.key(2)):
        report = maintenance.check(root)
    assert [each.damaged for each in report.namespaces] == [1]
    assert "cannot be read (Input/output error)" in report.faults[0]


def test_a_payload_that_gets_shorter_while_it_is_verified_is_not_what_was_put(lab, store):
    name = store.find(lab.namespace, lab.key(1))
    with open_payload(store._files, name) as (fd, found):
        os.truncate(lab.file(store, 1), found.file_bytes - 100)
        pieces = verified_pieces(found, sequential_reader(fd, found.frame.header_bytes))
        with pytest.raises(CorruptKVError, match="layer 2 ends 100 bytes early"):
            list(pieces)


def test_files_are_closed_once(root, store):
    files = PayloadFiles(root)
    files.close()
    files.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        list(files.walk())


def test_what_is_gone_between_listing_and_opening_is_a_miss_for_who_only_reads(
    lab, store, make_store, monkeypatch
):
    reading = make_store(read_only=True)
    found = reading.find(lab.namespace, lab.key(1))
    monkeypatch.setattr(reading._files, "named", lambda *_: [found])
    lab.file(store, 1).unlink()
    assert lab.open(reading, 1) is None
    assert reading.stats().quarantined == 0
