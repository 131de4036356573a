"""Operators of a request: how they are counted, and that they do not grow with the plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blendrag.lab.bench.overhead import operators_of
from lab.bench.small import printed

WAYS = ("reuse", "query, constant", "query, geometric:0.9")


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, int], dict[str, Any]]:
    assert printed("overhead")["layers"] == 32
    return {(row["way"], row["chunks"]): row for row in printed("overhead")["rows"]}


def test_views_and_allocations_are_not_operators() -> None:
    x = torch.ones(3, 4)
    assert operators_of(lambda: x.t()[1:].float()).operators == 0
    assert operators_of(lambda: torch.empty(3)).operators == 0
    assert operators_of(lambda: (x @ x.t()).add_(1)).operators == 2
    assert operators_of(lambda: x.to(torch.bfloat16)).operators == 1
    assert operators_of(lambda: x.sum().item()).waits == 1


def test_reuse_is_little_more_than_one_forward_and_query_than_two(rows: dict) -> None:
    assert rows["reuse", 3]["over_stock"] < 1.2
    assert rows["query, constant", 3]["over_stock"] < 2.4


def test_a_falling_schedule_costs_at_most_a_tenth_more(rows: dict) -> None:
    for chunks in (3, 9):
        constant, falling = (rows[way, chunks]["operators"] for way in WAYS[1:])
        assert falling <= 1.1 * constant


@pytest.mark.parametrize("way", WAYS)
def test_operators_do_not_grow_with_chunks_nor_waits_with_layers(rows: dict, way: str) -> None:
    assert rows[way, 9]["operators"] <= rows[way, 3]["operators"] + 40
    assert rows[way, 3]["waits"] <= rows["stock", 3]["waits"] + 2
