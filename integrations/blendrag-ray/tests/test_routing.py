"""The score of a replica, and the choice by it."""

from __future__ import annotations

import subprocess
import sys
from random import Random

from blendrag_ray.routing import choose_replica


def chosen(resident_bytes: list[float], queues: list[float], tries: int = 200) -> set[int]:
    """Every replica that is chosen for a request of 100 bytes, each queued one worth 100."""
    random = Random(0)
    return {choose_replica(resident_bytes, queues, 100, random) for _ in range(tries)}


def test_the_replica_with_the_chunks_is_chosen_until_its_queue_is_too_long():
    assert chosen([0, 60, 30], [0, 0, 0]) == {1}
    assert chosen([0, 60, 30], [2, 1, 0]) == {2}
    assert chosen([0, 60, 0], [0, 1, 1]) == {0}
    assert chosen([0, 100, 0], [0, 1, 0]) == {0, 2}


def test_equal_replicas_share_the_requests():
    assert chosen([60, 60, 0], [0, 0, 0]) == {0, 1}


def test_a_part_of_a_request_costs_a_part_of_its_price():
    assert chosen([0, 60, 0], [0, 0.5, 0]) == {1}
    assert chosen([0, 60, 0], [0, 0.7, 0]) == {0, 2}


def test_without_resident_chunks_the_least_busy_replicas_are_chosen():
    assert chosen([0, 0, 0, 0], [3, 1, 0.5, 0.5]) == {2, 3}
    random = Random(0)
    free = {choose_replica([0, 0, 0], [1, 0, 0], 0, random) for _ in range(50)}
    assert free == {1, 2}


def test_a_single_replica_is_chosen():
    assert chosen([0], [9]) == {0}


def test_the_score_needs_no_ray():
    imported = "import sys, blendrag_ray.routing; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", imported], check=False).returncode == 0
