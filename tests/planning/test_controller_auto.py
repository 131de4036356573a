"""Ratio ``auto`` through the engine: what is decided by a profile is what is done, and is explained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tiny
from blendrag.config import Settings
from blendrag.engine import Answer, BlendEngine, Options
from blendrag.errors import InvalidInputError
from blendrag.fusor.selection import PromptGeometry
from blendrag.lab.bench.tiers import Throttle, ThrottledStore
from blendrag.planning import calibration
from blendrag.planning.controller import PROMPT_END, Controller
from blendrag.planning.curve import Curve
from blendrag.planning.plan import PlannedChunk
from blendrag.planning.profile import Profile, Tier
from blendrag.planning.profile_record import conditions_of, path_of, remember
from blendrag.text.prompt import PromptPlan, Segment

LAYERS = 4
AUTO = Options(ratio="auto", policy="random", max_new_tokens=4)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    # No memory tier, so that everything lies on disk, whatever was asked before.
    root = tmp_path_factory.mktemp("auto") / "store"
    with tiny.engine(tiny.llama(), root, ram_bytes=0) as made:
        made.ingest([tiny.document(i) for i in range(3)])
        yield made


@pytest.fixture(autouse=True)
def _forgotten(engine: BlendEngine) -> Iterator[None]:
    yield
    path_of(engine.resources.root, engine.resources.kv_validity.namespace).unlink(missing_ok=True)
    for calibrated in (engine.resources.root / "verified").glob("*.schedules.json"):
        calibrated.unlink()


def prompt(engine: BlendEngine) -> str:
    texts = [text for number in (0, 1, 2) for text in tiny.chunk_texts(engine, number)]
    return "Answer from the context.\n\n" + "\n\n".join(texts) + "\n\nQuestion: What was built?"


def line(row_s: float) -> Curve:
    return Curve((1.0, 4096.0), (row_s, 4096 * row_s), row_s)


def profiled(engine: BlendEngine, bytes_per_s: float, row_s: float = 1e-6, **changes: Any) -> None:
    """Have the engine remember an invented profile: one disk, and so much a row and layer."""
    layout = engine.resources.layout
    made = Profile(
        conditions=conditions_of(engine.adapter, engine.resources.kv_validity.namespace),
        prefill=line(LAYERS * row_s),
        layer=line(row_s),
        last=line(row_s),
        scout=line(row_s),
        peek_s=0.0,
        fixed_s=0.0,
        tiers=(Tier("disk", bytes_per_s),),
        device_bytes_per_s=None,
        is_shared=False,
        chunk_tokens=64,
        layer_bytes=tuple(layout.layer_bytes(i, 64) for i in range(LAYERS)),
        took_s=1.0,
        measured={},
    )
    remember(engine.resources.root, replace(made, **changes))


def token_bytes(engine: BlendEngine) -> int:
    """Of one token in one layer."""
    return engine.resources.layout.layer_bytes(0, 1)


def ask(engine: BlendEngine, options: Options = AUTO) -> Answer:
    answer = engine.generate(prompt(engine), options)
    engine.drain()
    return answer


# -- the ratio ---------------------------------------------------------------------------------------


def test_behind_a_throttled_reader_the_larger_ratio_that_hides_is_taken(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token loads twice as long as it computes: with the last layer left at the least, what is between
    .15 and everything hides."""
    row_s = 5e-6
    bytes_per_s = token_bytes(engine) / (2 * row_s)
    profiled(engine, bytes_per_s, row_s)
    store = engine.resources.store
    unthrottled: Any = SimpleNamespace(open=store.open)
    slow = ThrottledStore(unthrottled, Throttle(bytes_per_s))
    monkeypatch.setattr(store, "open", slow.open)
    # A prefill is faster than this disk; what is loaded is not the question here.
    monkeypatch.setattr("blendrag.planning.choice.WORTH", 1.0)
    metrics = ask(engine).metrics
    assert metrics.ratio > 0.3
    assert "hides behind the load" in metrics.decision
    assert metrics.reused_tokens > 0
    assert metrics.schedule == "constant"
    assert metrics.predicted_load_s is not None
    assert metrics.load_s >= 0.99 * metrics.predicted_load_s  # it slept for that long
    least = ask(engine, replace(AUTO, ratio=0.15)).metrics
    assert least.ratio == pytest.approx(0.15, abs=0.01)
    assert least.predicted_load_s is not None
    assert least.load_s >= 0.99 * least.predicted_load_s


