"""The ingest bench: its figures, the corpus ingested twice, and interruption."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NoReturn

import pytest

import writers
from blendrag.cli import interrupt as cli_interrupt
from blendrag.engine import BlendEngine
from blendrag.engine.kv_writer import KVWriter
from blendrag.errors import StoreFullError
from blendrag.model.writer import FittedWriter
from blendrag_lab.bench import ingest_rate
from blendrag_lab.bench.ingest_rate import ingest
from blendrag_lab.bench.scratch import scratch
from blendrag_lab.bench.workload import PREFIX_IDS
from blendrag_ray import ingest as cluster
from blendrag_ray import ray_session
from cli.commands import invoke
from lab.tests.bench.small import measured, timed

RATES = ("--geometry", "tiny", "--chunks", "1", "--chunk-tokens", "64")
CORPUS = ("--reingest-chunks", "2", "--reingest-chunk-tokens", "64")


def test_rates_are_measured_and_a_corpus_is_ingested_twice():
    figures = measured("ingest", *RATES, *CORPUS)
    prefill, _, whole = rates = [
        figures[f"{name}_tokens_per_s"] for name in ("prefill", "encode", "ingest")
    ]
    assert min(rates) > 0
    assert figures["relative_rate"] == pytest.approx(whole / prefill)
    assert figures["corpus_chunks"] >= 2
    speedup = figures["first_ingest_s"] / figures["second_ingest_s"]
    assert figures["reingest_speedup"] == pytest.approx(speedup)


def test_encoding_with_a_writer_is_timed_beside_encoding_without(tmp_path, monkeypatch):
    active, within = [], FittedWriter.active

    def counted(*given):
        active.append(given[1:])
        return within(*given)

    monkeypatch.setattr(FittedWriter, "active", counted)
    folder = writers.writer(timed().adapter.model, tmp_path)
    figures = measured("ingest", *RATES, "--reingest-chunks", "0", "--writer", str(folder))
    assert figures["writer_relative_time"] > 0
    assert active.count((len(PREFIX_IDS), 64)) == 2  # a round, and one that warms up


def test_ingest_on_ray_is_compared_with_one_process_in_the_same_rounds(monkeypatch):
    asked = []

    def on_ray(engine: BlendEngine, paths: Any, watch: Any, workers: int) -> Any:
        asked.append((engine.root, workers))
        return engine.ingest(paths, watch)

    monkeypatch.setattr(ingest_rate, "require_ray", lambda: None)
    monkeypatch.setattr(cluster, "ingest_on_ray", on_ray)
    monkeypatch.setattr(ray_session, "ray_session", lambda cpus: nullcontext())
    monkeypatch.setattr(ingest_rate, "MOST_WAITING", 10**6)
    corpus = ("--reingest-chunks", "4", "--reingest-chunk-tokens", "64", "--rounds", "1")
    figures = measured("ingest", *RATES, *corpus, "--ray-workers", "2")
    assert len(asked) == 1
    assert {workers for _, workers in asked} == {figures["ray_workers"]} == {2}
    assert min(figures["ray_tokens_per_s"], figures["one_process_tokens_per_s"]) > 0
    assert figures["ray_relative_rate"] > 0
    monkeypatch.setattr(ingest_rate, "MOST_WAITING", 1)
    refused = invoke("bench", "ingest", *RATES, *corpus, "--ray-workers", "2")
    assert "give more --reingest-chunks" in refused.stderr


@pytest.mark.parametrize("end", [KeyboardInterrupt(), StoreFullError("there is no room")], ids=repr)
def test_an_interrupted_ingest_ends_the_bench_and_leaves_no_files(end, tmp_path, monkeypatch):
    def cut_short(*args: object) -> NoReturn:
        raise end

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(KVWriter, "_encode", cut_short)
    with pytest.raises(type(end)) as raised:
        ingest(timed(), 1, 64, 0)
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
