"""Random mixed requests during churn are answered as alone; ``make soak-requests`` does more of the same."""

from __future__ import annotations

import asyncio
import logging

import pytest

from blendrag.serving import chunk_pool
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


def test_the_soak_notices_a_wrong_mask(tmp_path, monkeypatch):
    """Running requests see entries of shared chunks that they have recomputed."""
    made = chunk_pool.HeldChunk
    monkeypatch.setattr(chunk_pool, "HeldChunk", lambda chunk, at, stale: made(chunk, at))
    assert asyncio.run(run(tmp_path, 8, 8, seed=3, parts=1)).differences