def test_from_a_fast_store_the_least_ratio_is_taken(engine: BlendEngine) -> None:
    profiled(engine, 1e12)
    metrics = ask(engine).metrics
    assert metrics.ratio == pytest.approx(0.15, abs=0.01)
    assert "smallest that keeps quality" in metrics.decision
    assert metrics.schedule == "constant"


def test_a_schedule_asked_for_stays(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blendrag.planning.choice.WORTH", 1.0)
    profiled(engine, token_bytes(engine) / 1e-5, 5e-6)
    metrics = ask(engine, replace(AUTO, schedule="linear")).metrics
    assert metrics.schedule == "linear"


def test_a_calibrated_schedule_is_the_one_found_nearest_to_the_ratio_decided(
    engine: BlendEngine,
) -> None:
    root, namespace = engine.resources.root, engine.resources.kv_validity.namespace
    near, far = (
        calibration.Calibration("random", ratio, weights, 0, "", 0, 1, 4, 0, calibration.GIVEN)
        for ratio, weights in ((0.15, (0.45, 0.0, 0.0)), (0.9, (1.0, 1.0, 0.7)))
    )
    calibration.remember(root, namespace, near)
    calibration.remember(root, namespace, far)
    flat = Curve((1.0, 4096.0), (1e-3, 1e-3), 0.0)  # as on a GPU, to which all these rows are few
    profiled(engine, 1e12, layer=flat, last=flat, prefill=line(1.0))
    metrics = ask(engine).metrics
    assert metrics.ratio > 0.6
    assert metrics.schedule == str(far.schedule)
    ran = [note for note in metrics.notes if "found at ratio 0.9, the nearest to" in note]
    assert len(ran) == len(metrics.notes) == (metrics.ratio != 0.9)
    fixed = ask(engine, replace(AUTO, ratio=0.15)).metrics
    assert (fixed.schedule, fixed.notes) == (str(near.schedule), ())


def test_the_least_ratio_is_a_setting(tmp_path: Path) -> None:
    with tiny.engine(
        tiny.llama(), tmp_path / "s", ratio="auto", min_ratio=0.4, policy="random"
    ) as e:
        e.ingest([tiny.document(i) for i in range(3)])
        assert ask(e, Options(max_new_tokens=2)).metrics.ratio == pytest.approx(0.4, abs=0.01)
        profiled(e, 1e12, tiers=(Tier("disk", 1e12), Tier("memory", 1e12)))
        assert ask(e, Options(max_new_tokens=2)).metrics.ratio == pytest.approx(0.4, abs=0.01)


def test_a_request_may_bring_its_own_least_ratio(engine: BlendEngine) -> None:
    own = replace(AUTO, min_ratio=0.4)
    assert ask(engine, own).metrics.ratio == pytest.approx(0.4, abs=0.01)
    profiled(engine, 1e12)
    assert ask(engine, own).metrics.ratio == pytest.approx(0.4, abs=0.01)
    assert ask(engine, replace(own, min_ratio=0.0)).metrics.recomputed_tokens == 0
    given = ask(engine, replace(own, ratio=0.2)).metrics
    assert given.ratio == pytest.approx(0.2, abs=0.01)
    assert "min_ratio ignored: it applies only to ratio=auto" in given.notes


# -- load or compute ---------------------------------------------------------------------------------


def test_a_store_slower_than_computing_is_not_read_and_the_answer_says_so(
    engine: BlendEngine,
) -> None:
    profiled(engine, 1e3)
    answer = ask(engine)
    metrics = answer.metrics
    assert metrics.reused_tokens == 0
    assert metrics.load_s == 0.0
    assert {chunk.outcome for chunk in metrics.chunks} == {"computed"}
    assert all("faster here than waiting" in chunk.reason for chunk in metrics.chunks)
    (note,) = metrics.notes
    assert note.startswith("the store is slower than computing here, so nothing was read")
    assert metrics.decision.endswith("with everything loaded)")  # and no word on a ratio
    assert "computed afresh" in metrics.decision
    assert answer.text == ask(engine, Options(mode="full", max_new_tokens=4)).text


def test_where_blending_takes_longer_than_computing_the_store_is_not_blamed(
    engine: BlendEngine,
) -> None:
    profiled(engine, 1e12, fixed_s=10.0)
    metrics = ask(engine).metrics
    assert metrics.reused_tokens == 0
    assert all("faster here than blending it" in chunk.reason for chunk in metrics.chunks)
    (note,) = metrics.notes
    assert note.startswith("blending takes longer than computing here, so nothing was read")


def test_what_was_computed_by_choice_is_not_stored_again(engine: BlendEngine) -> None:
    before = engine.stats()
    profiled(engine, 1e3)
    ask(engine)
    after = engine.stats()
    assert (after.entries, after.puts) == (before.entries, before.puts)


def test_in_between_a_part_is_loaded_and_the_answer_is_a_blend_of_both(engine: BlendEngine) -> None:
    row_s = 5e-6
    profiled(engine, token_bytes(engine) / (0.8 * row_s), row_s)
    metrics = ask(engine).metrics
    outcomes = [chunk.outcome for chunk in metrics.chunks]
    assert "computed" in outcomes
    assert "blended" in outcomes
    assert "stored parts computed afresh" in metrics.decision
    assert metrics.prompt_tokens == metrics.reused_tokens + metrics.fresh_tokens


def test_the_heads_of_chunks_that_are_not_loaded_are_not_counted_as_recomputed(
    engine: BlendEngine,
) -> None:
    row_s = 5e-6
    profiled(engine, token_bytes(engine) / (0.8 * row_s), row_s)
    metrics = ask(engine, replace(AUTO, policy="boundary(16)")).metrics
    outcomes = [chunk.outcome for chunk in metrics.chunks]
    assert {"computed", "blended"} <= {*outcomes}
    rows = metrics.fresh_tokens + 16 * outcomes.count("blended")
    assert metrics.predicted_compute_s == pytest.approx(LAYERS * rows * row_s)


def test_a_ratio_that_was_given_is_kept_and_everything_is_loaded(engine: BlendEngine) -> None:
    profiled(engine, 1e3)
    metrics = ask(engine, replace(AUTO, ratio=0.5)).metrics
    assert metrics.ratio == pytest.approx(0.5, abs=0.01)
    assert metrics.reused_tokens > 0
    assert metrics.decision == ""


# -- predictions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.3, "auto"])
@pytest.mark.parametrize("policy", ["random", "hkvd", "query", "blend", "boundary(4)", "full"])
def test_predicted_times_are_stored_beside_measured_ones(
    engine: BlendEngine, policy: str, ratio: Any
) -> None:
    profiled(engine, 1e9)
    metrics = ask(engine, Options(policy=policy, ratio=ratio, max_new_tokens=2)).metrics
    assert metrics.predicted_ttft_s is not None
    assert metrics.predicted_ttft_s > 0
    assert metrics.predicted_compute_s is not None
    assert metrics.predicted_load_s is not None
    assert metrics.as_dict()["predicted_ttft_s"] == metrics.predicted_ttft_s


def test_the_rows_predicted_are_the_rows_computed(engine: BlendEngine) -> None:
    """At a microsecond a row and layer the predicted compute counts them."""
    profiled(engine, 1e12, row_s=1e-6)
    for policy in ("random", "boundary(4)"):
        metrics = ask(engine, Options(policy=policy, ratio=0.3, max_new_tokens=2)).metrics
        blended = sum(c.tokens for c in metrics.chunks if c.outcome == "blended")
        rows = LAYERS * metrics.fresh_tokens + LAYERS * metrics.charged_ratio * blended
        assert metrics.predicted_compute_s == pytest.approx(rows * 1e-6, rel=0.02)


@pytest.mark.parametrize(
    ("policy", "ratio"),
    [("random", 0.3), ("random", 1.0), ("full", 0.3), ("hkvd", 0.3), ("query", 0.3), ("query", 1.0),
     ("query+hkvd", 0.3), ("boundary(4)", 0.3), ("boundary(4096)", 0.3)],
)  # fmt: skip
def test_the_bytes_whose_loading_is_predicted_are_the_bytes_read(
    engine: BlendEngine, policy: str, ratio: float
) -> None:
    profiled(engine, 1e9)
    before = engine.stats().tiers[-1].read_bytes
    metrics = ask(engine, Options(policy=policy, ratio=ratio, max_new_tokens=2)).metrics
    assert metrics.predicted_load_s is not None
    read = engine.stats().tiers[-1].read_bytes - before
    assert read > 0
    assert metrics.predicted_load_s * 1e9 == pytest.approx(read)


def test_without_a_profile_nothing_is_predicted(engine: BlendEngine) -> None:
    metrics = ask(engine, replace(AUTO, ratio=0.2)).metrics
    assert metrics.predicted_ttft_s is None
    assert metrics.decision == ""
    assert not metrics.notes


# -- without a profile to go by ----------------------------------------------------------------------


def test_without_a_profile_auto_is_the_least_ratio_and_names_the_command(
    engine: BlendEngine,
) -> None:
    metrics = ask(engine).metrics
    assert metrics.ratio == pytest.approx(0.15, abs=0.01)
    (note,) = metrics.notes
    assert f"blendrag profile --model {engine.resources.model_name}" in note
    assert str(engine.resources.root) in note
    assert "ratio 0.15 is used" in note
    assert tiny.one_sentence(note)


def test_a_profile_of_another_machine_is_not_gone_by(engine: BlendEngine) -> None:
    conditions = conditions_of(engine.adapter, engine.resources.kv_validity.namespace)
    profiled(engine, 1e3, conditions=replace(conditions, machine="another"))
    metrics = ask(engine).metrics
    assert metrics.reused_tokens > 0
    (note,) = metrics.notes
    assert "measured elsewhere (machine another)" in note


def test_a_tier_that_was_never_timed_is_named(engine: BlendEngine) -> None:
    profiled(engine, 1e9, tiers=(Tier("memory", 1e9),))
    metrics = ask(engine).metrics
    assert metrics.reused_tokens > 0
    (note,) = metrics.notes
    assert "no times for reading from disk" in note


@pytest.mark.parametrize("mode", ["full", "reuse", "prefix"])
def test_in_other_modes_auto_decides_nothing_and_says_nothing(
    engine: BlendEngine, mode: Any
) -> None:
    assert not ask(engine, replace(AUTO, mode=mode)).metrics.notes


# -- bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ratio", ["fast", "0.2", "", 1.01, -0.1, float("nan"), True, [0.1], b"auto"]
)
def test_a_ratio_that_is_none_is_refused(ratio: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"ratio .*\[0, 1\]"):
        Options(ratio=ratio)


