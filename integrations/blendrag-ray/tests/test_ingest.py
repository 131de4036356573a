"""Ingest on a Ray cluster of this process: workers that die, and machines that cannot take part."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

import tiny
from blendrag_ray import nodes
from blendrag_ray.ingest import Share, check_nodes
from blendrag_ray.ingest_stages import IngestPlan
from cli.commands import refused
from lab.soak.local_ray import local_ray
from lab.soak.ray_ingest import crash, engine, save_model, write_documents


def test_without_ray_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    docs = write_documents(tmp_path / "docs", 1)
    said = refused("ingest", docs, "--model", "demo", "--store", tmp_path / "s", "--ray")
    assert "pip install 'blendrag[ray]'" in said
    assert "pip install 'blendrag[ray]'" in refused("bench", "cluster")
    assert not (tmp_path / "s").exists()


def test_workers_without_ray_are_refused(tmp_path):
    docs = write_documents(tmp_path / "docs", 1)
    said = refused("ingest", docs, "--model", "demo", "--store", tmp_path / "s", "--workers", "2")
    assert "add --ray" in said


class Cluster:
    """What :class:`Share` asks of Ray."""

    def __init__(self, *nodes):
        self._nodes = nodes

    def nodes(self):
        return [{"Alive": True, "Resources": each} for each in self._nodes]


CPUS = {"CPU": 8.0}
GPUS = {"CPU": 16.0, "GPU": 2.0}


@pytest.mark.parametrize(
    ("nodes", "workers", "gpus", "expected"),
    [
        ([CPUS], None, None, Share(1, 8, 0.0, 1, 0)),
        ([CPUS, CPUS], 3, None, Share(3, 4, 0.0, 1, 0)),
        ([CPUS, {"CPU": 3.0}], 2, None, Share(2, 4, 0.0, 1, 0)),
        ([CPUS, {}], 8, None, Share(8, 1, 0.0, 2, 0)),
        ([CPUS, GPUS, GPUS], None, None, Share(4, 1, 1.0, 4, 4)),
        ([GPUS], None, 0.5, Share(4, 1, 0.5, 4, 3)),
        ([GPUS], 2, 0, Share(2, 8, 0.0, 1, 0)),
    ],
)
def test_workers_share_the_cluster(nodes, workers, gpus, expected):
    assert Share.of(Cluster(*nodes), "auto", workers, gpus) == expected


def test_more_workers_than_the_cluster_holds_are_refused():
    with tiny.refuses("at most 8"):
        Share.of(Cluster(CPUS), "auto", 9, None)
    with tiny.refuses("at most 0"):
        Share.of(Cluster(CPUS), "auto", None, 1)


@pytest.fixture(scope="module")
def ray():
    with local_ray() as made:
        yield made


@pytest.mark.ray
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


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)  # on a busy machine
def test_killed_workers_are_replaced_and_nothing_is_lost_or_computed_twice(ray, tmp_path):
    kills = crash(tmp_path, save_model(tmp_path / "model"), 10, 1, 1, lambda: 1.0, seed=1)
    assert kills == 1
