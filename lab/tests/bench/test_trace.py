"""A request's timeline, and the overlap of its loading and computing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch

from blendrag.fusor.selection.query import QueryPolicy
from blendrag.metrics import COMPUTE, LAYER, LOAD, REPOSITION, SELECT, WAIT, Timeline
from blendrag_lab.bench import trace
from blendrag_lab.bench.tiers import ON_DISK, TierStore, tier_store
from blendrag_lab.bench.trace import compute_ms, layers_read, load_ms, overlap
from blendrag_lab.bench.workload import PromptBench, Workload
from lab.tests.bench.small import LAYERS, printed, timed, tiny_adapter


@pytest.fixture(scope="module")
def there() -> Iterator[TierStore]:
    with tier_store(ON_DISK) as there, torch.inference_mode():
        yield there


def bench_of(there: TierStore, policy: str) -> PromptBench:
    return PromptBench(tiny_adapter(), Workload(2, 32, 8, 0.15, policy), there)


def traced(there: TierStore, policy: str) -> Timeline:
    """The timeline of one blend."""
    timeline = Timeline()
    bench_of(there, policy).blend(timeline)
    return timeline


def read_bytes(there: TierStore) -> int:
    return there.store.stats().tiers[-1].read_bytes


def layers_of(timeline: Timeline, what: str, pass_name: str = "") -> list[int]:
    return [s.layer for s in timeline.spans if (s.what, s.pass_name) == (what, pass_name)]


def test_every_layer_is_loaded_waited_for_and_computed_once(there):
    timeline = traced(there, "random")
    for what in (LOAD, WAIT, LAYER):
        assert layers_of(timeline, what) == list(range(LAYERS)), what
    moved = layers_of(timeline, REPOSITION)  # several layers that are there move at once
    assert moved[0] == 0
    assert moved == sorted(set(moved))
    assert not layers_of(timeline, SELECT)  # the rows of all layers were planned before


def test_hkvd_loads_no_layer_0_and_selects_before_layer_1(there):
    timeline = traced(there, "hkvd")
    assert layers_of(timeline, LOAD) == list(range(1, LAYERS))
    assert layers_of(timeline, SELECT)[0] == 1


@pytest.mark.usefixtures("ends_early")
def test_the_scout_pass_has_its_own_spans_and_waits(there):
    timeline = traced(there, "query")
    scouted = list(range(QueryPolicy().attention_layers(LAYERS).stop))
    assert layers_of(timeline, LAYER, "scout") == scouted
    assert layers_of(timeline, LAYER) == list(range(LAYERS))
    waited = layers_of(timeline, WAIT, "scout")  # with layers read into the same allocation
    assert waited[: len(scouted)] == scouted
    assert waited + layers_of(timeline, WAIT) == list(range(LAYERS))


def test_parts_of_layers_add_up_and_do_not_overlap(there):
    timeline = traced(there, "query")
    lane = [s for s in timeline.all_spans() if s.what in (WAIT, REPOSITION, SELECT, COMPUTE)]
    for before, after in pairwise(lane):
        assert before.ended_s <= after.began_s
    layers = [s for s in timeline.spans if s.what == LAYER]
    assert sum(s.seconds for s in lane) == pytest.approx(sum(s.seconds for s in layers))
    assert all(s.seconds >= 0 for s in lane)


def test_without_a_timeline_nothing_is_recorded_and_no_hook_stays(there):
    bench, timeline = bench_of(there, "random"), Timeline()
    bench.blend(timeline)
    recorded = len(timeline.spans)
    bench.full()
    assert bench.blend()[1].timeline is None
    assert len(timeline.spans) == recorded
    assert not any(layer._forward_hooks for layer in bench.adapter.decoder_layers)


def test_a_span_that_ends_in_an_error_is_recorded():
    timeline = Timeline()
    with pytest.raises(ValueError, match="broken"), timeline.span(LOAD, 3):
        raise ValueError("broken")
    assert layers_of(timeline, LOAD) == [3]


def test_overlap_is_the_hidden_share_of_the_shorter_one():
    assert overlap(10, 10, 6) == overlap(10, 6, 10) == 1.0
    assert [overlap(wall, 10, 6) for wall in (16, 13)] == pytest.approx([0.0, 0.5])


def test_a_throttled_tier_bounds_loading_and_the_request():
    result = trace.trace(timed(), Workload(2, 32, 8, 0.15, "random", rounds=1), tier="1MB/s")
    assert result.kv_bytes == 65536
    assert min(result.load_ms.low, result.wall_ms.low) >= 0.99 * 65536 / 1000


def test_computing_alone_starts_after_everything_was_read(there, monkeypatch):
    bench, read = bench_of(there, "query"), [read_bytes(there)]

    def timed(prefill: Callable[[], object], device: object) -> float:
        read.append(read_bytes(there))
        prefill()
        read.append(read_bytes(there))
        return 1.0

    monkeypatch.setattr(trace, "milliseconds", timed)
    compute_ms(bench)
    assert [each - read[0] for each in read] == [0, bench.kv_bytes, bench.kv_bytes]


@pytest.mark.parametrize(("policy", "layers"), [("random", LAYERS), ("hkvd", LAYERS - 1)])
def test_loading_alone_reads_the_layers_of_the_request(there, policy, layers):
    bench = bench_of(there, policy)
    reads = layers_read(bench)
    before = read_bytes(there)
    load_ms(bench, reads)
    assert read_bytes(there) - before == bench.kv_bytes * layers // LAYERS


def test_the_default_tier_is_a_throughput_and_the_overlap_follows_from_the_times():
    fields = printed("trace")
    assert fields["tier"].endswith("MB/s")
    times = (fields[f"{name}_ms"]["median"] for name in ("wall", "load", "compute"))
    assert fields["overlap"] == pytest.approx(overlap(*times))
