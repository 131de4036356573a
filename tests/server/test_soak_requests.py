"""Random mixed requests during churn are answered as alone; ``make soak-requests`` does more of the same."""

from __future__ import annotations

import asyncio
import logging

import pytest

import tiny
from blendrag.engine import BlendEngine
from blendrag.engine.ingest import remove_sources
from blendrag.serving import chunk_pool
from blendrag.store.identity import chunk_key
from lab.soak.requests import DOCUMENTS, run


@pytest.fixture(autouse=True)
def quiet():
    """Tracebacks of faults are not printed."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def test_requests_during_churn_get_the_answers_that_each_gets_alone(tmp_path):
    outcome = asyncio.run(run(tmp_path, 60, 12, seed=3, parts=2))
    assert outcome.differences == []
    assert outcome.compared > 20
    assert outcome.while_changing
    assert outcome.ended["over exact beginnings"]
    assert outcome.ties <= 1


def disturb_kv(engine: BlendEngine) -> None:
    """Store other KV, with valid checksums."""
    used = engine.kv_namespace
    for number in range(DOCUMENTS):
        for text in tiny.chunk_texts(engine, number):
            ids, namespace = used.model.text_ids(text), used.validity.namespace
            key, kv = chunk_key(namespace, used.corpus.prefix_ids, ids), tiny.stored_kv(engine, ids)
            if kv is not None:
                used.store.delete(namespace, key)
                used.store.put(namespace, key, tiny.noisy(kv, 0.5))


def lose_documents(engine: BlendEngine) -> None:
    """Remove what was acknowledged."""
    remove_sources(engine.kv_namespace, ["doc1.txt", "doc3.txt", "doc5.txt"])


@pytest.mark.parametrize("disturb", [disturb_kv, lose_documents])
def test_the_soak_notices(disturb, tmp_path):
    assert asyncio.run(run(tmp_path, 24, 16, seed=3, parts=1, disturb=disturb)).differences


def test_the_soak_notices_a_wrong_mask(tmp_path, monkeypatch):
    """Running requests see entries of shared chunks that they have recomputed."""
    made = chunk_pool.HeldChunk
    monkeypatch.setattr(chunk_pool, "HeldChunk", lambda chunk, at, stale: made(chunk, at))
    assert asyncio.run(run(tmp_path, 24, 16, seed=3, parts=1)).differences
