"""Replicas on a local Ray cluster. ``make soak-ray`` does more of the same, and removes replicas."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from lab.soak.ray_replicas import prepare

ROOT = Path(__file__).resolve().parents[3]
#: On a busy machine each process takes a minute to import torch.
TIMEOUT_S = 900
pytestmark = pytest.mark.timeout(TIMEOUT_S)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """What one cluster did; it runs in another process, as Ray unpickles what its workers send."""
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    # paths of sockets are limited to 107 characters
    with tempfile.TemporaryDirectory(prefix="br", dir="/tmp") as directory:
        prepare(Path(directory), streams=6, tokens=60)
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "lab.soak.ray_replicas",
                "--prepared",
                directory,
                "--replicas",
                "2",
            ],
            capture_output=True,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                # Serve kills a proxy that is not ready after 5 s, as on a busy machine
                "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
            },
            timeout=TIMEOUT_S - 20,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("phase", ["more replicas", "new requests after that"])
def test_no_request_fails_while_replicas_come_and_go(report: dict[str, Any], phase: str):
    assert set(report[phase]) == {"answered"}


def test_a_killed_replica_ends_only_its_own_streams(report: dict[str, Any]):
    ended = report["streams, a replica killed"]
    assert set(ended) == {"answered", "ended with an error"}
    assert sum(ended.values()) == 6 + 2
