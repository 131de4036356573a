"""Memory that a layer frees stays with the process, measured by page faults."""

from __future__ import annotations

import inspect
import os
import platform
import subprocess
import sys

import pytest

import tiny
from blendrag.fusor import Fusor
from blendrag.fusor.fusor import LARGEST_LESSON, keep_freed_blocks

#: Activations of a few layers: some blocks live at once, all of them freed. The function stands for its
#: module, which imports transformers.
SCRIPT = f"""
import ctypes
import resource
import torch
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: one fault per page
LARGEST_LESSON = {LARGEST_LESSON}
{inspect.getsource(keep_freed_blocks)}
keep_freed_blocks()
def layer():
    blocks = [torch.ones(5 << 20, dtype=torch.uint8) for _ in range(5)]
for _ in range(3):
    layer()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    layer()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc, other rules")
def test_blocks_that_a_layer_frees_are_used_by_the_next():
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD" and "MALLOC" not in k}
    environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert not done.stderr  # imports print nothing
    pages = 10 * 5 * (5 << 20) // os.sysconf("SC_PAGE_SIZE")
    assert int(done.stdout) < pages / 50  # otherwise four of five pages fault, in most processes


def test_a_fusor_on_the_cpu_keeps_freed_blocks(monkeypatch):
    called: list[bool] = []
    monkeypatch.setattr("blendrag.fusor.fusor.keep_freed_blocks", lambda: called.append(True))
    Fusor(tiny.adapter(tiny.llama()))
    assert called
