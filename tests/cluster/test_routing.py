"""The score of a replica, and the choice by it."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from random import Random

import pytest

from blendrag.cluster.routing import choose_replica, power_of_two, score


def chosen(resident_bytes: list[float], queues: list[float], tries: int = 200) -> set[int]:
    """Every replica that is chosen for a request of 100 bytes, each queued one worth 100."""
    random = Random(0)
    return {choose_replica(resident_bytes, queues, 100, random) for _ in range(tries)}


def test_a_queued_request_outweighs_the_bytes_it_is_worth():
    assert score(100, 0, 100) > score(50, 0, 100) > score(100, 1, 100) == score(0, 0, 100)


def test_the_replica_with_the_chunks_is_chosen_until_its_queue_is_too_long():
    assert chosen([0, 60, 30], [0, 0, 0]) == {1}
    assert chosen([0, 60, 30], [2, 1, 0]) == {2}
    assert chosen([0, 60, 0], [0, 1, 1]) == {0}


def test_equal_replicas_share_the_requests():
    assert chosen([60, 60, 0], [0, 0, 0]) == {0, 1}


def test_without_resident_chunks_the_shorter_of_two_queues_is_chosen():
    random = Random(0)
    counts = Counter(choose_replica([0] * 4, [3, 2, 1, 0], 100, random) for _ in range(6000))
    assert [counts[i] / 6000 for i in range(4)] == pytest.approx([0, 1 / 6, 2 / 6, 3 / 6], abs=0.03)


def test_a_single_replica_is_chosen():
    assert chosen([0], [9]) == {0}
    assert power_of_two([9], Random(0)) == 0


def test_the_score_needs_no_ray():
    imported = "import sys, blendrag.cluster.routing; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", imported], check=False).returncode == 0
