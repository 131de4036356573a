"""How many requests of clients are open, and how many a new one would wait for."""

from __future__ import annotations

from itertools import chain, repeat

import pytest

from blendrag.serving.open_requests import (
    ANSWERED_WEIGHT,
    LATEST_TURN_WEIGHT,
    OpenRequest,
    OpenRequests,
)
from clocks import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def requests(clock: Clock) -> OpenRequests:
    return OpenRequests(clock)


def opened(requests: OpenRequests, *moments: float) -> list[OpenRequest]:
    made = [OpenRequest() for _ in moments]
    for request, now in zip(made, moments, strict=True):
        requests.clock.now = now
        requests.open(request)
    return made


def ahead(requests: OpenRequests, now: float) -> float:
    requests.clock.now = now
    return requests.ahead


def test_requests_without_an_answer_count_one_each_and_the_first_only_what_is_left_of_it(requests):
    (first,) = opened(requests, 10)
    assert ahead(requests, 11) == 1  # nobody knows yet how long they take
    first.begun_at, first.has_ended = 14, True
    assert ahead(requests, 20) == 0
    opened(requests, 20, 20)
    assert ahead(requests, 20) == 2
    assert ahead(requests, 21) == pytest.approx(1.75)
    assert ahead(requests, 30) == 1


def test_the_turn_of_a_request_begins_when_the_one_before_it_is_answered(requests):
    first, second = opened(requests, 0, 1)
    first.begun_at = 4
    second.begun_at = 10
    assert ahead(requests, 10) == 2 * ANSWERED_WEIGHT
    first.has_ended = second.has_ended = True
    opened(requests, 10)
    assert requests.turn_s == 4 + LATEST_TURN_WEIGHT * (6 - 4)
    assert ahead(requests, 12) == pytest.approx(1 - 2 / requests.turn_s)


def test_a_request_that_is_being_answered_counts_little_until_it_ends(requests):
    (request,) = opened(requests, 0)
    request.begun_at = 1
    assert ahead(requests, 100) == ANSWERED_WEIGHT
    request.has_ended = True
    assert ahead(requests, 100) == 0


def test_a_request_that_ends_without_an_answer_or_goes_elsewhere_is_forgotten(requests):
    refused, moved = opened(requests, 0, 0)
    assert moved in requests
    refused.has_ended = True
    requests.discard(moved)
    assert moved not in requests
    assert ahead(requests, 0) == 0


def test_requests_wait_until_their_first_token_and_run_until_they_end(requests):
    with requests.opened() as first, requests.opened():
        assert requests.counts == (2, 0)
        requests.begin(first)
        assert requests.counts == (1, 1)
    assert not requests


def test_other_work_is_counted_and_tells_nothing_of_turns(requests, clock):
    with requests.opened(decodes=False) as embedding:
        clock.now += 5
        requests.begin(embedding)
        assert requests.counts == (0, 1)
        assert requests.turn_s is None


class BeginsMeanwhile(OpenRequest):
    """Has begun from the second time on that somebody looks."""

    @property
    def begun_at(self) -> float | None:  # type: ignore[override]
        return next(self._moments)

    @begun_at.setter
    def begun_at(self, moment: float | None) -> None:
        self._moments = chain([moment], repeat(1.0))


def test_a_request_that_begins_while_requests_are_counted_is_not_lost(requests):
    requests.open(BeginsMeanwhile())
    assert requests.counts == (1, 0)
    assert requests.counts == (0, 1)
