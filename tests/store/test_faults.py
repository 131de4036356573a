import contextlib
import os

import pytest
from soak.faults import Bench, cut_everywhere, fail_everything, faults_of
from soak.report import Report, checked
from soak.scenarios import SCENARIOS
from soak.tracer import Call, unavailable

from blendrag.errors import StoreError
from blendrag.store import DiskStore

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
#: Of each operation's thousands; ``make soak`` has every one.
FAULTS = 20


@pytest.fixture(autouse=True)
def fast_disk():
    """fsync as it is: here it is what all depends on."""


@pytest.mark.parametrize("name", BY_NAME)
def test_a_failing_system_call_loses_nothing_and_leaves_the_store_usable(tmp_path, name):
    report = Report()
    fail_everything(tmp_path, (BY_NAME[name],), report, FAULTS)
    checked(report)
    assert report.done["faults"] > FAULTS // 2


@pytest.mark.parametrize("name", ["put", "evict", "recover after a crash"])
def test_a_power_cut_loses_nothing_that_was_acknowledged(tmp_path, name):
    report = Report()
    cut_everywhere(tmp_path, (BY_NAME[name],), report, mixtures=0, seed=1, stride=5)
    checked(report)
    assert report.done["power cuts"] > 5


def test_calls_of_sqlite_are_seen_as_well_as_ours(tmp_path):
    calls = Bench(tmp_path).calls(BY_NAME["put"])
    seen = {(call.name, call.path.rpartition("/")[2].rpartition(".")[2]) for call in calls}
    ours = {("write", "part"), ("fsync", "part"), ("rename", "kv"), ("statfs", "store")}
    assert ours <= seen
    assert {("pwrite", "db-wal"), ("fcntl", "db-shm")} <= seen
    calls = Bench(tmp_path).calls(BY_NAME["close"])
    assert ("fdatasync", "store/index/cache.db") in {(call.name, call.path) for call in calls}


def test_a_put_that_does_not_wait_for_the_disk_is_found_out(tmp_path, monkeypatch):
    """With this harness, an fsync that is not made is a chunk that is lost."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    report = Report()
    cut_everywhere(tmp_path, (BY_NAME["put"],), report, mixtures=0, seed=1, stride=10)
    assert report.failed["acknowledged lost"] > 0


def test_a_put_that_acknowledges_what_it_could_not_write_is_found_out(tmp_path, monkeypatch):
    put, acknowledged = DiskStore.put, set()

    def careless(store, namespace, key, kv):
        if key not in acknowledged:
            acknowledged.add(key)
            with contextlib.suppress(StoreError):
                put(store, namespace, key, kv)

    bench, scenario = Bench(tmp_path), BY_NAME["put"]
    call = next(call for call in bench.calls(scenario) if call.name == "fsync")
    faults = [fault for fault in faults_of(call) if fault.what > 0]
    assert not any(bench.run(scenario, fault).lost for fault in faults)
    monkeypatch.setattr(DiskStore, "put", careless)
    assert all(bench.run(scenario, fault).lost for fault in faults)


def test_an_error_without_a_name_is_found_out(tmp_path, monkeypatch):
    monkeypatch.setattr("blendrag.store.disk_errors._NO_SPACE", ())
    monkeypatch.setattr(
        "blendrag.store.writing.named_errors", lambda *args: contextlib.nullcontext()
    )
    bench, scenario = Bench(tmp_path), BY_NAME["put"]
    call = next(call for call in bench.calls(scenario) if call.name == "fsync")
    complaints = bench.run(scenario, faults_of(call)[0]).complaints
    assert any("no named error: OSError" in text for text in complaints)


def test_what_can_happen_to_a_call_depends_on_the_call():
    def kinds(name, creates=False):
        return {str(fault).split()[0] for fault in faults_of(Call(0, name, "x", creates))}

    assert kinds("pread") == {"EIO", "kill", "half"}
    assert kinds("rename") == {"EIO", "kill", "ENOSPC"}
    assert kinds("open", creates=True) == {"EIO", "kill", "EMFILE", "ENOSPC"}
    assert kinds("unlock") == {"kill"}
