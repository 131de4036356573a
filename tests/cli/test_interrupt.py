"""Ctrl-C: exit status 130, one sentence, soon, and the store stays intact."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cli.commands import (
    QUESTION,
    ingest_args,
    interrupt,
    interrupted_sentence,
    invoke,
    reused_tokens,
    start,
    write_documents,
)

#: Print NOW when the third chunk is encoded, and make the encoding of the chunks from there on last.
SLOW_ENCODING = """
import sys, time
from blendrag.model.adapter import ModelAdapter
encode, calls = ModelAdapter.encode, []
def slow(*args, **kwargs):
    calls.append(0)
    if len(calls) == 3: print("NOW", file=sys.stderr, flush=True)
    if len(calls) >= 3: time.sleep(2)
    return encode(*args, **kwargs)
ModelAdapter.encode = slow
"""
#: Python code that ignores KeyboardInterrupt, as native code does.
DEAF = """
import signal, sys, time
from blendrag.cli import interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
interrupt.install()
interrupt.expect("it was stuck", grace_s={grace_s})
moments = ["NOW"]
while True:
    try:
        while moments: print(moments.pop(), file=sys.stderr, flush=True)
        time.sleep(0.01)  # a long one may miss a signal that comes just before it
    except KeyboardInterrupt:
        if {times} > 1: moments.append("NOW")
"""


@pytest.mark.parametrize(("grace_s", "times"), [(0.3, 1), (600.0, 2)])
def test_native_code_that_does_not_return_is_left(grace_s: float, times: int) -> None:
    """At the end of the grace period, or at once after a second Ctrl-C."""
    process = subprocess.Popen(
        [sys.executable, "-c", DEAF.format(grace_s=grace_s, times=times)],
        stderr=subprocess.PIPE,
        text=True,
    )
    _, stderr = interrupt(process, times)
    assert process.returncode == 130
    assert interrupted_sentence(stderr) == "interrupted: it was stuck"


@pytest.mark.slow
def test_ctrl_c_during_ingest_prints_totals_and_the_next_run_goes_on(
    model_dir: Path, tmp_path: Path
) -> None:
    docs, store = write_documents(tmp_path / "docs"), tmp_path / "store"
    args = ingest_args(docs, model_dir, store, "--json")
    process = start(*args, before=SLOW_ENCODING)
    stdout, stderr = interrupt(process)
    assert process.returncode == 130
    assert "repeat the command" in interrupted_sentence(stderr)
    totals = json.loads(stdout)
    assert totals["interrupted"] is True
    assert 0 < totals["chunks_computed"] < 9
    rest = json.loads(invoke(*args).stdout)
    assert rest["documents"] == 3
    assert rest["chunks_skipped"] >= totals["chunks_computed"]


def test_ctrl_c_during_decode_stops_and_leaves_the_store_intact(
    ingested: Path, ctrl_c_while_decoding: None
) -> None:
    result = invoke("ask", QUESTION, "--store", ingested, "--max-new-tokens", "400")
    assert result.exit_code == 130
    assert "the store is intact" in interrupted_sentence(result.stderr)
    assert reused_tokens(ingested) > 0