def test_settings_take_auto_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLENDRAG_RATIO", "auto")
    assert Settings().ratio == "auto"
    assert Settings().fixed_ratio == 0.15
    monkeypatch.setenv("BLENDRAG_RATIO", "0.25")
    assert Settings().ratio == Settings().fixed_ratio == 0.25
    for wrong in ("1.5", "automatic"):
        monkeypatch.setenv("BLENDRAG_RATIO", wrong)
        with pytest.raises(ValueError):
            Settings()


@pytest.mark.parametrize("least", [1.5, -0.1, float("nan"), "auto", True])
def test_a_least_ratio_outside_is_refused(tmp_path: Path, least: Any) -> None:
    for made in (
        lambda: BlendEngine("demo", tmp_path, min_ratio=least),
        lambda: Options(min_ratio=least),
    ):
        with pytest.raises(
            InvalidInputError, match=rf"min_ratio {least!r} must be a number"
        ) as raised:
            made()
        assert tiny.one_sentence(str(raised.value))


# -- what asks ----------------------------------------------------------------------------------------


def test_the_question_begins_behind_the_last_chunk_though_that_is_computed(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[PromptGeometry] = []

    def noted(*given: Any) -> PromptGeometry:
        seen.append(PromptGeometry(*given))
        return seen[-1]

    monkeypatch.setattr("blendrag.fusor.request.PromptGeometry", noted)
    options = replace(AUTO, ratio=0.2, policy="query", max_new_tokens=1)
    ask(engine, options)
    decide = Controller._chunk

    def computed_if_last(self: Controller, segment: Segment, plan: PromptPlan, *rest: Any) -> Any:
        decision = decide(self, segment, plan, *rest)
        if segment != plan.chunks[-1] or decision.span is None:
            return decision
        decision.span.reader.close()
        return PlannedChunk(segment, PROMPT_END)

    monkeypatch.setattr(Controller, "_chunk", computed_if_last)
    ask(engine, options)
    loaded, computed = seen
    assert len(computed.chunk_spans) == len(loaded.chunk_spans) - 1
    assert computed.query_span == loaded.query_span
