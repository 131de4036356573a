"""Power cuts between two processes: what one acknowledges does not hang on what another was about to sync."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from soak.audit import audit, make_chunks
from soak.power import Disk

from blendrag.store import DiskStore
from blendrag.store.payload_files import PayloadFiles


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
