"""What an ingest takes of a Ray cluster, and what it says without Ray."""

from __future__ import annotations

import sys

import pytest

import tiny
from blendrag_ray.ingest import Share
from cli.commands import refused
from lab.soak.ray_stores import write_documents


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
