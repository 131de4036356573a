"""First tokens per second: the figures, and that all ways choose the same tokens at every batch size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

import tiny
from blendrag.errors import InvalidInputError
from blendrag_lab.bench.throughput import blend, full, make_plans, throughput
from blendrag_lab.bench.workload import REUSE, Workload
from lab.tests.bench.small import printed, timed, tiny_bench

REQUESTS = 5


def test_figures_follow_from_the_times():
    fields = printed("throughput")
    rows = {(row["way"], row["batch_size"]): row for row in fields["rows"]}
    assert list(rows) == [(way, size) for size in (1, 3) for way in ("full", "reuse", "blend")]
    assert (fields["requests"], fields["prompt_tokens"]) == (3, [70, 72])
    for (way, _), row in rows.items():
        rate = row["first_tokens_per_s"]
        assert row["spread"][0] <= rate <= row["spread"][1]
        assert row["over_alone"] == pytest.approx(rate / rows[way, 1]["first_tokens_per_s"])


def test_batches_of_different_lengths_choose_the_tokens_of_single_prompts():
    with tiny_bench(Workload(3, 32, 16, 0.3)) as bench:
        plans = make_plans(bench.prompt, REQUESTS)
        assert {len(plan.ids) for plan in plans} == {112, 110, 108, 106}
        assert len({plan.ids for plan in plans}) == REQUESTS
        assert len({frozenset(s.stored_ids for s in plan.chunks) for plan in plans}) == 1
        ways: tuple[Callable[..., list[int]], ...] = (full, blend, partial(blend, **REUSE))
        for way in ways:
            alone = way(bench, [[plan] for plan in plans])
            assert len(alone) == REQUESTS
            assert len(set(alone)) > 1
            assert way(bench, [plans[:2], plans[2:4], plans[4:]]) == way(bench, [plans]) == alone


def test_batches_are_refused_for_a_model_whose_attention_takes_masks():
    adapter = tiny.adapter(tiny.family("gemma2", attn_implementation="eager"))
    workload = Workload(2, 8, 8, 0.3, "reuse", rounds=1)
    with pytest.raises(InvalidInputError, match="masks") as raised:
        throughput(timed(adapter), workload, "1,2")
    assert tiny.one_sentence(str(raised.value))
    assert len(throughput(timed(adapter), workload, "1").rows) == 3
