"""Who is prefilled with whom: while rows are few, and while there is memory."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

import tiny
from blendrag.engine.packing_rule import ROWS, Load, PackingRule
from blendrag.fusor.selection import Schedule, make_policy
from blendrag.model import ModelAdapter
from blendrag.planning.plan import Plan, PlannedChunk, Reason, ReasonCode
from blendrag.planning.profile import Curve
from blendrag.text.prompt import PromptPlan, Segment

CPU = torch.device("cpu")
AMPLE = PackingRule(CPU, 1 << 40)


def load(rows: float, size_bytes: int = 0) -> Load:
    return Load(rows, size_bytes)


class Profiled:
    """As much of a profile as the rule reads."""

    def __init__(self, rows: tuple[float, ...], seconds: tuple[float, ...], row_s: float) -> None:
        self.layer = Curve(rows, seconds, row_s)


#: A layer takes a millisecond up to 100 rows, and ten microseconds for each one beyond.
MEASURED: Any = Profiled((1.0, 100.0), (1e-3, 1e-3), 1e-5)


def test_without_a_profile_the_rows_of_the_device_limit_a_pack() -> None:
    limit = ROWS["cpu"]
    assert AMPLE.admits([load(limit / 2)], load(limit / 2), None)
    assert not AMPLE.admits([load(limit / 2)], load(limit / 2 + 1), None)
    assert PackingRule(torch.device("cuda"), 1 << 40).admits([load(limit)], load(limit), None)


def test_with_a_profile_prompts_go_together_if_that_is_faster() -> None:
    assert AMPLE.admits([load(50)], load(50), MEASURED)  # one for the price of two
    assert AMPLE.admits([load(100)], load(50), MEASURED)  # 1.5 for 2
    assert not AMPLE.admits([load(1000)], load(100), MEASURED)  # 11 for 11
    assert not AMPLE.admits([load(1000)], load(1000), MEASURED)


def test_memory_limits_a_pack() -> None:
    rule = PackingRule(CPU, 1000)
    assert rule.admits([load(1, 400), load(1, 300)], load(1, 300), None)
    assert not rule.admits([load(1, 400), load(1, 300)], load(1, 301), None)
    assert not PackingRule(CPU, 0).admits([load(1, 1)], load(1, 1), MEASURED)


def test_a_pack_opens_at_most_half_of_the_allowed_files() -> None:
    rule = PackingRule(CPU, 1 << 40, limit_files=10)
    assert rule.admits([Load(1, 0, 4), Load(1, 0, 3)], Load(1, 0, 3), None)
    assert not rule.admits([Load(1, 0, 4), Load(1, 0, 3)], Load(1, 0, 4), None)
    assert 0 < AMPLE.limit_files <= os.sysconf("SC_OPEN_MAX") // 2


def planned(adapter: ModelAdapter, policy: str, ratio: float) -> Plan:
    """100 tokens, of which 60 are in two blended chunks and 10 are exact."""
    ids = tiny.random_ids(100)
    spans = (
        tiny.span(adapter, ids, 0, 10, exact=True),
        tiny.span(adapter, ids, 10, 40, stored_at=1),
        tiny.span(adapter, ids, 50, 80, stored_at=1),
    )
    asked = PromptPlan((Segment("", tuple(ids[0].tolist()), 0, None, ()),))
    schedule, why = Schedule("constant"), Reason(ReasonCode.MOVED, "")
    chunks = tuple(PlannedChunk(Segment("", (), span.start), why, span) for span in spans)
    return Plan(asked, chunks, make_policy(policy), schedule, ratio)


@pytest.mark.parametrize(
    ("policy", "ratio", "rows"),
    [
        ("reuse", 0.0, 30),
        ("random", 0.5, 30 + 30),
        ("blend", 0.5, 30 + 30 + 30),  # the scout computes the fresh tokens, too
        ("query", 0.5, 30 + 30 + 30 * 2 / 4),  # in the first two thirds of four layers
        ("hkvd", 0.5, 30 + (60 + 3 * 30) / 4),  # all candidates enter
        ("boundary(5)", 0.9, 30 + 2 * 5),
        ("full", 0.0, 30 + 60),
    ],
)
@pytest.mark.usefixtures("ends_early")
def test_rows_are_those_that_the_policy_computes_in_a_layer(
    adapter: ModelAdapter, policy: str, ratio: float, rows: float
) -> None:
    load = Load.of(planned(adapter, policy, ratio), 6, adapter)
    assert load.rows == pytest.approx(rows)
    assert load.files == 3


def test_memory_grows_with_the_answer_and_with_the_rows_of_the_fullest_layer(
    adapter: ModelAdapter,
) -> None:
    small = Load.of(planned(adapter, "reuse", 0.0), 6, adapter).size_bytes
    kv_bytes = sum(2 * la.kv_heads * la.head_dim * 4 for la in adapter.layout.layers)
    longer = Load.of(planned(adapter, "reuse", 0.0), 106, adapter).size_bytes
    assert longer - small == 100 * kv_bytes
    looking = Load.of(planned(adapter, "hkvd", 0.1), 6, adapter).size_bytes
    assert looking > Load.of(planned(adapter, "random", 0.1), 6, adapter).size_bytes > small


def test_a_prompt_without_chunks_computes_all_its_tokens(adapter: ModelAdapter) -> None:
    bare = replace(planned(adapter, "hkvd", 0.5), chunks=())
    assert Load.of(bare, 6, adapter).rows == 100
