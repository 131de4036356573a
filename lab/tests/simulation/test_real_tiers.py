"""The simulated tiers against the store's own, over the same requests."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np
import pytest

from blendrag.store.disk import DiskStore
from blendrag.store.memory import MemoryStore
from blendrag.store.payload import frame
from blendrag.store.remote.tier import RemoteTier
from blendrag.store.tiered import KVStore
from lab.simulation.popularity import Demand
from lab.simulation.replicas import Lru
from store.kv_lab import Lab

pytest.importorskip("obstore")

CHUNKS, IN_MEMORY, ON_DISK = 40, 4, 12


def real_tiers(folder: Path, requests: list[list[int]]) -> list[str]:
    """The tier of each chunk in its turn, from a store whose remote has all of them."""
    (folder / "bucket").mkdir()
    remote = RemoteTier(f"file://{folder / 'bucket'}", None, 5.0)
    with contextlib.closing(DiskStore(folder / "first", 1 << 30)) as first:
        for number in range(CHUNKS):
            Lab.put(first, number)
            opened = first.payload(Lab.namespace, Lab.key(number))
            assert opened is not None
            with opened as payload:
                remote.put(*payload)
    memory = MemoryStore(IN_MEMORY * Lab.kv(0).size_bytes)
    disk = DiskStore(folder / "store", ON_DISK * frame(Lab.layout, Lab.tokens).file_bytes)
    tiers = []
    with contextlib.closing(Lab.agree(KVStore(memory, disk, remote))) as store:
        for chunks in requests:
            readers = [Lab.open(store, number) for number in chunks]
            tiers += [reader.tier for reader in readers]
            for reader in readers:
                Lab.read(reader)
                reader.close()
            store.drain()
    return tiers


def simulated_tiers(requests: list[list[int]]) -> list[str]:
    memory, disk, tiers = Lru(IN_MEMORY), Lru(ON_DISK), []
    for chunks in requests:
        hits = [(memory.use(number), disk.use(number)) for number in chunks]
        memory.evict()
        disk.evict()
        tiers += ["memory" if m else "disk" if d else "remote" for m, d in hits]
    return tiers


def test_chunks_come_from_the_tiers_that_the_simulation_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    requests = Demand(CHUNKS, 1.0, 2).draw(150, np.random.default_rng(0)).tolist()
    real, simulated = real_tiers(tmp_path, requests), simulated_tiers(requests)
    assert set(real) == {"memory", "disk", "remote"}
    assert real == simulated
