"""First tokens per second: the figures, and that all ways choose the same tokens at every batch size."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tiny
from blendrag.errors import InvalidInputError
from blendrag.lab.bench.throughput import ThroughputBench, throughput
from blendrag.lab.bench.workload import Workload
from lab.bench.small import printed, timed, tiny_bench

REQUESTS = 5


@pytest.fixture(scope="module")
def bench() -> Iterator[ThroughputBench]:
    with tiny_bench(Workload(3, 32, 16, 0.3)) as bench:
        yield ThroughputBench(bench, REQUESTS)


def test_figures_follow_from_the_times() -> None:
    fields = printed("throughput")
    rows = {(row["way"], row["batch_size"]): row for row in fields["rows"]}
    assert list(rows) == [(way, size) for size in (1, 3) for way in ("full", "reuse", "blend")]
    assert (fields["requests"], fields["prompt_tokens"]) == (3, [70, 72])
    for (way, _), row in rows.items():
        rate = row["first_tokens_per_s"]
        assert row["spread"][0] <= rate <= row["spread"][1]
        assert row["over_alone"] == pytest.approx(rate / rows[way, 1]["first_tokens_per_s"])


@pytest.mark.parametrize("way", ["full", "reuse", "blend"])
def test_batches_choose_the_tokens_of_single_prompts(bench: ThroughputBench, way: str) -> None:
    alone = getattr(bench, way)(1)
    assert len(alone) == REQUESTS
    assert len(set(alone)) > 1
    for size in (2, 5):
        assert getattr(bench, way)(size) == alone


def test_requests_have_different_lengths_over_the_same_chunks(bench: ThroughputBench) -> None:
    assert {len(plan.ids) for plan in bench.plans} == {112, 110, 108, 106}
    assert len({plan.ids for plan in bench.plans}) == REQUESTS
    assert len({frozenset(s.stored_ids for s in plan.chunks) for plan in bench.plans}) == 1
    for plan in bench.plans:
        assert [s.position for s in plan.segments] == [0, 32, 64, 96]


def test_batches_are_refused_for_a_model_whose_attention_takes_masks() -> None:
    adapter = tiny.adapter(tiny.family("gemma2", attn_implementation="eager"))
    workload = Workload(2, 8, 8, 0.3, "reuse", rounds=1)
    with pytest.raises(InvalidInputError, match="masks") as raised:
        throughput(timed(adapter), workload, "1,2")
    assert tiny.one_sentence(str(raised.value))
    assert len(throughput(timed(adapter), workload, "1").rows) == 3
