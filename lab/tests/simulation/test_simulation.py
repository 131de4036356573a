"""The simulation against formulas: Zipf's law, Che's approximation, M/D/1; and what routing changes."""

from __future__ import annotations

import statistics
from random import Random

import numpy as np
import pytest
from scipy.optimize import brentq

from blendrag_ray.routing import choose_replica
from lab.simulation.popularity import Demand, Zipf
from lab.simulation.replicas import ROUTING, Lru, Residency, SimulatedCluster, simulate

RNG = np.random.default_rng


def probabilities(law: Zipf) -> np.ndarray:
    weights = np.arange(1, law.n + 1, dtype=float) ** -law.s
    return weights / weights.sum()


def che_hit_rate(law: Zipf, capacity: int) -> float:
    """The hit rate of an LRU cache for independent references (Che, Tung and Wang, 2002).

    Each number stays for the same time, in references, in which ``capacity`` different ones are asked for.
    """
    p = probabilities(law)
    time = brentq(lambda time: -np.expm1(-p * time).sum() - capacity, 0, 1e9)
    return float((p * -np.expm1(-p * time)).sum())


def cluster(replicas: int = 1, requests_per_s: float = 0.5, **changes: object) -> SimulatedCluster:
    """Requests for one chunk, each a second from memory, from disk or from the remote."""
    given: dict[str, object] = {
        "demand": Demand(1000, 1.0, 1), "memory_chunks": 20, "disk_chunks": 100,
        "service_s": {(0, 0): 1.0, (1, 0): 1.0, (0, 1): 1.0}, "queued_chunks": 0.25,
    }  # fmt: skip
    return SimulatedCluster(replicas, requests_per_s=requests_per_s, **{**given, **changes})  # type: ignore[arg-type]


# -- popularity -----------------------------------------------------------------------------------


@pytest.mark.parametrize("s", [0.0, 0.7, 1.0, 1.4])
def test_drawn_ranks_follow_zipfs_law(s: float):
    law, size = Zipf(50, s), 200_000
    drawn = np.bincount(law.draw(size, RNG(0)), minlength=law.n) / size
    expected = probabilities(law)
    assert np.all(np.abs(drawn - expected) < 5 * np.sqrt(expected / size))


def test_a_hundred_million_chunks_are_drawn_without_a_table():
    drawn = Zipf(10**8, 1.0).draw(100_000, RNG(0))
    assert drawn.min() == 0
    assert 9e7 < drawn.max() < 10**8
    harmonic = np.log(1e8) + 0.5772
    assert (drawn == 0).mean() == pytest.approx(1 / harmonic, rel=0.05)
    assert (drawn < 10_000).mean() == pytest.approx((np.log(1e4) + 0.5772) / harmonic, rel=0.02)


def test_the_chunks_of_a_request_differ():
    drawn = Demand(10, 1.0, 6).draw(2000, RNG(0))
    assert all(len(set(row)) == 6 for row in drawn.tolist())
    assert (drawn[:, 0] == 0).mean() == pytest.approx(probabilities(Zipf(10, 1.0))[0], abs=0.03)


