"""The bench of a cold remote: what is loaded, and that nothing else is there."""

from __future__ import annotations

import pytest

from blendrag.errors import InvalidInputError
from blendrag_lab.bench.geometry import TimedModel
from blendrag_lab.bench.remote import FAST, FULL, remote, remote_table
from blendrag_lab.bench.workload import Workload

pytest.importorskip("obstore")

SMALL = Workload(chunks=2, chunk_tokens=64, question_tokens=8, ratio=0.3, rounds=1)


def test_what_comes_too_slowly_is_computed_and_the_rest_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At half a second a token, the first bytes may take 3.4 s; 10 KB/s needs 7 s for them."""
    monkeypatch.setattr("blendrag_lab.bench.remote.prefill_token_s", lambda adapter: 0.5)
    result = remote(TimedModel("tiny"), SMALL, f"{FAST},10KB/s")
    loaded = {row.remote: row.loaded for row in result.rows}
    assert loaded == {FULL: None, FAST: 2.0, "10KB/s": 0.0}
    assert result.rows[0].over_full == 1.0
    assert [row[0] for row in remote_table(result).rows] == [FULL, FAST, "10KB/s"]


def test_a_throughput_is_named_with_its_unit() -> None:
    with pytest.raises(InvalidInputError, match="expected fast or a throughput"):
        remote(TimedModel("tiny"), SMALL, "16MB")
