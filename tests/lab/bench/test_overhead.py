"""What a request costs beside arithmetic: what is counted, and that it does not grow with the plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blendrag.lab.bench.overhead import operators_of
from cli.commands import invoke
from lab.bench.lab import measured


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, int], dict[str, Any]]:
    fields = measured(
        "overhead", "--chunks", "3,9", "--chunk-tokens", "8", "--policies", "reuse,query", "--rounds", "1"
    )  # fmt: skip
    assert fields["layers"] == 32
    return {(row["way"], row["chunks"]): row for row in fields["rows"]}


def test_views_and_allocations_are_not_operators() -> None:
    x = torch.ones(3, 4)
    assert operators_of(lambda: x.t()[1:].float()).operators == 0
    assert operators_of(lambda: torch.empty(3)).operators == 0
    assert operators_of(lambda: (x @ x.t()).add_(1)).operators == 2
    assert operators_of(lambda: x.to(torch.bfloat16)).operators == 1
    assert operators_of(lambda: x.sum().item()).waits == 1


def test_reuse_costs_little_more_operators_than_a_stock_prefill(rows: dict) -> None:
    assert rows["reuse", 3]["over_stock"] < 1.2


def test_query_costs_little_more_than_two_forwards(rows: dict) -> None:
    assert rows["query, constant", 3]["over_stock"] < 2.4


@pytest.mark.parametrize("chunks", [3, 9])
def test_a_schedule_that_falls_costs_at_most_a_tenth_more(rows: dict, chunks: int) -> None:
    constant, falling = (
        rows[f"query, {s}", chunks]["operators"] for s in ("constant", "geometric:0.9")
    )
    assert falling <= 1.1 * constant


@pytest.mark.parametrize("way", ["reuse", "query, constant", "query, geometric:0.9"])
def test_operators_do_not_grow_with_the_number_of_chunks(rows: dict, way: str) -> None:
    assert rows[way, 9]["operators"] <= rows[way, 3]["operators"] + 40


def test_the_host_waits_for_the_device_once_a_request_not_once_a_layer(rows: dict) -> None:
    for way in ("reuse", "query, constant", "query, geometric:0.9"):
        assert rows[way, 3]["waits"] <= rows["stock", 3]["waits"] + 2


def test_bad_lists_are_refused_in_a_sentence() -> None:
    for arguments in (("--chunks", "6,x"), ("--policies", "nonsense"), ("--geometry", "nonsense")):
        result = invoke("bench", "overhead", *arguments)
        assert result.exit_code == 2
        assert "Traceback" not in result.stderr
