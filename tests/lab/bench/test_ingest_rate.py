"""The ingest bench: its figures, the corpus ingested twice, and interruption."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NoReturn

import pytest

from blendrag.engine.kv_writer import KVWriter
from blendrag.errors import StoreFullError
from blendrag.lab.bench.ingest_rate import ingest
from cli.commands import interrupt, start
from lab.bench.small import measured, timed

RATES = ("--geometry", "tiny", "--chunks", "1", "--chunk-tokens", "64")
CORPUS = ("--reingest-chunks", "2", "--reingest-chunk-tokens", "64")
#: Reports on stderr that the first chunk is about to be encoded, and makes that last.
SLOW_INGEST = """
import sys, time
from blendrag.engine.kv_writer import KVWriter
encode = KVWriter._encode
def slow(*args):
    print("NOW", file=sys.stderr, flush=True)
    time.sleep(60)
    return encode(*args)
KVWriter._encode = slow
"""


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    return measured("ingest", *RATES, *CORPUS)


def test_rates_are_of_prefill_of_encoding_and_of_the_whole_ingest(figures: dict[str, Any]) -> None:
    assert min(figures[f"{name}_tokens_per_s"] for name in ("prefill", "encode", "ingest")) > 0
    expected = figures["ingest_tokens_per_s"] / figures["prefill_tokens_per_s"]
    assert figures["relative_rate"] == pytest.approx(expected)


def test_a_corpus_is_ingested_twice(figures: dict[str, Any]) -> None:
    assert figures["corpus_chunks"] >= 2
    expected = figures["first_ingest_s"] / figures["second_ingest_s"]
    assert figures["reingest_speedup"] == pytest.approx(expected)


@pytest.mark.slow
def test_both_ingests_can_be_processes() -> None:
    fields = measured("ingest", *RATES, *CORPUS, "--from-shell", "--dtype", "float32")
    assert fields["corpus_chunks"] >= 2
    assert min(fields["first_ingest_s"], fields["second_ingest_s"]) > 0


@pytest.mark.parametrize("end", [KeyboardInterrupt(), StoreFullError("there is no room")], ids=repr)
def test_an_interrupted_ingest_ends_the_bench_and_leaves_no_files(
    end: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_short(*args: object) -> NoReturn:
        raise end

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(KVWriter, "_encode", cut_short)
    with pytest.raises(type(end)) as raised:
        ingest(timed(), 1, 64, 0)
    assert str(raised.value) == str(end)
    assert not list(tmp_path.glob("blendrag-*"))


@pytest.mark.slow
def test_ctrl_c_prints_no_figures_and_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    process = start(
        "bench", "ingest", *RATES, "--reingest-chunks", "0", "--json", before=SLOW_INGEST
    )
    stdout, stderr, _ = interrupt(process)
    assert process.returncode == 130
    assert stdout == ""
    assert "Traceback" not in stderr
    assert list(tmp_path.iterdir()) == []
