"""Ingest and replicas on one Ray cluster of this process: workers and replicas that die or come and go, and
machines that cannot take part. ``make crash-ray`` and ``make soak-ray`` do more of the same."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tiny
from blendrag_ray import nodes
from blendrag_ray.ingest import check_nodes
from blendrag_ray.ingest_stages import IngestPlan
from lab.soak.local_ray import local_ray
from lab.soak.ray_ingest import crash
from lab.soak.ray_replicas import measure, prepare
from lab.soak.ray_stores import engine, save_model

#: On a busy machine each process takes a minute to import torch.
TIMEOUT_S = 900
STREAMS = 4
pytestmark = [pytest.mark.ray, pytest.mark.timeout(TIMEOUT_S)]


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        # Serve kills a proxy that is not ready after 5 s, as on a busy machine
        patch.setenv("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "120")
        with local_ray() as made:
            yield made


@pytest.fixture(scope="module")
def report(ray: Any) -> Iterator[dict[str, Any]]:
    """What replicas of the server did."""
    with (
        tempfile.TemporaryDirectory(prefix="br", dir="/tmp") as directory,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("RAY_TMPDIR", directory)
        # so many tokens that the first stream runs on when the last one begins
        prepare(Path(directory), STREAMS, tokens=160, load=4)
        # little load, which takes the time of the replica that starts
        yield measure(Path(directory), 2, busy_s=0.8, target_ongoing_requests=0.2)


@pytest.mark.parametrize("phase", ["more replicas", "new requests after that"])
def test_no_request_fails_while_replicas_come_and_go(report: dict[str, Any], phase: str):
    assert set(report[phase]) == {"answered"}


def test_a_killed_replica_ends_only_its_own_streams(report: dict[str, Any]):
    ended = report["streams, a replica killed"]
    assert set(ended) == {"answered", "ended with an error"}
    assert sum(ended.values()) == STREAMS + 2


def test_machines_that_cannot_take_part_are_named(ray, tmp_path, monkeypatch):
    with engine(save_model(tmp_path / "model"), tmp_path / "s") as made:
        made.kv_namespace.corpus.create()
        plan = IngestPlan.of(made.kv_namespace)
    check_nodes(plan)
    elsewhere = replace(plan, place=(0, 0))
    check_nodes(replace(elsewhere, settings=replace(elsewhere.settings, remote="s3://bucket")))
    with tiny.refuses("is not seen, and there is no remote"):
        check_nodes(elsewhere)
    with tiny.refuses("node .*: there is no model"):
        check_nodes(replace(plan, model=str(tmp_path / "elsewhere")))
    monkeypatch.setattr(nodes, "__version__", "9.9")
    with tiny.refuses("has blendrag 0.1.0, expected 9.9"):
        check_nodes(plan)


@pytest.mark.slow
def test_killed_workers_are_replaced_and_nothing_is_lost_or_computed_twice(ray, tmp_path):
    kills = crash(tmp_path, save_model(tmp_path / "model"), 10, 1, 1, lambda: 1.0, seed=1)
    assert kills == 1
