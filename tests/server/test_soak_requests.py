"""Random mixed requests during churn are answered as alone; ``make soak-requests`` does more of the same."""

from __future__ import annotations

import asyncio
import logging

import pytest

from blendrag.serving import scheduler
from lab.soak.requests import run


@pytest.fixture(autouse=True)
def quiet():
    """Tracebacks of faults are not printed."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def test_requests_during_churn_get_the_answers_that_each_gets_alone(tmp_path):
    outcome = asyncio.run(run(tmp_path, 12, 6, seed=7, parts=2))
    assert outcome.differences == []
    assert outcome.compared > 7
    assert outcome.while_changing
    assert outcome.ended["over exact beginnings"]
    assert outcome.ties <= 1


def test_the_soak_notices_tokens_of_another_request(tmp_path, monkeypatch):
    """Of one that decodes in the same forward."""
    stock = scheduler.decoded_together

    def wrong(steps, pool):
        first, *others = stock(steps, pool)
        return [*others, first]

    monkeypatch.setattr(scheduler, "decoded_together", wrong)
    assert asyncio.run(run(tmp_path, 8, 8, seed=3, parts=1)).differences
