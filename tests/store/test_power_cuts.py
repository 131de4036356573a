"""Power cuts with several processes: an acknowledged chunk does not depend on another's pending sync."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from blendrag.store.disk import DiskStore
from blendrag.store.payload_files import PayloadFiles
from lab.soak.store import remote_power
from lab.soak.store.audit import SoakReport, audit, make_chunks
from lab.soak.store.power import Disk


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


def test_a_power_cut_of_a_shared_directory_leaves_whole_objects_and_what_was_acknowledged(tmp_path):
    pytest.importorskip("obstore")
    report = SoakReport()
    remote_power.cut_everywhere(tmp_path, report, mixtures=1, seed=1, stride=10)
    report.check()
    assert report.done["power cuts"] > 25
