"""Operators of a request: how they are counted, and that they do not grow with the plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from blendrag.fusor.loader import LayerLoader
from blendrag_lab.bench import decode_overhead
from blendrag_lab.bench.overhead import OperatorCount
from lab.tests.bench.small import joint_steps, measured


def operators_of(work: Callable[[], object]) -> OperatorCount:
    with OperatorCount() as count:
        work()
    return count


def test_views_and_allocations_are_not_operators():
    x = torch.ones(3, 4)
    assert operators_of(lambda: x.t()[1:].float()).operators == 0
    assert operators_of(lambda: torch.empty(3)).operators == 0
    assert operators_of(lambda: (x @ x.t()).add_(1)).operators == 2
    assert operators_of(lambda: x.to(torch.bfloat16)).operators == 1
    assert operators_of(lambda: x.sum().item()).waits == 1


@pytest.fixture
def loaded_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers are there before the first is computed: those that wait together are rotated together."""
    start = LayerLoader.start

    def start_and_wait(loader: LayerLoader) -> None:
        start(loader)
        for ready in loader._ready:
            ready.wait()

    monkeypatch.setattr(LayerLoader, "start", start_and_wait)


@pytest.mark.usefixtures("loaded_first")
def test_operators_do_not_grow_with_chunks_schedules_or_layers():
    policies = "--policies", "reuse,query,query+shift"
    fields = measured(
        "overhead", "--chunks", "3,9", "--chunk-tokens", "8", *policies, "--rounds", "1"
    )
    assert fields["layers"] == 32
    rows = {(row["way"], row["chunks"]): row for row in fields["rows"]}
    assert rows["reuse", 3]["over_stock"] < 1.2  # little more than one forward
    assert rows["query, constant", 3]["over_stock"] < 2.4
    for chunks in (3, 9):
        constant = rows["query, constant", chunks]["operators"]
        assert rows["query, geometric:0.9", chunks]["operators"] <= 1.1 * constant
    for way in ("reuse", "query, constant", "query, geometric:0.9"):
        assert rows[way, 9]["operators"] <= rows[way, 3]["operators"] + 40
        assert rows[way, 3]["waits"] <= rows["stock", 3]["waits"] + 2


def test_decoding_is_measured_in_steps_of_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_overhead, "REQUESTS", (1, 2))
    sizes = joint_steps(monkeypatch)
    fields = measured(
        "overhead", "--decode", "--geometry", "tiny", "--chunks", "1", "--chunk-tokens", "16", "--rounds", "1"
    )  # fmt: skip
    assert {*sizes} == {2}
    assert [(row["way"], row["requests"]) for row in fields["rows"]] == [
        (decode_overhead.STOCK, 1), ("engine", 1), ("engine", 2),
    ]  # fmt: skip
    assert fields["prompt_tokens"] == 32
    for row in fields["rows"]:
        assert 0 < row["outside_ms"] < row["host_ms"]
