"""The ingest bench: what a writer costs; and temporary files of benches."""

from __future__ import annotations

import writers
from blendrag.cli import interrupt as cli_interrupt
from blendrag.model.writer import FittedWriter
from blendrag_lab.bench.scratch import scratch
from blendrag_lab.bench.workload import PREFIX_IDS
from lab.tests.bench.small import measured, timed


def test_encoding_with_a_writer_is_timed_beside_encoding_without(tmp_path, monkeypatch):
    active, within = [], FittedWriter.active

    def counted(*given):
        active.append(given[1:])
        return within(*given)

    monkeypatch.setattr(FittedWriter, "active", counted)
    folder = writers.writer(timed().adapter.model, tmp_path)
    given = ("--geometry", "tiny", "--chunks", "1", "--chunk-tokens", "64")
    figures = measured("ingest", *given, "--writer", str(folder))
    ratio = figures["written"]["median"] / figures["plain"]["median"]
    assert figures["writer_relative_time"] == ratio > 0
    assert active.count((len(PREFIX_IDS), 64)) == 2  # a round, and one that warms up


def test_ctrl_c_that_ends_the_process_at_once_leaves_no_files(monkeypatch):
    monkeypatch.setattr(cli_interrupt, "cleanups", [])
    with scratch() as folder:
        (folder / "payload").write_bytes(b"KV")
        for remove in cli_interrupt.cleanups:
            remove()
        assert not folder.exists()
    assert cli_interrupt.cleanups == []
