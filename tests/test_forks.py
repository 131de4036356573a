"""``pytest --forks``: every test of every file is run and reported, whatever happens in a fork."""

import os
import subprocess
import sys
from pathlib import Path

SHARED = """
import os, pytest

@pytest.fixture(scope="module")
def process():
    return os.getpid()

@pytest.mark.parametrize("i", range(3))
def test_runs_in_one_process(i, process):
    print("output of", i)
    assert process == os.getpid() != os.getppid()
    assert i < 2, "two is too many"

def test_is_skipped(tmp_path):
    pytest.skip("for a reason")
"""
CRASHING = """
import os

def test_passes():
    pass

def test_crashes():
    os._exit(3)

def test_is_left_out():
    pass
"""


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and output of a pytest without other plugins and this checkout's conftest."""
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "forks", *arguments, str(folder)],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parent),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        text=True,
    )
    return ended.returncode, ended.stdout + ended.stderr


def test_all_files_are_run_and_a_crash_is_a_failure(tmp_path):
    for name in "abcd":
        (tmp_path / f"test_{name}.py").write_text(SHARED)
    (tmp_path / "test_e.py").write_text(CRASHING)
    code, output = run(tmp_path, "--forks", "3")
    assert code == 1
    assert "5 failed, 9 passed, 4 skipped in" in output
    assert output.count("AssertionError: two is too many") == 4 * 2  # with the summary
    assert output.count("output of 2") == 4
    assert "output of 1" not in output
    assert "the process ended with status 3, and the tests behind this one" in output


def test_it_stops_at_the_first_failure_if_asked_to(tmp_path):
    for name in "ab":
        (tmp_path / f"test_{name}.py").write_text(SHARED)
    code, output = run(tmp_path, "--forks", "2", "-x")
    assert code == 1
    assert "stopping after" in output
