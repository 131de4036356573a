"""Damaged payloads are read exactly or missed; a damaged index costs a miss at most."""

import pytest
import xxhash
from soak.audit import Report
from soak.fuzz import Fuzzing

from blendrag.store.reader import DiskReader


@pytest.fixture
def fuzzing(tmp_path):
    return Fuzzing(tmp_path, seed=1)


def test_damaged_payloads_are_read_exactly_or_missed(fuzzing):
    report = Report()
    fuzzing.run_batch(report, 300, fuzzing.mutate_payloads)
    report.check()


def test_a_damaged_index_costs_a_miss_at_most(fuzzing):
    report = Report()
    fuzzing.run_batch(report, 50, fuzzing.mutate_index)
    report.check()


def test_the_fuzzer_notices_a_reader_that_verifies_nothing(fuzzing, monkeypatch):
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
    report = Report()
    fuzzing.run_batch(report, 60, fuzzing.mutate_payloads)
    assert report.failed["wrong KV"] > 0


def test_the_fuzzer_notices_a_reader_that_crashes(fuzzing, monkeypatch):
    def fail(*args):
        raise ZeroDivisionError

    monkeypatch.setattr(DiskReader, "read_layer", fail)
    report = Report()
    fuzzing.run_batch(report, 60, fuzzing.mutate_payloads)
    assert report.failed["reader crashes"] == 1
    assert "ZeroDivisionError" in report.details[0]
