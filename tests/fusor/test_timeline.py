"""The timeline of a blended prefill: each layer is loaded, waited for and computed once."""

from __future__ import annotations

from itertools import pairwise

import pytest

import tiny
from blendrag.fusor import Fusor
from blendrag.fusor.selection.query import QueryPolicy
from blendrag.metrics import COMPUTE, LAYER, LOAD, REPOSITION, SELECT, WAIT, Timeline
from blendrag.model import ModelAdapter
from fusor.two_chunks import IDS, LAYERS, exact_spans


def traced(adapter: ModelAdapter, policy: str) -> Timeline:
    """The timeline of one blended prefill."""
    timeline = Timeline()
    request = tiny.request(IDS, exact_spans(adapter), policy, schedule="constant")
    Fusor(adapter).prefill(IDS, request, 0, timeline=timeline)
    return timeline


def layers_of(timeline: Timeline, what: str, pass_name: str = "") -> list[int]:
    return [s.layer for s in timeline.spans if (s.what, s.pass_name) == (what, pass_name)]


def test_every_layer_is_loaded_waited_for_and_computed_once(adapter):
    timeline = traced(adapter, "random")
    for what in (LOAD, WAIT, LAYER):
        assert layers_of(timeline, what) == list(range(LAYERS)), what
    moved = layers_of(timeline, REPOSITION)  # several layers that are there move at once
    assert moved[0] == 0
    assert moved == sorted(set(moved))
    assert not layers_of(timeline, SELECT)  # the rows of all layers were planned before


def test_hkvd_loads_no_layer_0_and_selects_before_layer_1(adapter):
    timeline = traced(adapter, "hkvd")
    assert layers_of(timeline, LOAD) == list(range(1, LAYERS))
    assert layers_of(timeline, SELECT)[0] == 1


@pytest.mark.usefixtures("ends_early")
def test_the_scout_pass_has_its_own_spans_and_waits(adapter):
    timeline = traced(adapter, "query")
    scouted = list(range(QueryPolicy().attention_layers(LAYERS).stop))
    assert layers_of(timeline, LAYER, "scout") == scouted
    assert layers_of(timeline, LAYER) == list(range(LAYERS))
    waited = layers_of(timeline, WAIT, "scout")  # with layers read into the same allocation
    assert waited[: len(scouted)] == scouted
    assert waited + layers_of(timeline, WAIT) == list(range(LAYERS))


def test_parts_of_layers_add_up_and_do_not_overlap(adapter):
    timeline = traced(adapter, "query")
    lane = [s for s in timeline.all_spans() if s.what in (WAIT, REPOSITION, SELECT, COMPUTE)]
    for before, after in pairwise(lane):
        assert before.ended_s <= after.began_s
    layers = [s for s in timeline.spans if s.what == LAYER]
    assert sum(s.seconds for s in lane) == pytest.approx(sum(s.seconds for s in layers))
    assert all(s.seconds >= 0 for s in lane)


def test_a_span_that_ends_in_an_error_is_recorded():
    timeline = Timeline()
    with pytest.raises(ValueError, match="broken"), timeline.span(LOAD, 3):
        raise ValueError("broken")
    assert layers_of(timeline, LOAD) == [3]
