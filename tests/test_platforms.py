"""Windows, simulated: it is refused in one sentence."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
