"""Power cuts between two processes: what one acknowledges does not hang on what another was about to sync."""

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


class Power:
    """What of a directory is durable, as this process syncs it, and what is left when the power goes.

    SQLite's own syncs are not seen: all that it wrote since watching began is lost.
    """

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._disk = Disk(root)
        self._after = root.with_name("after")
        monkeypatch.setattr(os, "fsync", self._sync)

    def _sync(self, fd: int) -> None:
        self._disk.sync(Path(os.readlink(f"/proc/self/fd/{fd}")))

    def cut(self) -> Path:
        """Of all that was not synced, nothing survives."""
        self._disk.cut(self._after, lambda: False)
        return self._after


@pytest.fixture
def power(monkeypatch):
    return lambda root: Power(root, monkeypatch)


@pytest.fixture
def together(lab):
    """Chunks that lie in one directory."""
    numbers = [n for n in range(2000) if lab.key(n)[:2] == lab.key(1)[:2]][:3]
    make_chunks(numbers)
    return numbers


def killed_before_it_syncs_the_way(lab, root, number, fork):
    """Another process puts a chunk: the directory is made, if need be, and nothing above it synced."""
    kv = lab.kv(number)

    def put():
        os.fsync = lambda fd: None
        PayloadFiles._sync_way = lambda *args: os._exit(0)
        DiskStore(root, None).put(lab.namespace, lab.key(number), kv)

    assert os.waitpid(fork(put), 0)[1] == 0


@pytest.mark.parametrize("is_heeded", [True, False])
def test_a_chunk_outlives_that_others_remove_its_directory_and_make_it_again(
    lab, root, together, power, fork, monkeypatch, is_heeded
):
    """Unless it were removed although somebody who is writing knows it to be durable."""
    first, second, third = together
    store = DiskStore(root, PLENTY)
    lab.put(store, first)
    watched = power(root)
    if not is_heeded:
        monkeypatch.setattr(WriterClaim, "is_alone", lambda self: True)
    maintenance.clear(root)
    killed_before_it_syncs_the_way(lab, root, second, fork)
    lab.put(store, third)
    verdict = audit(watched.cut(), [third], together)
    assert verdict.lost == (() if is_heeded else (third,))
    assert not verdict.wrong
    store.close()


def test_directories_stay_while_another_one_writes_and_go_with_the_next_clear(
    lab, root, make_store
):
    store = make_store()
    lab.put(store, 1)
    directory = lab.file(store, 1).parent
    assert maintenance.clear(root).removed == 1
    assert list(directory.iterdir()) == []
    store.close()
    maintenance.clear(root)
    assert list((root / "kv").iterdir()) == []


def test_what_was_durable_before_a_process_began_to_write_is_synced_again(
    lab, root, together, power, fork
):
    """It had no say in whether directories are removed."""
    first, second, third = together
    with contextlib.closing(DiskStore(root, PLENTY)) as before:
        lab.put(before, first)
    store = DiskStore(root, PLENTY)
    lab.put(store, first)  # is there: kept, by one who does not write
    watched = power(root)
    maintenance.clear(root)
    assert list((root / "kv").iterdir()) == []
    killed_before_it_syncs_the_way(lab, root, second, fork)
    lab.put(store, third)
    assert audit(watched.cut(), [third], together).lost == ()
    store.close()


def test_a_chunk_that_a_recovery_found_halfway_is_durable_once_it_is_indexed(
    lab, root, make_store, power, monkeypatch
):
    """Who asks whether it is there goes by the index, and puts nothing then."""
    make_chunks([1])
    store, other = make_store(), make_store()
    watched = power(root)

    class PowerCut(Exception):
        pass

    def too_late(name):
        other.recover()
        assert lab.has(other, 1)
        raise PowerCut(watched.cut())

    monkeypatch.setattr(store._files, "sync", too_late)
    with pytest.raises(PowerCut) as cut:
        lab.put(store, 1)
    (after,) = cut.value.args
    assert audit(after, [1], [1]).is_good


def test_a_pin_in_a_new_store_survives_a_power_cut(lab, tmp_path, power):
    here = tmp_path / "here"
    here.mkdir()
    watched = power(here)
    with contextlib.closing(DiskStore(here / "store", None)) as store:
        store.pin(lab.namespace, lab.key(1))
        after = watched.cut()
    assert PayloadFiles(after / "store").pinned.all() == {(lab.namespace, lab.key(1))}
