"""The ingest bench: its figures, and interruption."""

from __future__ import annotations

from typing import NoReturn

import pytest

import writers
from blendrag.cli import interrupt as cli_interrupt
from blendrag.engine.kv_writer import KVWriter
from blendrag.errors import StoreFullError
from blendrag.model.writer import FittedWriter
from blendrag_lab.bench.ingest_rate import ingest
from blendrag_lab.bench.scratch import scratch
from blendrag_lab.bench.workload import PREFIX_IDS
from lab.tests.bench.small import measured, timed

RATES = ("--geometry", "tiny", "--chunks", "1", "--chunk-tokens", "64")


def test_the_rate_of_an_ingest_is_compared_with_prefill():
    figures = measured("ingest", *RATES)
    prefill, whole = (figures[f"{name}_tokens_per_s"] for name in ("prefill", "ingest"))
    assert min(prefill, whole) > 0
    assert figures["relative_rate"] == pytest.approx(whole / prefill)
    assert figures["writer_relative_time"] is None


def test_encoding_with_a_writer_is_timed_beside_encoding_without(tmp_path, monkeypatch):
    active, within = [], FittedWriter.active

    def counted(*given):
        active.append(given[1:])
        return within(*given)

    monkeypatch.setattr(FittedWriter, "active", counted)
    folder = writers.writer(timed().adapter.model, tmp_path)
    figures = measured("ingest", *RATES, "--writer", str(folder))
    assert figures["writer_relative_time"] > 0
    assert active.count((len(PREFIX_IDS), 64)) == 2  # a round, and one that warms up


@pytest.mark.parametrize("end", [KeyboardInterrupt(), StoreFullError("there is no room")], ids=repr)
def test_an_interrupted_ingest_ends_the_bench_and_leaves_no_files(end, tmp_path, monkeypatch):
    def cut_short(*args: object) -> NoReturn:
        raise end

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(KVWriter, "_encode", cut_short)
    with pytest.raises(type(end)) as raised:
        ingest(timed(), 1, 64)
    assert str(raised.value) == str(end)
    assert not list(tmp_path.glob("blendrag-*"))


def test_ctrl_c_that_ends_the_process_at_once_leaves_no_files(monkeypatch):
    monkeypatch.setattr(cli_interrupt, "cleanups", [])
    with scratch() as folder:
        (folder / "payload").write_bytes(b"KV")
        for remove in cli_interrupt.cleanups:
            remove()
        assert not folder.exists()
    assert cli_interrupt.cleanups == []
