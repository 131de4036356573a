"""Ctrl-C: exit status 130, one sentence, soon, and the store stays intact."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from blendrag.model.adapter import ModelAdapter
from cli.commands import QUESTION, interrupted_sentence, invoke, printed, reused_tokens

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


def interrupt(process: subprocess.Popen[str], times: int = 1) -> tuple[str, str]:
    """Press Ctrl-C after each of so many lines NOW; stdout, and the rest of stderr."""
    assert process.stderr is not None
    for _ in range(times):
        for line in process.stderr:
            if line == "NOW\n":
                break
        else:
            pytest.fail(f"ended before it could be interrupted, with {process.wait()}")
        process.send_signal(signal.SIGINT)
    return process.communicate(timeout=120)


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


@contextmanager
def pressed_at_third_chunk(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ctrl-C in this process when the third chunk is encoded. Chunks from there on take long."""
    encode, calls = ModelAdapter.encode, itertools.count(1)

    def press(*args: Any, **kwargs: Any) -> Any:
        call = next(calls)
        if call == 3:
            os.kill(os.getpid(), signal.SIGINT)
        if call >= 3:
            time.sleep(0.5)
        return encode(*args, **kwargs)

    patch.setattr(ModelAdapter, "encode", press)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_during_ingest_prints_totals_and_the_next_run_goes_on(
    ingest: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pressed_at_third_chunk(patch):
        result = invoke(*ingest, "--json")
    assert result.exit_code == 130
    assert "repeat the command" in interrupted_sentence(result.stderr)
    totals = json.loads(result.stdout)
    assert totals["interrupted"] is True
    assert 0 < totals["chunks_computed"] < 9
    rest = printed(*ingest)
    assert rest["documents"] == 3
    assert rest["chunks_skipped"] >= totals["chunks_computed"]


def test_ctrl_c_during_decode_stops_and_leaves_the_store_intact(
    ingested: Path, ctrl_c_while_decoding: None
) -> None:
    result = invoke("ask", QUESTION, "--store", ingested, "--max-new-tokens", "400")
    assert result.exit_code == 130
    assert "the store is intact" in interrupted_sentence(result.stderr)
    assert reused_tokens(ingested) > 0
