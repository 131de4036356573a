"""What seldom goes wrong: a call that fails once, a moment between two steps, a number nobody writes."""

from __future__ import annotations

import errno
import io
import logging
import os
import threading

import pytest
import torch

from blendrag.errors import CorruptKVError, InvalidInputError, StoreUnavailableError
from blendrag.store import DiskStore, MemoryStore, TieredStore, maintenance
from blendrag.store.disk_writer import Pins
from blendrag.store.maintenance.archive import ArchiveFault, ArchiveReader
from blendrag.store.payload import frame
from blendrag.store.payload_files import PayloadFiles


@pytest.fixture
def store(lab, make_store):
    opened = make_store()
    for number in (1, 2, 3):
        lab.put(opened, number)
    return opened


# -- reading ----------------------------------------------------------------------------------------


def test_a_directory_that_cannot_be_listed_is_a_miss_with_a_warning(
    lab, store, make_store, failing, caplog
):
    reader = make_store(read_only=True)
    with failing("listdir"), caplog.at_level(logging.WARNING, "blendrag.store"):
        assert lab.open(reader, 1) is None
    assert "cannot be looked for (Input/output error): a miss" in caplog.text
    assert reader.stats().quarantined == 0
    assert lab.is_right(reader, 1)


def test_a_header_that_cannot_be_read_is_a_miss_and_leaves_no_descriptor(lab, store, failing):
    before = lab.descriptors()
    with failing("pread", ".kv"):
        assert lab.open(store, 1) is None
    assert store.stats().quarantined == 1
    assert lab.descriptors() == before
    lab.put(store, 1)
    assert lab.is_right(store, 1)


def test_an_interrupt_while_a_payload_is_opened_leaves_no_descriptor(lab, store, monkeypatch):
    before = lab.descriptors()

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", interrupt)
        with pytest.raises(KeyboardInterrupt):
            lab.open(store, 1)
    assert lab.descriptors() == before
    assert lab.is_right(store, 1)


def test_a_layer_that_cannot_be_read_is_corrupt(lab, store, failing):
    reader = lab.open(store, 1)
    with failing("preadv", ".kv"), pytest.raises(CorruptKVError, match="cannot be read"):
        lab.read(reader)
    assert lab.open(store, 1) is None


def test_a_closed_memory_reader_is_closed_for_good(lab):
    store = MemoryStore(1 << 20)
    lab.put(store, 1)
    reader = lab.open(store, 1)
    reader.close()
    with pytest.raises(ValueError, match="is closed"):
        lab.read(reader)


def test_memory_keeps_one_copy_of_what_is_put_or_promoted_twice(lab):
    store = MemoryStore(1 << 20)
    lab.put(store, 1)
    size_bytes = store.stats().size_bytes
    lab.put(store, 1)
    (block,) = store._blocks.values()
    assert store.insert(lab.namespace, lab.key(1), block)
    assert (store.stats().entries, store.stats().size_bytes) == (1, size_bytes)


def test_a_chunk_offered_after_the_tiers_were_closed_is_let_go(lab, store):
    tiers = TieredStore(MemoryStore(1 << 20), store)
    before = lab.descriptors()
    reader = lab.open(tiers, 1)
    lab.read(reader)
    tiers._promotion.close()
    reader.close()
    assert lab.descriptors() == before
    assert tiers.memory.stats().entries == 0
    tiers.close()
    tiers.close()


def test_a_chunk_read_twice_at_once_is_promoted_once(lab, store):
    tiers = TieredStore(MemoryStore(1 << 20), store)
    readers = [lab.open(tiers, 1), lab.open(tiers, 1)]
    for reader in readers:
        lab.read(reader)
    gate, real = threading.Event(), tiers._promotion._promote

    def wait(job):
        assert gate.wait(10)
        real(job)

    tiers._promotion._promote = wait
    for reader in readers:
        reader.close()
    gate.set()
    tiers.drain()
    assert tiers.stats().promotions == 1
    assert tiers.memory.stats().entries == 1
    tiers.close()


# -- checksums --------------------------------------------------------------------------------------


