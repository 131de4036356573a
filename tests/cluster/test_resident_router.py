"""The router's choice from digests of resident keys, queues and what it has just sent."""

from __future__ import annotations

from random import Random

from blendrag.cluster.resident_router import ASSUMED_S, Assumed, Load, chosen, digest, holds

KEYS = [f"{number:02x}" * 32 for number in range(64)]
NOW = 1000.0


def choices(loads: list[Load], keys: list[str]) -> set[int]:
    random = Random(0)
    return {chosen(loads, dict.fromkeys(keys, 100), NOW, random) for _ in range(100)}


def test_a_digest_holds_its_keys_and_no_others():
    digested = digest(KEYS[::2])
    assert [holds(digested, key) for key in KEYS] == [True, False] * 32
    assert not holds(digest([]), KEYS[0])
    assert not holds(b"", KEYS[0])


def test_a_request_goes_where_most_of_its_chunks_are():
    some, most = {"disk": digest(KEYS[:1])}, {"disk": digest(KEYS[:3])}
    assert choices([Load(), Load(report=some), Load(report=most)], KEYS[:4]) == {2}


def test_memory_is_preferred_to_disk():
    report = {"memory": digest(KEYS[:2])}
    assert choices([Load(report={"disk": digest(KEYS)}), Load(report=report)], KEYS[:2]) == {1}


def test_a_long_queue_outweighs_resident_chunks():
    here = {"memory": digest(KEYS)}
    assert choices([Load(queue=3, report=here), Load()], KEYS[:2]) == {0}
    assert choices([Load(queue=5, report=here), Load()], KEYS[:2]) == {1}


def test_with_a_price_of_all_its_kv_a_request_does_not_wait_for_it():
    loads = [Load(queue=1, report={"disk": digest(KEYS)}), Load()]
    random = Random(0)
    assert {chosen(loads, {KEYS[0]: 9}, NOW, random) for _ in range(20)} == {0}
    assert {chosen(loads, {KEYS[0]: 9}, NOW, random, 1.0) for _ in range(20)} == {1}


def test_chunks_that_were_just_sent_count_as_resident_for_a_while():
    sent = Assumed()
    sent.note(KEYS[:2], NOW - ASSUMED_S / 2)
    assert choices([Load(), Load(assumed=sent)], KEYS[:2]) == {1}
    late = Assumed()
    late.note(KEYS[:2], NOW - ASSUMED_S)
    assert choices([Load(), Load(assumed=late)], KEYS[:2]) == {0, 1}


def test_requests_without_known_chunks_go_to_the_shorter_of_two_queues():
    loads = [Load(queue=1, report={"memory": digest(KEYS)}), Load(), Load(queue=5)]
    assert choices(loads, []) == {0, 1}
