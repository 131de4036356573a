"""The router's choice from digests of resident keys, how busy replicas are, and what it has just sent."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

from blendrag.serving.open_requests import OpenRequest
from blendrag_ray.forwarding import WholeRequest
from blendrag_ray.resident_router import (
    ASSUMED_S,
    Assumed,
    ReplicaLoad,
    ResidentRouter,
    chosen,
    digest,
    holds,
)

KEYS = [f"{number:02x}" * 32 for number in range(64)]
NOW = 1000.0


def choices(loads: list[ReplicaLoad], keys: list[str]) -> set[int]:
    random = Random(0)
    return {chosen(loads, dict.fromkeys(keys, 100), NOW, random) for _ in range(100)}


def test_a_digest_holds_its_keys_and_no_others():
    digested = digest(KEYS[::2])
    assert [holds(digested, key) for key in KEYS] == [True, False] * 32
    assert not holds(digest([]), KEYS[0])
    assert not holds(b"", KEYS[0])


def test_a_request_goes_where_most_of_its_chunks_are():
    some, most = {"disk": digest(KEYS[:1])}, {"disk": digest(KEYS[:3])}
    assert choices(
        [ReplicaLoad(), ReplicaLoad(report=some), ReplicaLoad(report=most)], KEYS[:4]
    ) == {2}


def test_memory_is_preferred_to_disk():
    report = {"memory": digest(KEYS[:2])}
    assert choices(
        [ReplicaLoad(report={"disk": digest(KEYS)}), ReplicaLoad(report=report)], KEYS[:2]
    ) == {1}


def test_a_request_waits_for_its_kv_while_little_is_left_of_the_one_before_it():
    here = {"memory": digest(KEYS)}
    assert choices([ReplicaLoad(queue=0.35, report=here), ReplicaLoad()], KEYS[:2]) == {0}
    assert choices([ReplicaLoad(queue=0.45, report=here), ReplicaLoad()], KEYS[:2]) == {1}
    assert choices([ReplicaLoad(queue=2.35, report=here), ReplicaLoad(queue=2)], KEYS[:2]) == {0}


def test_the_price_of_a_queued_request_is_an_option():
    loads = [ReplicaLoad(queue=1, report={"disk": digest(KEYS)}), ReplicaLoad()]
    random = Random(0)
    assert {chosen(loads, {KEYS[0]: 9}, NOW, random, 0.5) for _ in range(20)} == {0}
    assert {chosen(loads, {KEYS[0]: 9}, NOW, random, 1.0) for _ in range(20)} == {1}


def test_chunks_that_were_just_sent_count_as_resident_for_a_while():
    sent = Assumed()
    sent.note(KEYS[:2], NOW - ASSUMED_S / 2)
    assert choices([ReplicaLoad(), ReplicaLoad(assumed=sent)], KEYS[:2]) == {1}
    late = Assumed()
    late.note(KEYS[:2], NOW - ASSUMED_S)
    assert choices([ReplicaLoad(), ReplicaLoad(assumed=late)], KEYS[:2]) == {0, 1}


def test_requests_without_known_chunks_go_to_the_least_busy_replica():
    loads = [
        ReplicaLoad(queue=1, report={"memory": digest(KEYS)}),
        ReplicaLoad(),
        ReplicaLoad(queue=5),
    ]
    assert choices(loads, []) == {1}


async def test_a_request_keeps_its_replica_busy_until_it_ends():
    router = ResidentRouter.__new__(ResidentRouter)  # what Serve does in __init__ needs a cluster
    router.initialize_state()
    replicas: Any = [SimpleNamespace(replica_id=name, routing_stats={}) for name in "ab"]

    async def sent() -> tuple[Any, str]:
        kwargs = {"chunks": dict.fromkeys(KEYS[:2], 100)}
        pending: Any = SimpleNamespace(args=[WholeRequest({}, b"", OpenRequest())], kwargs=kwargs)
        (first, *_), *_ = await router.choose_replicas(replicas, pending)
        router.on_request_routed(pending, first.replica_id, None)
        return pending, first.replica_id

    first, first_at = await sent()
    second, second_at = await sent()
    assert second_at != first_at
    first.args[0].progress.has_ended = True
    assert (await sent())[1] == first_at
    router.on_request_routed(second, first_at, None)  # sent again, as its replica has ended
    assert (await sent())[1] == second_at
