"""The serving bench: all ways answer all requests, and together means in joint steps."""

from __future__ import annotations

from typing import Any

import pytest

from blendrag.lab.bench.serve import BASELINE
from blendrag.serving import turns
from lab.bench.small import measured

SMALL = (
    "--geometry", "tiny", "--dtype", "float32", "--requests", "3", "--new-tokens", "5", "--chunks", "2",
    "--chunk-tokens", "64", "--corpus-chunks", "3",
)  # fmt: skip


def test_every_way_answers_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    stock = turns.decoded_together

    def counted(steps: Any, pool: Any) -> Any:
        sizes.append(len(steps))
        return stock(steps, pool)

    monkeypatch.setattr(turns, "decoded_together", counted)
    rows = {row["way"]: row for row in measured("serve", *SMALL)["rows"]}
    assert len(rows) == 5
    assert rows[BASELINE]["over_baseline"] == 1
    assert max(sizes) == 3
    served = [row for row in rows.values() if row["ttft_s"] is not None]
    assert len(served) == 4
    assert all(row["ttft_s"] <= row["p95_ttft_s"] <= row["seconds"] for row in served)


def test_requests_arrive_at_a_rate() -> None:
    found = measured("serve", *SMALL, "--rate", "20")
    assert len(found["rows"]) == 4  # transformers' takes all at once
    assert all(row["seconds"] > 0.05 for row in found["rows"])
