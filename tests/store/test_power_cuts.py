"""Power cuts with several processes: an acknowledged chunk does not depend on another's pending sync."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from soak.audit import PLENTY, audit, make_chunks
from soak.power import Disk

from blendrag.store import DiskStore, maintenance
from blendrag.store.payload_files import PayloadFiles
from blendrag.store.writers import WriterClaim


@pytest.fixture
def watch(monkeypatch):
    """``cut = watch(directory)``: from now on track fsyncs; ``cut()`` is what a power cut leaves.

    SQLite's own syncs are not seen: what it wrote since then is lost.
    """

    def start(directory):
        disk, after = Disk(directory), directory.with_name("after")
        sync = lambda fd: disk.sync(Path(os.readlink(f"/proc/self/fd/{fd}")))  # noqa: E731
        monkeypatch.setattr(os, "fsync", sync)

        def cut():
            disk.cut(after, lambda: False)
            return after

        return cut

    return start


@pytest.fixture
def same_shard(lab):
    """Numbers of three chunks in one directory."""
    numbers = [n for n in range(2000) if lab.key(n)[:2] == lab.key(1)[:2]][:3]
    make_chunks(numbers)
    return numbers


def put_and_die_before_syncing_directories(lab, root, number, fork):
    """Another process creates the directory of a chunk and syncs nothing above it."""
    kv = lab.kv(number)

    def put():
        os.fsync = lambda fd: None
        PayloadFiles._sync_way = lambda *args: os._exit(0)
        DiskStore(root, None).put(lab.namespace, lab.key(number), kv)

    assert os.waitpid(fork(put), 0)[1] == 0


@pytest.mark.parametrize("respects_writers", [True, False])
def test_a_chunk_survives_when_others_remove_and_recreate_its_directory(
    lab, root, same_shard, watch, fork, monkeypatch, respects_writers
):
    """``clear`` keeps the directory of a writer that knows it to be durable; otherwise chunks are lost."""
    first, second, third = same_shard
    store = DiskStore(root, PLENTY)
    lab.put(store, first)
    cut = watch(root)
    if not respects_writers:
        monkeypatch.setattr(WriterClaim, "is_alone", lambda self: True)
    maintenance.clear(root)
    put_and_die_before_syncing_directories(lab, root, second, fork)
    lab.put(store, third)
    verdict = audit(cut(), [third], same_shard)
    assert verdict.lost == (() if respects_writers else (third,))
    assert not verdict.wrong
    store.close()


def test_clear_keeps_directories_while_another_process_writes(lab, root, make_store):
    store = make_store()
    lab.put(store, 1)
    directory = lab.file(store, 1).parent
    assert maintenance.clear(root).removed == 1
    assert list(directory.iterdir()) == []
    store.close()
    maintenance.clear(root)
    assert list((root / "kv").iterdir()) == []


def test_a_process_that_begins_to_write_syncs_directories_again(lab, root, same_shard, watch, fork):
    """Until then others may have removed and recreated them."""
    first, second, third = same_shard
    with contextlib.closing(DiskStore(root, PLENTY)) as before:
        lab.put(before, first)
    store = DiskStore(root, PLENTY)
    lab.put(store, first)  # already there, so the store does not begin to write
    cut = watch(root)
    maintenance.clear(root)
    assert list((root / "kv").iterdir()) == []
    put_and_die_before_syncing_directories(lab, root, second, fork)
    lab.put(store, third)
    assert audit(cut(), [third], same_shard).lost == ()
    store.close()


def test_a_chunk_indexed_by_a_recovery_during_its_put_is_durable(
    lab, root, make_store, watch, monkeypatch
):
    make_chunks([1])
    store, other = make_store(), make_store()
    cut = watch(root)

    class PowerCut(Exception):
        pass

    def cut_before_sync(name):
        other.recover()
        assert lab.has(other, 1)
        raise PowerCut(cut())

    monkeypatch.setattr(store._files, "sync", cut_before_sync)
    with pytest.raises(PowerCut) as raised:
        lab.put(store, 1)
    (after,) = raised.value.args
    assert audit(after, [1], [1]).is_good


def test_a_pin_in_a_new_store_survives_a_power_cut(lab, tmp_path, watch):
    here = tmp_path / "here"
    here.mkdir()
    cut = watch(here)
    with contextlib.closing(DiskStore(here / "store", None)) as store:
        store.pin(lab.namespace, lab.key(1))
        after = cut()
    assert PayloadFiles(after / "store").pinned.all() == {(lab.namespace, lab.key(1))}
