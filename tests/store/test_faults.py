"""System calls fail one by one and the power goes: nothing acknowledged is lost, the store stays usable."""

import contextlib
import errno
import os

import pytest

from blendrag.errors import StoreError
from blendrag.store.disk import DiskStore
from lab.soak.store.audit import SoakReport
from lab.soak.store.corpus_faults import CORPUS_OPERATIONS, CorpusOperationRunner, fail_corpus
from lab.soak.store.faults import (
    OPERATIONS,
    OperationRunner,
    cut_everywhere,
    fail_everything,
    faults_of,
)
from lab.soak.store.tracer import unavailable

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

#: Of the thousands of each operation; ``make soak`` runs all.
FAULTS = 2


@pytest.fixture(autouse=True)
def fast_disk():
    """Real fsync, which is what these tests are about."""


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_failing_system_call_loses_nothing_and_leaves_the_store_usable(tmp_path, name):
    report = SoakReport()
    fail_everything(tmp_path, name, report, FAULTS)
    report.check()
    assert report.done["faults"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["put", "evict", "recover after a crash"])
def test_a_power_cut_loses_nothing_that_was_acknowledged(tmp_path, name):
    report = SoakReport()
    cut_everywhere(tmp_path, name, report, mixtures=0, seed=1, stride=40)
    report.check()
    assert report.done["power cuts"] > 2


@pytest.mark.slow
@pytest.mark.parametrize("name", CORPUS_OPERATIONS)
def test_a_failing_system_call_loses_no_document_and_leaves_the_corpus_usable(tmp_path, name):
    report = SoakReport()
    fail_corpus(tmp_path, name, report, FAULTS)
    report.check()
    assert report.done["corpus faults"] > 0


def test_a_corpus_that_the_disk_does_not_find_is_one_named_error(tmp_path):
    bench = CorpusOperationRunner(tmp_path, CORPUS_OPERATIONS["read documents"])
    stats = [
        fault
        for call in bench.calls()
        if call.name == "stat"
        for fault in faults_of(call)
        if fault.what == errno.EIO
    ]
    assert all(bench.run(fault).is_good for fault in stats[:4])


def test_calls_of_sqlite_are_traced_too(tmp_path):
    calls = OperationRunner(tmp_path, OPERATIONS["put"]).calls()
    seen = {(call.name, call.path.rpartition(".")[2]) for call in calls}
    assert {("write", "part"), ("fsync", "part"), ("rename", "kv"), ("pwrite", "db-wal")} <= seen


@pytest.mark.slow
def test_a_missing_fsync_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    report = SoakReport()
    cut_everywhere(tmp_path, "put", report, mixtures=0, seed=1, stride=40)
    assert report.failed["acknowledged lost"] > 0


@pytest.mark.slow
def test_a_put_that_hides_its_failure_and_an_unnamed_error_are_noticed(tmp_path, monkeypatch):
    put, acknowledged = DiskStore.put, set()

    def careless(store, namespace, key, kv):
        if key not in acknowledged:
            acknowledged.add(key)
            with contextlib.suppress(StoreError):
                put(store, namespace, key, kv)

    def fail(*args):
        raise OSError("Input/output error")

    bench = OperationRunner(tmp_path, OPERATIONS["put"])
    call = next(call for call in bench.calls() if call.name == "fsync")
    fault = next(fault for fault in faults_of(call) if fault.what > 0)
    assert not bench.run(fault).lost
    monkeypatch.setattr(DiskStore, "put", careless)
    assert bench.run(fault).lost
    monkeypatch.setattr(DiskStore, "put", fail)
    assert any("no named error: OSError" in text for text in bench.run(fault).complaints)
