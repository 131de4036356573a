"""Ctrl-C at the worst moments: exit status 130, one sentence, soon; the store intact."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from cli.lab import ingest_args, invoke, start, write_documents

QUESTION = "What is the topic of document 2?"

#: Say on stderr when the moment has come, and make it last.
SLOW_ENCODING = """
import sys, time
from blendrag.model.adapter import ModelAdapter
encode, calls = ModelAdapter.encode, []
def slow(self, prefix_ids, chunk_ids):
    calls.append(0)
    if len(calls) == 5: print("NOW", file=sys.stderr, flush=True)
    time.sleep(0.2)
    return encode(self, prefix_ids, chunk_ids)
ModelAdapter.encode = slow
"""
STUCK_LOADING = """
import sys, time, transformers
def stuck(*args, **kwargs):
    print("NOW", file=sys.stderr, flush=True)
    time.sleep(600)
transformers.AutoModelForCausalLM.from_pretrained = stuck
"""
STUCK_BENCH = """
import sys, time
import blendrag.lab.bench.geometry
def stuck(*args, **kwargs):
    print("NOW", file=sys.stderr, flush=True)
    time.sleep(600)
blendrag.lab.bench.geometry.bench_adapter = stuck
"""
SLOW_DECODING = """
import sys, time
from blendrag.engine.stream import StopWhenDone
check, calls = StopWhenDone.__call__, []
def slow(self, *args, **kwargs):
    calls.append(0)
    if len(calls) == 3: print("NOW", file=sys.stderr, flush=True)
    time.sleep(0.05)
    return check(self, *args, **kwargs)
StopWhenDone.__call__ = slow
"""


def interrupt(process: subprocess.Popen[str], times: int = 1) -> tuple[str, str, float]:
    """Wait for the moment, press Ctrl-C; stdout, the rest of stderr, and the seconds it took."""
    assert process.stderr is not None
    for line in process.stderr:
        if line == "NOW\n":
            break
    else:
        pytest.fail(f"ended before it could be interrupted, with {process.wait()}")
    began = time.perf_counter()
    for _ in range(times):
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    stdout, stderr = process.communicate(timeout=60)
    return stdout, stderr, time.perf_counter() - began


def one_sentence(stderr: str) -> str:
    lines = stderr.strip().splitlines()
    assert len(lines) == 1, stderr
    assert lines[0].startswith("interrupted: ")
    return lines[0]


def test_ctrl_c_during_ingest_prints_totals_and_the_next_run_goes_on(
    model_dir: Path, tmp_path: Path
) -> None:
    docs, store = write_documents(tmp_path / "docs", documents=6), tmp_path / "store"
    args = ingest_args(docs, model_dir, store, "--json")
    process = start(*args, before=SLOW_ENCODING)
    stdout, stderr, _ = interrupt(process)
    assert process.returncode == 130
    assert "repeat the command" in one_sentence(stderr)
    totals = json.loads(stdout)
    assert totals["interrupted"] is True
    assert 0 < totals["chunks_computed"] < 18
    rest = json.loads(invoke(*args).stdout)
    assert rest["documents"] == 6
    assert rest["chunks_skipped"] >= totals["chunks_computed"]
    asked = invoke("ask", QUESTION, "--store", str(store), "--max-new-tokens", "1", "--json")
    assert json.loads(asked.stdout)["metrics"]["reused_tokens"] > 0


@pytest.mark.parametrize("command", ["ask", "ingest"])
def test_ctrl_c_during_load_does_not_wait_for_the_model(
    command: str, model_dir: Path, docs: Path, ingested: Path, tmp_path: Path
) -> None:
    args = (
        ["ask", QUESTION, "--store", str(ingested), "--json"]
        if command == "ask"
        else ingest_args(docs, model_dir, tmp_path / "store")
    )
    process = start(*args, before=STUCK_LOADING)
    stdout, stderr, seconds = interrupt(process)
    assert process.returncode == 130
    assert seconds < 8
    assert "Traceback" not in stderr
    assert stderr.splitlines()[-1].startswith("interrupted: ")
    if command == "ask":
        one_sentence(stderr)
        assert stdout == ""


def test_a_second_ctrl_c_leaves_at_once(ingested: Path) -> None:
    process = start("ask", QUESTION, "--store", str(ingested), before=STUCK_LOADING)
    _, stderr, seconds = interrupt(process, times=2)
    assert process.returncode == 130
    assert seconds < 2
    one_sentence(stderr)


def test_ctrl_c_during_a_benchmark_is_one_sentence() -> None:
    process = start("bench", "ttft", "--geometry", "tiny", before=STUCK_BENCH)
    stdout, stderr, seconds = interrupt(process)
    assert process.returncode == 130
    assert seconds < 8
    assert "the measurement was abandoned" in one_sentence(stderr)
    assert stdout == ""


def test_ctrl_c_during_decode_stops_and_leaves_the_store_intact(ingested: Path) -> None:
    args = ("ask", QUESTION, "--store", str(ingested), "--max-new-tokens", "400")
    process = start(*args, before=SLOW_DECODING)
    _, stderr, seconds = interrupt(process)
    assert process.returncode == 130
    assert seconds < 5
    assert "the store is intact" in one_sentence(stderr)
    asked = invoke(*args[:4], "--max-new-tokens", "1", "--json")
    assert asked.exit_code == 0
    assert json.loads(asked.stdout)["metrics"]["reused_tokens"] > 0
