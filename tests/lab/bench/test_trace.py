"""A request's timeline, and the overlap of its loading and computing."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from blendrag.fusor.selection.query import QueryPolicy
from blendrag.lab.bench.geometry import bench_adapter
from blendrag.lab.bench.tiers import ON_DISK, tier_store
from blendrag.lab.bench.trace import Pieces, overlap, run_trace
from blendrag.lab.bench.ttft import TtftBench
from blendrag.lab.bench.workload import Workload
from blendrag.metrics import COMPUTE, LAYER, LOAD, REPOSITION, SELECT, WAIT, Timeline
from cli.commands import invoke, said
from lab.bench.lab import SMALL, measured

LAYERS = 4
WORK = Workload(2, 32, 8, 0.15, rounds=1)
MODEL_LANE = (WAIT, REPOSITION, SELECT, COMPUTE)


def traced(policy: str) -> Timeline:
    """The timeline of one blend."""
    adapter = bench_adapter("tiny", None, "float32", "cpu")
    with tier_store(ON_DISK) as there, torch.inference_mode():
        bench = TtftBench(adapter, Workload(2, 32, 8, 0.15, policy), there.store)
        timeline = Timeline()
        Pieces(bench).wall(timeline)
        return timeline


def layers_of(timeline: Timeline, what: str, pass_name: str = "") -> list[int]:
    return [s.layer for s in timeline.spans if (s.what, s.pass_name) == (what, pass_name)]


# -- what is noted --------------------------------------------------------------------------------


def test_every_layer_is_loaded_waited_for_and_computed_once() -> None:
    timeline = traced("random")
    for what in (LOAD, WAIT, LAYER):
        assert layers_of(timeline, what) == list(range(LAYERS)), what
    moved = layers_of(timeline, REPOSITION)  # each time with those behind it that were read
    assert moved[0] == 0
    assert moved == sorted(set(moved))
    assert not layers_of(timeline, SELECT)  # the rows of all layers were planned before


def test_a_policy_that_looks_loads_no_layer_0_and_chooses_in_the_peek_of_layer_1() -> None:
    timeline = traced("hkvd")
    assert layers_of(timeline, LOAD) == list(range(1, LAYERS))
    assert layers_of(timeline, SELECT)[0] == 1


@pytest.mark.usefixtures("ends_early")
def test_the_scout_pass_is_told_apart_and_waits_for_what_is_loaded() -> None:
    timeline = traced("query")
    scouted = list(range(QueryPolicy().attention_layers(LAYERS).stop))
    assert layers_of(timeline, LAYER, "scout") == scouted
    assert layers_of(timeline, LAYER) == list(range(LAYERS))
    waited = layers_of(timeline, WAIT, "scout")  # with what is read into the same allocation
    assert waited[: len(scouted)] == scouted
    assert waited + layers_of(timeline, WAIT) == list(range(LAYERS))


def test_what_layers_consist_of_adds_up_to_them_and_overlaps_nowhere() -> None:
    timeline = traced("query")
    lane = [s for s in timeline.all_spans() if s.what in MODEL_LANE]
    for before, after in pairwise(lane):
        assert before.ended_s <= after.began_s
    layers = [s for s in timeline.spans if s.what == LAYER]
    assert sum(s.seconds for s in lane) == pytest.approx(sum(s.seconds for s in layers))
    assert all(s.seconds >= 0 for s in lane)


def test_without_a_timeline_nothing_is_noted_and_the_model_is_left_as_it_was() -> None:
    adapter = bench_adapter("tiny", None, "float32", "cpu")
    with tier_store(ON_DISK) as there, torch.inference_mode():
        bench = TtftBench(adapter, WORK, there.store)
        with bench.opened() as load:
            request = bench.request(load, "random", 0.15)
            _, _, fusion = bench.fusor.prefill(bench.ids, request, timeline=None)
        assert fusion.timeline is None
        timeline = Timeline()
        Pieces(bench).wall(timeline)
        noted = len(timeline.spans)
        bench.full()
        bench.blend()
        assert len(timeline.spans) == noted
        assert not any(layer._forward_hooks for layer in adapter.decoder_layers)


def test_a_span_that_ends_in_an_error_is_noted() -> None:
    timeline = Timeline()
    with pytest.raises(ValueError, match="broken"), timeline.span(LOAD, 3):
        raise ValueError("broken")
    assert layers_of(timeline, LOAD) == [3]


# -- the overlap ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wall", "load", "compute", "expected"),
    [(10, 10, 6, 1.0), (10, 6, 10, 1.0), (16, 10, 6, 0.0), (13, 10, 6, 0.5), (11.2, 10, 6, 0.8)],
)
def test_overlap_is_the_hidden_share_of_the_shorter_one(
    wall: float, load: float, compute: float, expected: float
) -> None:
    assert overlap(wall, load, compute) == pytest.approx(expected)


def test_loading_alone_and_the_whole_request_take_what_their_tier_takes() -> None:
    adapter = bench_adapter("tiny", None, "bfloat16", "cpu")
    result = run_trace(adapter, Workload(2, 32, 8, 0.15, "random", rounds=1), "80KB/s")
    assert result.kv_bytes == 32768
    assert result.load_ms >= 0.99 * 32768 / 80
    assert result.wall_ms >= 0.99 * 32768 / 80
    assert result.comparable == (
        max(result.load_ms, result.compute_ms) <= 2 * min(result.load_ms, result.compute_ms)
    )


def test_computing_alone_begins_when_everything_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = bench_adapter("tiny", None, "float32", "cpu")
    with tier_store(ON_DISK) as there, torch.inference_mode():
        bench = TtftBench(adapter, WORK, there.store)
        pieces, read, now = Pieces(bench), [], Pieces._now

        def noting(self: Pieces) -> float:
            read.append(there.store.stats().tiers[-1].read_bytes)
            return now(self)

        monkeypatch.setattr(Pieces, "_now", noting)
        pieces.compute()
        assert read == [bench.kv_bytes, bench.kv_bytes]
        pieces.wall()
        assert read[2:] == [bench.kv_bytes, 2 * bench.kv_bytes]


def test_loading_alone_reads_the_layers_that_the_request_reads() -> None:
    adapter = bench_adapter("tiny", None, "float32", "cpu")
    with tier_store(ON_DISK) as there, torch.inference_mode():
        for policy, layers in (("random", LAYERS), ("hkvd", LAYERS - 1)):
            bench = TtftBench(adapter, Workload(2, 32, 8, 0.15, policy), there.store)
            pieces = Pieces(bench)
            pieces.load()
            before = there.store.stats().tiers[-1].read_bytes
            pieces.load()
            read = there.store.stats().tiers[-1].read_bytes - before
            assert read == bench.kv_bytes * layers // LAYERS


# -- the command ----------------------------------------------------------------------------------


def test_the_trace_opens_in_a_viewer_and_says_what_it_is_of(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "trace.json", tmp_path / "trace.png"
    fields = measured("trace", *SMALL, "--policy", "query", "--out", str(out), "--plot", str(plot))
    made: dict[str, Any] = json.loads(out.read_text())
    events = [event for event in made["traceEvents"] if event["ph"] == "X"]
    names = {m["tid"]: m["args"]["name"] for m in made["traceEvents"] if m["ph"] == "M"}
    for event in events:
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        is_load = event["name"].startswith(LOAD)
        assert names[event["tid"]] == ("loader" if is_load else "model")
    assert len(events) == len(fields["spans"])
    assert {event["args"]["pass"] for event in events} == {"scout", "blend"}
    assert made["otherData"]["overlap"] == fields["overlap"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    expected = overlap(fields["wall_ms"], fields["load_ms"], fields["compute_ms"])
    assert fields["overlap"] == pytest.approx(expected)
    assert fields["bound_ms"] == max(fields["load_ms"], fields["compute_ms"])
    assert fields["bound_share"] == pytest.approx(fields["bound_ms"] / fields["wall_ms"])
    assert made["otherData"]["bound_share"] == fields["bound_share"]


def test_the_bound_is_printed_beside_what_was_measured() -> None:
    result = invoke("bench", "trace", *SMALL)
    assert result.exit_code == 0, result.stderr
    assert "bound: the longer of the two" in result.stdout
    assert "bound over request" in result.stdout


def test_a_balanced_disk_is_one_of_a_throughput() -> None:
    fields = measured("trace", *SMALL)
    assert fields["tier"].endswith("MB/s")
    assert fields["load_ms"] > 0


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [(("--tier", "floppy"), "tier 'floppy'"), (("--out", "trace.txt"), "--out trace.txt"),
     (("--plot", "/nowhere/at/all.png"), "--plot /nowhere/at/all.png")],
)  # fmt: skip
def test_what_cannot_be_written_or_read_is_said_before_measuring(
    wrong: tuple[str, ...], sentence: str
) -> None:
    result = invoke("bench", "trace", *SMALL, *wrong)
    assert result.exit_code == 2
    assert sentence in said(result)
