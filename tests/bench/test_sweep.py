"""Time to first token over the recompute ratio."""

from __future__ import annotations

import pytest

from bench.lab import SMALL, measured


def test_sweep_is_one_object_with_a_row_for_each_ratio() -> None:
    rows = measured("sweep", *SMALL, "--ratios", "0.1,0.5,1.0")["rows"]
    assert [row["ratio"] for row in rows] == pytest.approx([0.1, 0.5, 1.0], abs=0.01)
    for row in rows:
        assert row["speedup"] == pytest.approx(row["full_ms"] / row["ms"])
        assert row["ratio"] <= row["charged_ratio"] <= 1
    assert rows[-1]["charged_ratio"] == 1
    floors = [row["floor_speedup"] for row in rows]
    assert floors == sorted(floors, reverse=True)
    assert floors[-1] < 1  # everything is computed, and the question's tokens twice
