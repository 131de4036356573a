"""Memory that a layer frees stays with the process: malloc takes large blocks from its heap."""

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

#: Whether a large block is mapped (1) or comes from the heap (0), before and after the lesson. The function
#: stands for its module, which imports transformers.
SCRIPT = f"""
import ctypes
import torch
class Info(ctypes.Structure):  # struct mallinfo2
    _fields_ = [(f"field{{n}}", ctypes.c_size_t) for n in range(10)]
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
LARGEST_LESSON = {LARGEST_LESSON}
{inspect.getsource(keep_freed_blocks)}
held = []  # a freed block would teach malloc
def is_mapped():
    before = libc.mallinfo2().field3  # mapped blocks
    held.append(torch.empty(LARGEST_LESSON - (1 << 20), dtype=torch.uint8))
    return libc.mallinfo2().field3 - before
before = is_mapped()
keep_freed_blocks()
print(before, is_mapped())
"""


def has_mallinfo2() -> bool:
    name, version = platform.libc_ver()
    return name == "glibc" and tuple(map(int, version.split(".")[:2])) >= (2, 33)


@pytest.mark.slow
@pytest.mark.skipif(not has_mallinfo2(), reason="another malloc, other rules")
def test_large_blocks_come_from_the_heap_once_one_was_freed():
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD" and "MALLOC" not in k}
    environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert not done.stderr  # imports print nothing
    assert done.stdout.split() == ["1", "0"]


def test_a_fusor_on_the_cpu_keeps_freed_blocks(monkeypatch):
    called: list[bool] = []
    monkeypatch.setattr("blendrag.fusor.fusor.keep_freed_blocks", lambda: called.append(True))
    Fusor(tiny.adapter(tiny.llama()))
    assert called
