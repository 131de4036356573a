import pytest
import xxhash
from soak.mutations import Fuzzing
from soak.report import Report, checked

from blendrag.store.reader import DiskReader


@pytest.fixture
def fuzzing(tmp_path):
    return Fuzzing(tmp_path, seed=1)


def test_damaged_payloads_are_read_exactly_or_missed(fuzzing):
    report = Report()
    fuzzing.run_on_payloads(report, 400)
    checked(report)


def test_a_damaged_index_costs_a_miss_at_most(fuzzing):
    report = Report()
    fuzzing.run_on_index(report, 60)
    checked(report)


def test_the_fuzzer_notices_a_reader_that_believes_what_it_reads(fuzzing, monkeypatch):
    fill = DiskReader._fill

    class Credulous:
        """Whatever the digest is, it is the one expected."""

        def __init__(self, seed=0):
            pass

        def update(self, data):
            pass

        def intdigest(self):
            return Always()

    class Always:
        def __ne__(self, other):
            return False

    def believe(reader, layer, buffers):
        with monkeypatch.context() as patch:
            patch.setattr(xxhash, "xxh3_64", Credulous)
            return fill(reader, layer, buffers)

    monkeypatch.setattr(DiskReader, "_fill", believe)
    report = Report()
    fuzzing.run_on_payloads(report, 60)
    assert report.failed["wrong KV"] > 0


def test_the_fuzzer_notices_a_reader_that_dies(fuzzing, monkeypatch):
    def fail(*args):
        raise ZeroDivisionError

    report = Report()
    with monkeypatch.context() as patch:
        patch.setattr("blendrag.store.reading.DiskReading._doubt", fail)
        fuzzing.run_on_payloads(report, 60)
    assert report.failed["reader crashes"] == 1
    assert "ZeroDivisionError" in report.details[0]