def test_chunks_of_a_topic_are_adjacent():
    drawn = Demand(1000, 1.0, 4, topic_chunks=10).draw(2000, RNG(0))
    assert np.all(drawn // 10 == drawn[:, :1] // 10)
    assert all(len(set(row)) == 4 for row in drawn.tolist())
    assert set(np.unique(drawn % 10)) == set(range(10))


def test_a_tier_begins_as_endless_requests_leave_it():
    """The first references already hit as often as Che's approximation says; an empty cache would not."""
    demand, capacity, hits = Demand(2000, 1.0, 1), 100, 0
    for seed in range(60):
        rng = RNG(seed)
        cache = Lru(capacity, demand.recent(capacity, rng))
        assert len(cache.chunks) == capacity
        for chunk in demand.draw(50, rng).ravel().tolist():
            hits += cache.use(chunk)
            cache.evict()
    assert hits / 3000 == pytest.approx(che_hit_rate(Zipf(2000, 1.0), capacity), abs=0.03)


def test_a_corpus_that_fits_is_held_whole():
    assert sorted(Demand(50, 1.0, 2).recent(60, RNG(0))) == list(range(50))


# -- tiers and queues against formulas ------------------------------------------------------------


@pytest.mark.parametrize("zipf", [0.8, 1.0])
def test_hit_rates_of_both_tiers_are_those_of_ches_approximation(zipf: float):
    law = Zipf(1000, zipf)
    found = simulate(cluster(demand=Demand(1000, zipf, 1)), "random", 12_000, 0)
    memory, disk = statistics.fmean(found.memory), statistics.fmean(found.disk)
    assert memory == pytest.approx(che_hit_rate(law, 20), abs=0.02)
    assert memory + disk == pytest.approx(che_hit_rate(law, 100), abs=0.02)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_requests_wait_as_queueing_theory_predicts(load: float):
    """M/D/1: the mean wait is ρ / (2 (1 - ρ)) of the service time."""
    found = simulate(cluster(requests_per_s=load), "random", 20_000, 500)
    assert statistics.fmean(found.ttft_s) - 1 == pytest.approx(load / (2 - 2 * load), rel=0.1)
    assert found.busy[0] == pytest.approx(load, rel=0.03)


def test_random_routing_splits_the_requests_into_independent_queues():
    found = simulate(cluster(4, 4 * 0.7), "random", 20_000, 500)
    assert statistics.fmean(found.ttft_s) - 1 == pytest.approx(0.7 / 0.6, rel=0.1)


def test_a_request_takes_as_long_as_its_slowest_tiers_need():
    service_s = {(1, 0): 0.25, (0, 1): 0.5, (0, 0): 4.0}
    found = simulate(cluster(requests_per_s=1e-6, service_s=service_s), "random", 300, 0)
    splits = zip(found.memory, found.disk, strict=True)
    assert set(splits) == set(service_s)
    expected = [service_s[split] for split in zip(found.memory, found.disk, strict=True)]
    assert list(found.ttft_s) == pytest.approx(expected, abs=1e-6)


# -- routing --------------------------------------------------------------------------------------


def waits(routing: str) -> float:
    found = simulate(cluster(8, 8 * 0.8), routing, 5000, 500)
    return statistics.fmean(found.ttft_s) - 1


def test_two_choices_wait_less_than_random_ones_and_round_robin_less_still():
    random, two, robin = waits("random"), waits("power-of-two"), waits("round-robin")
    assert 0.5 * random > two > robin


def test_affinity_reads_the_least_from_the_remote_and_ends_sooner_where_that_is_slow():
    """A corpus that fits on three disks, but not on one."""
    slow = {(1, 0): 0.1, (0, 1): 0.1, (0, 0): 1.0}
    of = {
        name: simulate(
            cluster(3, 3.0, demand=Demand(280, 1.0, 1), service_s=slow), name, 2500, 3000
        )
        for name in ROUTING
    }
    remote = {
        name: 1 - statistics.fmean(found.memory) - statistics.fmean(found.disk)
        for name, found in of.items()
    }
    ttft_s = {name: statistics.fmean(found.ttft_s) for name, found in of.items()}
    assert remote["affinity"] < 0.4 * remote["round-robin"]
    assert remote["hash"] < remote["random"]
    assert ttft_s["affinity"] < 0.7 * min(ttft_s["round-robin"], ttft_s["power-of-two"])


def test_resident_counts_are_those_of_the_disks():
    held = [[1, 2, 3], [3], []]
    known, disks = Residency(held), [set(chunks) for chunks in held]
    random = Random(0)
    for _ in range(500):
        replica, chunk = random.randrange(3), random.randrange(8)
        if chunk in disks[replica]:
            disks[replica].discard(chunk)
            known.change(replica, (), [chunk])
        else:
            disks[replica].add(chunk)
            known.change(replica, [chunk], ())
        asked = random.sample(range(8), 4)
        assert list(known.counts(asked)) == [len(disk & set(asked)) for disk in disks]


def test_affinity_is_the_choice_of_ray_serves_router():
    """Bytes for chunks and a price in bytes give the same replica."""
    random = Random(3)
    for _ in range(200):
        counts = [random.randrange(7) for _ in range(5)]
        queues = [random.randrange(4) for _ in range(5)]
        in_bytes = choose_replica([64 * n for n in counts], queues, 64 * 1.5, Random(0))
        assert choose_replica(counts, queues, 1.5, Random(0)) == in_bytes
