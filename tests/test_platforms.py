"""Systems without all of Linux's interfaces, simulated: Windows, and macOS before version 11."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from blendrag.store import reader

SENTENCE = "blendrag runs on Linux and macOS; on Windows use WSL 2"
WINDOWS = "import sys; sys.modules['fcntl'] = sys.modules['resource'] = None\n"


def run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, "--help"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "code", ["import blendrag", "from blendrag import BlendEngine", "import blendrag.text.readers"]
)
def test_an_import_on_windows_is_an_import_error_of_one_sentence(code: str) -> None:
    done = run(WINDOWS + code)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"ImportError: {SENTENCE}"
    assert done.stderr.count("Traceback") == 1, "it has no other cause"
    caught = run(f"{WINDOWS}try:\n    {code}\nexcept ImportError as error:\n    print(error)")
    assert caught.stdout == f"{SENTENCE}\n"


@pytest.mark.parametrize(
    "code",
    [
        "from blendrag.cli.main import main\nmain()",
        "sys.argv[0] = 'Scripts/blendrag.exe'\nimport importlib\n"
        "importlib.import_module('blendrag' + '.cli.main').main()",
    ],
)
def test_the_command_on_windows_prints_one_sentence(code: str) -> None:
    done = run(WINDOWS + code)
    assert done.returncode == 1
    assert done.stderr == f"error: {SENTENCE}\n"
    assert done.stdout == ""


def test_stored_kv_is_read_without_preadv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "preadv")
    file = tmp_path / "payload"
    file.write_bytes(bytes(range(100)))
    fd = os.open(file, os.O_RDONLY)
    try:
        buffers = [bytearray(7), bytearray(50), bytearray(3)]
        assert reader.read_exactly(fd, [memoryview(buffer) for buffer in buffers], 10)
        assert b"".join(buffers) == bytes(range(10, 70))
        assert not reader.read_exactly(fd, [memoryview(bytearray(60))], 70)
    finally:
        os.close(fd)
