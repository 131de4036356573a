"""Replicas on a local Ray cluster. ``make soak-ray`` does more of the same, and removes replicas."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.soak.ray_replicas import measure, prepare

ROOT = Path(__file__).resolve().parents[3]
#: On a busy machine each process takes a minute to import torch.
TIMEOUT_S = 900
STREAMS = 4
pytestmark = [pytest.mark.ray, pytest.mark.timeout(TIMEOUT_S)]


@pytest.fixture(scope="module")
def report() -> Iterator[dict[str, Any]]:
    """What one cluster did."""
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    # paths of sockets are limited to 107 characters
    with (
        tempfile.TemporaryDirectory(prefix="br", dir="/tmp") as directory,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        patch.setenv("RAY_TMPDIR", directory)
        # Serve kills a proxy that is not ready after 5 s, as on a busy machine
        patch.setenv("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "120")
        prepare(Path(directory), STREAMS, tokens=40, load=4)
        # little load, which takes the time of the replica that starts
        yield measure(Path(directory), 2, busy_s=0.8, target_ongoing_requests=0.2)


@pytest.mark.parametrize("phase", ["more replicas", "new requests after that"])
def test_no_request_fails_while_replicas_come_and_go(report: dict[str, Any], phase: str):
    assert set(report[phase]) == {"answered"}


def test_a_killed_replica_ends_only_its_own_streams(report: dict[str, Any]):
    ended = report["streams, a replica killed"]
    assert set(ended) == {"answered", "ended with an error"}
    assert sum(ended.values()) == STREAMS + 2
