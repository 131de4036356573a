"""How many requests a new one waits for, by when others were sent and answered."""

from __future__ import annotations

import pytest

from blendrag_ray.backlog import ANSWERED, LATEST, Backlog, Progress


def sent(backlog: Backlog, *moments: float) -> list[Progress]:
    requests = [Progress() for _ in moments]
    for request, now in zip(requests, moments, strict=True):
        backlog.add(request, now)
    return requests


def test_requests_without_an_answer_count_one_each_and_the_first_only_what_is_left_of_it():
    backlog = Backlog()
    (first,) = sent(backlog, 10)
    assert backlog.requests(11) == 1  # nobody knows yet how long they take
    first.answered_at, first.has_ended = 14, True
    assert backlog.requests(20) == 0
    sent(backlog, 20, 20)
    assert backlog.requests(20) == 2
    assert backlog.requests(21) == pytest.approx(1.75)
    assert backlog.requests(30) == 1


def test_the_turn_of_a_request_begins_when_the_one_before_it_is_answered():
    backlog = Backlog()
    first, second = sent(backlog, 0, 1)
    first.answered_at = 4
    second.answered_at = 10
    assert backlog.requests(10) == 2 * ANSWERED
    first.has_ended = second.has_ended = True
    sent(backlog, 10)
    usual_s = 4 + LATEST * (6 - 4)
    assert backlog.requests(12) == pytest.approx(1 - 2 / usual_s)


def test_a_request_that_is_being_answered_counts_little_until_it_ends():
    backlog = Backlog()
    (request,) = sent(backlog, 0)
    request.answered_at = 1
    assert backlog.requests(100) == ANSWERED
    request.has_ended = True
    assert backlog.requests(100) == 0


def test_a_request_that_ends_without_an_answer_or_goes_elsewhere_is_forgotten():
    backlog = Backlog()
    refused, moved = sent(backlog, 0, 0)
    assert moved in backlog
    refused.has_ended = True
    backlog.discard(moved)
    assert moved not in backlog
    assert backlog.requests(0) == 0
