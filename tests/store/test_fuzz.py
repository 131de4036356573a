"""Damaged payloads are read exactly or missed; a damaged index costs a miss at most."""

import pytest
import xxhash

from blendrag.store.reader import DiskReader
from lab.soak.store.audit import SoakReport
from lab.soak.store.fuzz import StoreFuzzing


@pytest.fixture
def fuzz(tmp_path):
    """``fuzz("payloads", 60)``: the report on so many mutations."""
    fuzzing, report = StoreFuzzing(tmp_path, seed=1), SoakReport()

    def run(what, count):
        fuzzing.run_batch(report, count, getattr(fuzzing, f"mutate_{what}"))
        return report

    return run


def test_damaged_payloads_are_read_exactly_or_missed(fuzz):
    fuzz("payloads", 60).check()


def test_a_damaged_index_costs_a_miss_at_most(fuzz):
    fuzz("index", 15).check()


def test_the_fuzzer_notices_a_reader_that_verifies_nothing(fuzz, monkeypatch):
    class AnyDigest:
        """Equal to every expected digest."""

        def __init__(self, seed=0):
            pass

        def update(self, data):
            pass

        def intdigest(self):
            return self

        def __ne__(self, other):
            return False

    monkeypatch.setattr(xxhash, "xxh3_64", AnyDigest)
    assert fuzz("payloads", 30).failed["wrong KV"] > 0


def test_the_fuzzer_notices_a_reader_that_crashes(fuzz, monkeypatch):
    monkeypatch.setattr(DiskReader, "read_layer", lambda *args: 1 / 0)
    report = fuzz("payloads", 10)
    assert report.failed["reader crashes"] == 1
    assert "ZeroDivisionError" in report.details[0]