@pytest.mark.parametrize("digits", [b"-fffffffffffffff", b"0x0fffffffffffff", b"________________"])
def test_checksums_that_no_store_writes_are_none(lab, digits):
    expected = frame(lab.layout, lab.tokens)
    header = bytearray(expected.header(lab.namespace, lab.key(1), [1, 2, 3]))
    assert expected.checksums(bytes(header), lab.namespace, lab.key(1)) == [1, 2, 3]
    begin = len(expected.before_checksums)
    assert expected.checksums(bytes(header[: begin + 20]), lab.namespace, lab.key(1)) is None
    header[begin : begin + 16] = digits
    assert expected.checksums(bytes(header), lab.namespace, lab.key(1)) is None


# -- the index --------------------------------------------------------------------------------------


# -- recovery ---------------------------------------------------------------------------------------


def test_a_payload_that_vanishes_while_the_index_is_rebuilt_is_passed_over(
    lab, store, root, monkeypatch
):
    store.close()
    (root / "index" / "index.db").unlink()
    real = PayloadFiles.open

    def vanish(files, name):
        if name.key == lab.key(2):
            files.remove(name)
        return real(files, name)

    monkeypatch.setattr(PayloadFiles, "open", vanish)
    again = DiskStore(root, 1 << 30)
    assert again._index.totals() == (2, 2 * lab.entry_bytes)
    assert again.stats().quarantined == 0
    again.close()


def test_a_payload_that_can_never_be_read_is_set_aside_by_a_rebuild(lab, store, root, failing):
    store.close()
    (root / "index" / "index.db").unlink()
    with failing("pread", lab.key(2)):
        again = DiskStore(root, 1 << 30)
    assert again.stats().quarantined == 1
    assert set(again.keys(lab.namespace)) == {lab.key(1), lab.key(3)}
    again.close()


# -- the root ---------------------------------------------------------------------------------------


def test_a_subdirectory_that_cannot_be_made_is_a_sentence(root, failing):
    with (
        failing("mkdir", "quarantine"),
        pytest.raises(StoreUnavailableError, match=r"Input/output error while creating .*quaran"),
    ):
        DiskStore(root, 1 << 30)


@pytest.mark.parametrize("call", ["open", "read"])
@pytest.mark.parametrize("name", ["format", "disk-bytes"])
def test_a_small_file_that_cannot_be_read_is_a_sentence(store, root, failing, call, name):
    store.close()
    before = set(os.listdir("/proc/self/fd"))
    with failing(call, name), pytest.raises(StoreUnavailableError, match=f"while reading .*{name}"):
        DiskStore(root, None)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_root_that_may_not_be_read_is_a_sentence(store, root, monkeypatch):
    store.close()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(StoreUnavailableError, match="cannot be read by this user"):
        DiskStore(root, None, read_only=True)


def test_a_directory_without_a_store_is_not_read(root):
    root.mkdir(mode=0o700)
    with pytest.raises(StoreUnavailableError, match="holds no store"):
        DiskStore(root, None, read_only=True)


# -- looking after a store --------------------------------------------------------------------------


def test_a_store_without_marks_has_no_pinned_chunks(lab, store, root):
    store.close()
    (root / "pinned").rmdir()
    (namespace,) = maintenance.survey(root).namespaces
    assert (namespace.chunks, namespace.pinned) == (3, 0)
    reader = DiskStore(root, None, read_only=True)
    assert lab.is_right(reader, 1)
    reader.close()


def test_what_is_evicted_while_a_survey_goes_on_is_not_counted(lab, store, root, monkeypatch):
    walk = PayloadFiles.walk

    def walk_beside_an_eviction(files):
        for name in walk(files):
            if name.key == lab.key(2):
                files.remove(name)
            yield name

    monkeypatch.setattr(PayloadFiles, "walk", walk_beside_an_eviction)
    found = maintenance.survey(root)
    assert (found.chunks, found.size_bytes) == (2, 2 * lab.entry_bytes)


def test_a_store_without_some_of_its_directories_is_checked_all_the_same(store, root):
    store.close()
    for name in ("pinned", "quarantine", "tmp"):
        (root / name).rmdir()
    report = maintenance.check(root)
    assert report.is_good
    assert report.foreign_files == 0


@pytest.mark.parametrize("call", ["open", "pread"])
def test_a_survey_counts_what_it_cannot_describe(store, root, failing, call):
    store.close()
    with failing(call, ".kv"):
        (namespace,) = maintenance.survey(root).namespaces
    assert (namespace.chunks, namespace.unknown, namespace.tokens) == (3, 3, 0)
    with failing("open", ".kv", errno.EMFILE), pytest.raises(StoreUnavailableError, match="open"):
        maintenance.survey(root)


