"""The attention bench: what its rows count, and that ways that differ are not reported."""

from __future__ import annotations

import pytest
import torch

from blendrag.serving.shared_attention import SharedAttention
from blendrag_lab.bench.attention import GROUPED, SHARED, STOCK, attention
from blendrag_lab.bench.rounds import MeasuredNothingError
from lab.tests.bench.small import printed


def test_rows_count_what_is_shared():
    rows = printed("attention")["rows"]
    counted = [(row["requests"], row["tokens"], row["shared"]) for row in rows]
    assert counted == [(1, 80, 0), (1, 80, 80), (3, 80, 0), (3, 80, 80)]
    for row in rows:
        assert set(row["ms"]) == {STOCK, GROUPED, SHARED}
    shares = [row["kv_share"] for row in rows]
    assert shares[0] == shares[2] == 1.0  # nothing shared
    assert 1.0 < shares[1] < 1.5  # a lone request keeps stale entries, too
    assert 1 / 3 < shares[3] < 0.8


def test_ways_that_differ_are_an_error(monkeypatch):
    attend = SharedAttention.attend
    outs = iter(range(9))

    def changing(*args: object) -> torch.Tensor:
        return attend(*args) + next(outs)  # type: ignore[arg-type]

    monkeypatch.setattr(SharedAttention, "attend", changing)
    with pytest.raises(MeasuredNothingError, match="the ways differ by 1"):
        attention("tiny", "2", "16", "1", 8, 4, rounds=1)
