"""The bench of a request that arrives while others decode: they do, and go on."""

from __future__ import annotations

from typing import Any

import pytest

from blendrag.engine import BlendEngine
from blendrag_lab.bench.newcomer import STEADY
from cli.commands import invoke, refused
from lab.tests.bench.small import joint_steps, measured

SMALL = (
    "newcomer", "--geometry", "tiny", "--dtype", "float32", "--chunks", "3", "--chunk-tokens", "64",
    "--rounds", "1", "--running",
)  # fmt: skip


def test_others_decode_when_a_request_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = joint_steps(monkeypatch)
    alone, one, two = measured(*SMALL, "2,1")["rows"]
    assert [row["running"] for row in (alone, one, two)] == [0, 1, 2]
    assert max(sizes) == 3
    assert sizes.count(2) > STEADY
    assert alone["over_alone"] == 1
    assert alone["token"] is alone["longest"] is None
    assert all(row["token"]["low"] > 0 and row["longest"]["low"] > 0 for row in (one, two))


def test_requests_that_do_not_run_are_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = BlendEngine.stream

    def ended(engine: BlendEngine, *given: Any) -> Any:
        pieces = stock(engine, *given)
        pieces.close()
        return pieces

    monkeypatch.setattr(BlendEngine, "stream", ended)
    found = invoke("bench", *SMALL, "1")
    assert found.exit_code != 0
    assert "a running request ended before" in found.stderr


def test_a_number_of_requests_that_cannot_be() -> None:
    assert "running '0': expected comma-separated whole numbers of 1 or more" in refused(
        "bench", *SMALL, "0"
    )
