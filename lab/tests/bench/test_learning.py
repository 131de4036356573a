"""The bench of learning: requests follow each other, and reuse begins with the third."""

from __future__ import annotations

from lab.tests.bench.small import measured


def test_requests_reuse_from_the_third_on() -> None:
    found = measured(
        "learning", "--geometry", "tiny", "--dtype", "float32", "--chunks", "3", "--chunk-tokens", "96",
        "--rounds", "1", "--requests", "3", "--new-tokens", "2",
    )["rows"]  # fmt: skip
    assert [row["request"] for row in found] == [1, 2, 3]
    assert [row["reused"] > 0.5 for row in found] == [False, False, True]
    assert all(row["over_before"] > 0 for row in found)
