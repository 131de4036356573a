"""First tokens per second: what is printed, that every way chooses the same tokens, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from blendrag.errors import InvalidInputError
from blendrag.lab.bench.geometry import bench_adapter
from blendrag.lab.bench.throughput import ThroughputBench, parse_batch_sizes, run_throughput
from blendrag.lab.bench.workload import Workload
from blendrag.store import open_store
from cli.commands import invoke
from lab.bench.lab import SMALL, measured

REQUESTS = 5


@pytest.fixture(scope="module")
def throughput() -> dict[str, Any]:
    return measured("throughput", *SMALL, "--batch-size", "1,3")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[ThroughputBench]:
    store = open_store(tmp_path, ram_bytes=0, disk_bytes=1 << 30)
    adapter = bench_adapter("tiny", None, "float32", "cpu")
    torch.manual_seed(1)
    with torch.inference_mode():
        for weight in adapter.model.model.layers.parameters():
            weight.mul_(5.0 if weight.ndim == 2 else 1.0)  # so that tokens depend on the prompt
        yield ThroughputBench(adapter, Workload(3, 32, 16, 0.3), REQUESTS, store)
    store.close()


def test_every_way_is_measured_at_every_batch_size(throughput: dict[str, Any]) -> None:
    rows = [(row["way"], row["batch_size"]) for row in throughput["rows"]]
    assert rows == [(way, size) for size in (1, 3) for way in ("full", "reuse", "blend")]
    assert throughput["requests"] == 3
    assert throughput["prompt_tokens"] == [70, 72]
    for row in throughput["rows"]:
        assert row["spread"][0] <= row["first_tokens_per_s"] <= row["spread"][1]


def test_figures_follow_from_the_times(throughput: dict[str, Any]) -> None:
    rows = {(row["way"], row["batch_size"]): row for row in throughput["rows"]}
    full = rows["full", 1]["first_tokens_per_s"]
    for (way, size), row in rows.items():
        rate = row["first_tokens_per_s"]
        assert row["over_full"] == pytest.approx(rate / full)
        assert row["over_alone"] == pytest.approx(rate / rows[way, 1]["first_tokens_per_s"])
        assert row["batch_ms"] == pytest.approx(1e3 * size / rate)


@pytest.mark.parametrize("way", ["full", "reuse", "blend"])
def test_batches_choose_the_tokens_that_each_prompt_chooses(
    bench: ThroughputBench, way: str
) -> None:
    alone = getattr(bench, way)(1)
    assert len(alone) == REQUESTS
    assert len(set(alone)) > 1
    for size in (2, 5):
        assert getattr(bench, way)(size) == alone


def test_the_requests_are_of_different_lengths_over_the_same_chunks(bench: ThroughputBench) -> None:
    assert {len(plan.ids) for plan in bench.plans} == {112, 110, 108, 106}
    assert len({plan.ids for plan in bench.plans}) == REQUESTS
    assert len({frozenset(s.stored_ids for s in plan.chunks) for plan in bench.plans}) == 1
    for plan in bench.plans:
        assert [s.position for s in plan.segments] == [0, 32, 64, 96]


def test_a_batch_is_one_forward_and_single_prompts_are_as_many_as_they_are(
    bench: ThroughputBench,
) -> None:
    forwards: list[int] = []
    hook = bench.adapter.stack.layers[2].register_forward_hook(lambda *_: forwards.append(1))
    counts = {}
    for size in (1, 2, 5):
        forwards.clear()
        bench.reuse(size)
        counts[size] = len(forwards)
    hook.remove()
    assert counts == {1: 5, 2: 3, 5: 1}


@pytest.mark.parametrize("text", ["", "0", "1,x", "2,-1", "1.5"])
def test_nonsense_batch_sizes_are_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="batch sizes") as raised:
        parse_batch_sizes(text)
    assert tiny.one_sentence(str(raised.value))
    assert invoke("bench", "throughput", *SMALL, "--batch-size", text).exit_code != 0


def test_batches_of_a_model_whose_attention_takes_masks_are_refused() -> None:
    adapter = tiny.adapter(tiny.family("gemma2", attn_implementation="eager"))
    workload = Workload(2, 8, 8, 0.3, "reuse", rounds=1)
    with pytest.raises(InvalidInputError, match="masks") as raised:
        run_throughput(adapter, workload, [1, 2])
    assert tiny.one_sentence(str(raised.value))
    assert len(run_throughput(adapter, workload, [1]).rows) == 3


def test_the_table_names_every_way() -> None:
    result = invoke("bench", "throughput", *SMALL, "--batch-size", "2")
    assert result.exit_code == 0, result.stderr
    for word in ("full", "reuse", "blend", "tokens/s"):
        assert word in result.stdout