def test_a_payload_of_which_nothing_is_known_is_unreadable_and_not_damaged(
    lab, store, root, failing
):
    with failing("open", lab.key(2), errno.EACCES):
        report = maintenance.check(root)
    (namespace,) = report.namespaces
    assert (namespace.good, namespace.unreadable, namespace.damaged) == (2, 1, 0)
    assert not report.is_good
    assert "Permission denied" in report.faults[0]


def test_a_disk_that_failed_for_the_length_of_a_check_costs_no_chunk(lab, store, root, failing):
    store.close()
    with failing("open", lab.key(2), times=1):
        report = maintenance.check(root, repair=True)
    (namespace,) = report.namespaces
    assert (namespace.good, namespace.damaged) == (2, 1)
    assert len(lab.payloads(root)) == 3
    assert maintenance.check(root).is_good


def test_faults_beyond_those_that_are_told_are_counted(lab, store, root, monkeypatch):
    for path in lab.payloads(root):
        os.truncate(path, 100)
    monkeypatch.setattr("blendrag.store.maintenance.integrity.MAX_FAULTS", 2)
    report = maintenance.check(root)
    (namespace,) = report.namespaces
    assert (len(report.faults), namespace.damaged) == (2, 3)


def test_a_store_that_stops_being_writable_is_refused_by_who_would_change_it(
    store, root, monkeypatch
):
    store.close()
    real, calls = os.access, []

    def access(path, mode):
        calls.append(mode)
        return real(path, mode) and not (mode & os.W_OK and len(calls) > 2)

    monkeypatch.setattr(os, "access", access)
    with pytest.raises(StoreUnavailableError, match="is read-only, expected"):
        maintenance.collect(root, 0)
    assert maintenance.survey(root).chunks == 3


def test_a_file_that_is_gone_before_it_is_looked_at_is_no_foreign_one(store, root, failing):
    (root / "tmp" / "README").touch()
    (root / "kv" / "notes").touch()
    assert maintenance.check(root).foreign_files == 2
    with failing("stat", "README", errno.ENOENT):
        assert maintenance.check(root).foreign_files == 1


def test_marks_without_a_payload_go_with_what_is_cleared(lab, store, root):
    other = lab.key("another model")
    store.pin(lab.namespace, lab.key(9))
    store.pin(other, lab.key(9))
    store.close()
    assert maintenance.clear(root, lab.namespace).pinned == 1
    assert os.listdir(root / "pinned") == [f"{other}.{lab.key(9)}"]


def test_a_payload_that_may_not_be_read_is_left_out_of_an_archive(
    lab, store, root, tmp_path, failing
):
    with failing("open", lab.key(2), errno.EACCES):
        report = maintenance.export_archive(root, tmp_path / "kv.tar")
    assert report.payloads == 2
    (told,) = report.left_out
    assert "Permission denied" in told


def test_an_archive_on_a_disk_that_fails_says_so(store, root, tmp_path):
    maintenance.export_archive(root, tmp_path / "kv.tar")
    with open(tmp_path / "kv.tar", "rb", buffering=0) as file:

        class Failing(io.FileIO):
            def read(self, size=-1):
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        with pytest.raises(ArchiveFault, match="cannot be read"):
            ArchiveReader(Failing(file.fileno(), closefd=False))


def test_a_layer_that_cannot_be_read_makes_a_check_say_damaged(lab, store, root, failing):
    with failing("preadv", lab.key(2)):
        report = maintenance.check(root)
    (namespace,) = report.namespaces
    assert (namespace.good, namespace.damaged) == (2, 1)
    assert "cannot be read" in report.faults[0]


# -- pins -------------------------------------------------------------------------------------------


def test_an_entry_is_held_until_the_last_scope_that_noted_it_ends():
    pins, entry = Pins(), ("namespace", "key")
    with pins.scope() as outer:
        pins.note_put(entry)
        pins.note_put(entry)
        outer.protect(*entry)
        with pins.scope():
            pins.note_put(entry)
        assert entry in pins
    assert entry not in pins


def test_a_layer_is_not_read_into_what_is_no_cpu_tensor(lab, store):
    with pytest.raises(InvalidInputError, match="on meta"):
        lab.open(store, 1).read_layer(0, torch.empty(2, 2, 24, 8, device="meta"))
