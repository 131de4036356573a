"""Calibration: the search, what it measures, its record, and what requests do with it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from blendrag.config import UNCALIBRATED_SCHEDULE
from blendrag.engine import BlendEngine, CalibrationOptions, CalibrationReport, Options
from blendrag.errors import (
    ContextOverflowError,
    IdentityChangedError,
    StoreUnavailableError,
)
from blendrag.fusor.selection import Schedule, make_policy
from blendrag.planning.calibrate import (
    ANSWER_TOKENS,
    Found,
    Tried,
    deviation,
    divergence,
    families,
    first_sentence,
    mean_deviation,
    reference,
    sample_corpus,
    search,
)
from blendrag.planning.calibration import (
    Calibration,
    Questions,
    calibrations,
    calibrations_of,
    nearest,
)
from blendrag.planning.controller import PlanOptions
from blendrag.store.records import Records

RATIO = 0.2
WEIGHTS = (0.5, 0.1, 0.0)
CONSTANT = Schedule("constant")


def found(policy: str = "query", ratio: float = RATIO, weights: Any = WEIGHTS) -> Calibration:
    return Calibration(policy, ratio, weights, 0.1, "linear", 0.2, 0.9, 4, 0, Questions.GIVEN)


def interrupt_after(tried: int) -> Any:
    def watch(so_far: Found) -> None:
        if so_far.tried == tried:
            raise KeyboardInterrupt

    return watch


# -- the search ---------------------------------------------------------------------------------


def distance_to(target: list[float], ratio: float) -> Any:
    """A measure whose best schedule is ``target``, as a calibration would measure it."""

    def measure(schedule: Schedule, bound: float) -> float:
        shares = schedule.shares(ratio, len(target) + 1)
        far = 1e-3 + sum((a - b) ** 2 for a, b in zip(shares, target, strict=True))
        return far if far <= bound else math.inf

    return measure


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 30), st.floats(0.01, 0.9), st.integers(0, 5), st.randoms(use_true_random=False)
)
def test_the_result_is_never_worse_than_a_family_and_keeps_the_ratio(
    layers: int, ratio: float, seed: int, rng: Any
) -> None:
    weights = sorted((rng.random() ** 3 + 1e-3 for _ in range(layers - 1)), reverse=True)
    target = Schedule.parse(weights).shares(ratio, layers) if weights else []
    measure = distance_to(target, ratio)
    result = search(measure, layers, ratio, seed)
    for family in families(layers, ratio):
        assert result.best.deviation <= measure(family, math.inf)
    shares = result.best.schedule.shares(ratio, layers)
    assert layers == 1 or sum(shares) / len(shares) == pytest.approx(ratio)
    assert all(b <= a + 1e-9 for a, b in pairwise(shares))
    assert layers > 2 or result.tried == 1  # there is nothing to search for


def test_the_search_finds_a_shape_that_no_family_has_and_the_same_for_the_same_seed() -> None:
    layers, ratio = 13, 0.1
    half = Schedule.parse("first:2").shares(ratio / 2, layers)
    measure = distance_to([share + ratio / 2 for share in half], ratio)  # and half spread evenly
    once, again, other = (search(measure, layers, ratio, seed) for seed in (3, 3, 4))
    assert once == again
    for result in (once, other):
        assert result.best.deviation - 1e-3 < 0.1 * (result.family.deviation - 1e-3)


@pytest.mark.parametrize("after", [1, 25])
def test_an_interrupted_search_keeps_the_best_so_far(after: int) -> None:
    measure = distance_to(Schedule.parse("9,3,1,0,0").shares(0.2, 6), 0.2)
    result = search(measure, 6, 0.2, watch=interrupt_after(after))
    assert (result.interrupted, result.tried) == (True, after)
    assert result.best.deviation <= result.family.deviation


def test_a_search_without_time_keeps_what_is_known_and_measures_one_family() -> None:
    known = Schedule.parse("5,4,1,1,1,0.5,0")
    measure = distance_to(known.shares(0.2, 8), 0.2)
    result = search(measure, 8, 0.2, has_time=lambda: False, known=known)
    assert result.best.schedule == known
    assert (result.tried, result.out_of_time) == (2, True)


def test_an_interrupt_before_anything_was_measured_is_raised() -> None:
    with pytest.raises(KeyboardInterrupt):
        search(mock.Mock(side_effect=KeyboardInterrupt), 6, 0.2)


# -- the measure --------------------------------------------------------------------------------


def test_divergence_is_the_kl_and_infinite_if_it_is_not_a_number() -> None:
    full = torch.tensor([[0.5, 0.5, 0.0]]).log()
    assert divergence(full, full) == 0.0
    assert divergence(full, torch.tensor([[0.25, 0.25, 0.5]]).log()) == pytest.approx(math.log(2))
    assert divergence(full, torch.full((1, 3), math.nan)) == math.inf


def test_a_bad_schedule_is_given_up_before_all_prompts_are_measured() -> None:
    costs = [0.0, 0.1, 5.0, 0.2]
    of = mock.Mock(side_effect=lambda index, schedule: costs[index])
    mean = mean_deviation(of, 4)
    assert mean(CONSTANT, math.inf) == pytest.approx(sum(costs) / 4)
    of.reset_mock()
    assert mean(Schedule("linear"), 0.5) == math.inf
    of.assert_called_once_with(2, Schedule("linear"))  # the prompt that deviated most before


# -- the record ---------------------------------------------------------------------------------


def test_the_schedule_found_for_the_policy_at_the_nearest_ratio_is_taken(tmp_path: Path) -> None:
    near, far, other = found(), found(ratio=0.6, weights=(1.0, 0.8, 0.0)), found("blend(2)")
    removed = found("offset+query", ratio=0.05)  # a policy of an earlier version
    for each in (found(weights=(0.2, 0.2, 0.2)), near, far, other, removed):  # near replaces
        calibrations(tmp_path, "n").keep(each)
    assert len(calibrations(tmp_path, "n").entries()) == 4
    for policy, ratio, expected in (
        ("query", 0.05, near),
        ("query", 0.5, far),
        ("blend", 0.2, other),  # the same policy as blend(2)
        ("blend(3)", 0.2, None),
    ):
        assert nearest(calibrations_of(tmp_path, "n", policy), ratio) == expected
    assert calibrations_of(tmp_path, "another", "query") == ()
    assert near.note(RATIO) == ""
    assert "found at ratio 0.2, the nearest to 0.5" in near.note(0.5)
    assert "blendrag calibrate --policy 'query' --ratio 0.5" in near.note(0.5)


@pytest.mark.parametrize(
    "change",
    [{"policy": 1}, {"weights": ["a"]}, {"weights": [-1.0, 2.0]}, {"weights": [0.0]},
     {"ratio": None}, {"ratio": 7}, {"seed": "x"}],
)  # fmt: skip
def test_a_damaged_calibration_is_left_out(tmp_path: Path, change: dict[str, Any]) -> None:
    kept = calibrations(tmp_path, "n")
    kept.keep(found())
    broken = {**asdict(found()), **change}
    kept.path.write_text(json.dumps({"calibrations": [broken, asdict(found("hkvd"))]}))
    assert kept.entries() == [found("hkvd")]


# -- through an engine --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    root = tmp_path_factory.mktemp("calibrate") / "s"
    with tiny.engine(tiny.llama(), root, policy="query") as made:
        made.ingest([tiny.document(i) for i in range(3)])
        yield made


@pytest.fixture
def engine(shared: BlendEngine) -> Iterator[BlendEngine]:
    """Without a calibration."""
    yield shared
    kept(shared).path.unlink(missing_ok=True)


def kept(engine: BlendEngine) -> Records[Calibration]:
    return calibrations(engine.resources.root, engine.adapter.identity.namespace)


def options(**changes: Any) -> CalibrationOptions:
    given = {"policy": "query", "ratio": RATIO, "samples": 2, "top_k": 3, **changes}
    return CalibrationOptions(**given)


def prompt(engine: BlendEngine) -> str:
    return tiny.prompt(engine, 0)


def test_deviation_is_the_divergence_of_what_generate_would_see(engine: BlendEngine) -> None:
    """The slow reference: the same answer, blended and not, token by token."""
    adapter, fusor = engine.adapter, engine.resources.fusor
    asked = engine.segments(prompt(engine))
    ids = torch.tensor([asked.ids])
    controller = engine._planner.controller(adapter.identity.namespace)
    with adapter.lock:
        answer = reference(adapter, asked)
        measured = [
            deviation(fusor, controller, answer, make_policy(policy), CONSTANT, ratio)
            for policy, ratio in (("query", RATIO), ("query", 1.0), ("reuse", 0.0))
        ]
    said = adapter.model.generate(ids, max_new_tokens=ANSWER_TOKENS, do_sample=False)
    assert answer.answer == tuple(said[0, ids.shape[1] :].tolist())
    full = tiny.stock(adapter.model, said)[0, ids.shape[1] - 1 : -1].log_softmax(-1)
    plan = controller.plan(
        asked, PlanOptions("blend", make_policy("query"), lambda _: CONSTANT, RATIO)
    )
    logits, cache, _ = fusor.prefill(ids, plan.request(ids.shape[1]), ANSWER_TOKENS)
    rows = [logits[0, -1]]
    with torch.inference_mode():
        for token in said[0, ids.shape[1] : -1]:
            out = adapter.model(input_ids=token.view(1, 1), past_key_values=cache)
            rows.append(out.logits[0, -1])
    plan.close()
    blended = torch.stack(rows).log_softmax(-1)
    expected = float((full.exp() * (full - blended)).sum(-1).mean())
    assert measured[0] == pytest.approx(expected, rel=1e-2)
    assert measured[1] < 1e-6 < 1e-3 < measured[2]


def test_the_schedule_found_is_what_calibrated_runs(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blendrag.planning.calibrate.PARTS", (0.5,))
    monkeypatch.setattr("blendrag.planning.calibrate.MAX_ROUNDS", 1)
    asked = Options(schedule="calibrated", ratio=RATIO, max_new_tokens=1)
    before = engine.generate(prompt(engine), asked).metrics
    assert before.schedule == UNCALIBRATED_SCHEDULE
    assert any("blendrag calibrate" in note for note in before.notes)
    report = engine.calibrate(options())
    best = report.calibration
    assert best.deviation <= min(family.deviation for family in report.search.families)
    assert best.deviation < best.reuse_deviation
    assert report.gain == pytest.approx(best.reuse_deviation - best.deviation)
    assert report.gain_error is not None
    json.dumps(report.as_dict())
    assert sum(best.weights) / len(best.weights) == pytest.approx(RATIO)
    after = engine.generate(prompt(engine), asked).metrics
    assert (after.schedule, after.notes) == (str(best.schedule), ())
    # unasked, only what was found on questions runs
    default = engine.generate(prompt(engine), Options(ratio=RATIO, max_new_tokens=1)).metrics
    assert default.schedule == UNCALIBRATED_SCHEDULE
    other = Options(schedule="calibrated", policy="hkvd", max_new_tokens=1)
    assert engine.generate(prompt(engine), other).metrics.schedule == UNCALIBRATED_SCHEDULE


def test_a_schedule_found_on_questions_runs_for_every_answer(engine: BlendEngine) -> None:
    asked = ("What did Paragraph 3 build?", "Where is Paragraph 101?")
    with tiny.counted(engine.resources.retriever().__class__, "retrieve") as calls:
        best = engine.calibrate(options(questions=asked), interrupt_after(3)).calibration
    assert sorted(call[1] for call in calls) == sorted(asked)
    assert (best.questions, best.prompts) == (Questions.GIVEN, 2)
    engine.calibrate(options(), interrupt_after(2))  # does not replace what was found on questions
    metrics = engine.generate(prompt(engine), Options(ratio=RATIO, max_new_tokens=1)).metrics
    assert (metrics.schedule, metrics.notes) == (str(best.schedule), ())


def test_a_missing_calibration_is_reported_once_per_policy(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._planner, "_told", set())

    def notes(**changes: Any) -> tuple[str, ...]:
        return engine.generate(text, Options(max_new_tokens=1, **changes)).metrics.notes

    text, asked = prompt(engine), {"schedule": "calibrated"}
    assert notes(mode="full") == notes(policy="hkvd-once") == ()
    assert notes(policy="boundary(2)", **asked) == notes(mode="reuse", **asked) == ()
    (note,) = notes()
    assert "no schedule is calibrated" in note
    assert "blendrag calibrate" in note
    assert notes() == ()
    assert notes(policy="hkvd") == (note,)


@pytest.mark.parametrize(
    ("gain", "error", "is_noise"),
    [(0.5, 0.1, False), (0.1, 0.1, True), (-0.5, 0.1, True), (0.5, None, True)],
)
def test_a_gain_within_noise_is_no_gain(gain: float, error: float | None, is_noise: bool) -> None:
    report = CalibrationReport(found(), Found(Tried(CONSTANT, 0.1)), 1.0, gain, error)
    assert bool(report.note) == is_noise
    if is_noise:
        assert report.note.startswith("recomputing nothing scores as well on these 4 prompts")
        assert tiny.one_sentence(report.note)


def test_calibrating_again_continues_and_stores_no_kv(engine: BlendEngine) -> None:
    store, namespace = engine.resources.store, engine.adapter.identity.namespace
    before = sorted(store.keys(namespace))
    one, again = (engine.calibrate(options(), interrupt_after(4)) for _ in range(2))
    assert one.search.interrupted
    assert kept(engine).entries() == [again.calibration]
    assert again.calibration.deviation <= one.calibration.deviation * (1 + 1e-6)
    after = engine.calibrate(options(), interrupt_after(2))
    assert after.search.tried == 2  # what was known, and one family
    assert after.calibration.weights == pytest.approx(again.calibration.weights)
    assert sorted(store.keys(namespace)) == before


def test_a_model_changed_meanwhile_ends_the_calibration(tmp_path: Path) -> None:
    with tiny.engine(tiny.llama(), tmp_path / "s", policy="query") as engine:
        engine.ingest([tiny.document(i) for i in range(2)])

        def watch(step: Found) -> None:
            with torch.no_grad():
                engine.adapter.model.model.layers[1].self_attn.v_proj.weight.mul_(1.5)

        with tiny.refuses("changed during the calibration", IdentityChangedError):
            engine.calibrate(options(), watch)
        assert kept(engine).entries() == []


def test_a_sample_takes_neighbours_along_and_is_the_same_for_the_same_seed(
    engine: BlendEngine,
) -> None:
    corpus = engine.resources.corpus
    assert corpus is not None
    one, two, other = (list(sample_corpus(corpus, 6, 4, seed)) for seed in (1, 1, 2))
    assert one == two != other
    texts = [tiny.chunk_texts(engine, number) for number in range(3)]
    for asked in one:
        assert 1 <= len(asked.chunks) <= 4
        assert len(set(asked.chunks)) == len(asked.chunks)
        (own,) = [t for t in texts if any(first_sentence(chunk) == asked.question for chunk in t)]
        at = [own.index(chunk) for chunk in asked.chunks if chunk in own]
        assert at == list(range(at[0], at[0] + len(at)))  # adjacent, in reading order


# -- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ratio": 0.0}, "ratio 0.0"),
        ({"ratio": 1.0}, "ratio 1.0"),
        ({"ratio": float("nan")}, "ratio nan"),
        ({"samples": 0}, "samples is 0"),
        ({"minutes": 0.0}, "minutes is 0"),
        ({"top_k": 0}, "top_k is 0"),
        ({"policy": "hkvd-once"}, "follows no schedule"),
    ],
)
def test_bad_options_are_one_sentence(changes: dict[str, Any], words: str) -> None:
    with tiny.refuses(words):
        options(**changes)


def test_a_store_that_cannot_be_written_or_holds_no_kv_is_refused(tmp_path: Path) -> None:
    with tiny.engine(tiny.llama(), tmp_path / "s") as engine:
        engine.ingest([tiny.document(0)])
        with (
            tiny.engine(tiny.llama(), tmp_path / "s", read_only=True) as reader,
            tiny.refuses("cannot be written", StoreUnavailableError),
        ):
            reader.calibrate(options())
        namespace = engine.adapter.identity.namespace
        for key in list(engine.resources.store.keys(namespace)):
            engine.resources.store.delete(namespace, key)
        with tiny.refuses("no KV"):
            engine.calibrate(options())


def test_prompts_longer_than_the_context_are_refused(tmp_path: Path) -> None:
    model = tiny.llama(max_position_embeddings=256, num_hidden_layers=2)
    with tiny.engine(model, tmp_path / "s") as engine:
        engine.ingest([tiny.document(i, 4) for i in range(3)])
        with pytest.raises(ContextOverflowError, match="fewer chunks or"):
            engine.calibrate(options(top_k=9))
