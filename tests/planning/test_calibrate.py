"""Calibration: the search, what it measures, where it is kept and who uses it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

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
    InvalidInputError,
    StoreUnavailableError,
)
from blendrag.fusor.selection import Schedule, make_policy
from blendrag.planning.calibration import Calibration, recall, remember, resolve
from blendrag.planning.controller import PlanOptions
from blendrag.planning.deviation import ANSWER_TOKENS, Sample, deviation, divergence, reference
from blendrag.planning.sample import first_sentence, sample_corpus
from blendrag.planning.search import Found, Step, Tried, families, search

RATIO = 0.2
WEIGHTS = (0.5, 0.1, 0.0)


def found(policy: str = "query", ratio: float = RATIO, weights: Any = WEIGHTS) -> Calibration:
    return Calibration(policy, ratio, weights, 0.1, "linear", 0.2, 0.9, 4, 0, "questions given")


def entry(**changes: Any) -> str:
    """The record's file with one calibration in it."""
    return json.dumps({"calibrations": [{**found().as_dict(), **changes}]})


# -- the search ---------------------------------------------------------------------------------


def distance_to(target: list[float], ratio: float) -> Any:
    """A measure whose best schedule is ``target``, as a calibration would measure it."""

    def measure(schedule: Schedule, bound: float) -> float:
        shares = schedule.shares(ratio, len(target) + 1)
        far = 1e-3 + sum((a - b) ** 2 for a, b in zip(shares, target, strict=True))
        return far if far <= bound else math.inf

    return measure


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 30), st.floats(0.01, 0.9), st.integers(0, 5), st.randoms(use_true_random=False)
)
def test_it_is_never_worse_than_any_family_and_keeps_the_ratio(
    layers: int, ratio: float, seed: int, rng: Any
) -> None:
    weights = sorted((rng.random() ** 3 + 1e-3 for _ in range(layers - 1)), reverse=True)
    target = Schedule.parse(weights).shares(ratio, layers)
    measure = distance_to(target, ratio)
    result = search(measure, layers, ratio, seed)
    assert result.best is not None
    for family in families(layers):
        assert result.best.deviation <= measure(family, math.inf)
    shares = result.best.schedule.shares(ratio, layers)
    assert sum(shares) / len(shares) == pytest.approx(ratio)
    assert all(b <= a + 1e-9 for a, b in pairwise(shares))


def test_it_finds_a_shape_that_no_family_has() -> None:
    layers, ratio = 13, 0.1
    target = Schedule.parse("first:2").shares(ratio / 2, layers)
    target = [a + ratio / 2 for a in target]  # half of it at once, half spread evenly
    result = search(distance_to(target, ratio), layers, ratio)
    assert result.best is not None
    assert result.best.deviation - 1e-3 < 0.05 * (result.family.deviation - 1e-3)


def test_the_same_seed_finds_the_same() -> None:
    measure = distance_to(Schedule.parse("5,4,1,1,1,0.5,0").shares(0.2, 8), 0.2)
    once, again, other = (search(measure, 8, 0.2, seed) for seed in (3, 3, 4))
    assert once == again
    assert once.best is not None
    assert other.best is not None
    for result in (once, other):
        assert result.best.deviation < 0.5 * result.family.deviation  # type: ignore[union-attr]


@pytest.mark.parametrize("after", [1, 5, 25])
def test_interrupted_it_keeps_the_best_so_far(after: int) -> None:
    def watch(step: Step) -> None:
        if step.tried == after:
            raise KeyboardInterrupt

    measure = distance_to(Schedule.parse("9,3,1,0,0").shares(0.2, 6), 0.2)
    result = search(measure, 6, 0.2, watch=watch)
    assert result.interrupted
    assert result.tried == after
    assert result.best is not None
    assert result.best.deviation <= result.family.deviation


def test_what_is_known_is_never_lost_to_a_search_cut_short() -> None:
    known = Schedule.parse("5,4,1,1,1,0.5,0")
    measure = distance_to(known.shares(0.2, 8), 0.2)
    result = search(measure, 8, 0.2, has_time=lambda: False, known=known)
    assert result.best is not None
    assert result.best.schedule == known
    assert result.tried == 2


def test_interrupted_before_anything_was_measured_it_has_nothing() -> None:
    def measure(schedule: Schedule, bound: float) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(measure, 6, 0.2)


def test_interrupted_between_a_family_and_its_note_the_best_is_the_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Interrupting(list[Tried]):
        def append(self, tried: Tried) -> None:
            super().append(tried)
            raise KeyboardInterrupt

    monkeypatch.setitem(search.__globals__, "Found", lambda: Found(families=Interrupting()))
    result = search(distance_to([0.2] * 5, 0.2), 6, 0.2)
    assert result.interrupted
    assert result.best == result.family


def test_a_model_of_one_or_two_layers_has_nothing_to_search_for() -> None:
    for layers in (1, 2):
        result = search(distance_to([0.2] * (layers - 1), 0.2), layers, 0.2)
        assert result.tried == 1
        assert result.best == result.family


def test_an_answer_that_is_not_a_number_is_as_far_off_as_can_be() -> None:
    full = torch.tensor([[0.5, 0.5, 0.0]]).log()
    assert divergence(full, full) == 0.0
    assert divergence(full, torch.tensor([[0.25, 0.25, 0.5]]).log()) == pytest.approx(math.log(2))
    assert divergence(full, torch.full((1, 3), math.nan)) == math.inf


def test_out_of_time_it_has_measured_one_schedule_at_least() -> None:
    result = search(distance_to([0.2] * 5, 0.2), 6, 0.2, has_time=lambda: False)
    assert result.out_of_time
    assert result.tried == 1


def test_a_bad_schedule_is_given_up_before_all_prompts_are_measured() -> None:
    calls: list[int] = []
    costs = [0.0, 0.1, 5.0, 0.2]

    def of(index: int, schedule: Schedule) -> float:
        calls.append(index)
        return costs[index]

    sample = Sample(of, 4)
    mean = sample(Schedule("constant"), math.inf)
    assert mean == pytest.approx(sum(costs) / 4)
    assert calls == [0, 1, 2, 3]
    calls.clear()
    assert sample(Schedule("linear"), 0.5) == math.inf
    assert calls == [2]  # the prompt on which the last one was worst


# -- what is kept -------------------------------------------------------------------------------


def test_calibrated_means_the_vector_found_for_the_policy_at_the_nearest_ratio(
    tmp_path: Path,
) -> None:
    near, far, other = found(), found(ratio=0.6, weights=(1.0, 0.8, 0.0)), found("hkvd")
    removed = found("offset+query", ratio=0.05)  # a policy of an earlier version
    for each in (near, far, other, removed):
        remember(tmp_path, "n", each)
    asked = Schedule.parse("calibrated")
    assert resolve(tmp_path, "n", asked, "query", 0.05) == near.schedule
    assert resolve(tmp_path, "n", asked, "query", 0.5) == far.schedule
    assert resolve(tmp_path, "n", Schedule("linear"), "query", 0.2) == Schedule("linear")
    for namespace, policy in (("n", "blend"), ("another", "query")):
        uncalibrated = resolve(tmp_path, namespace, asked, policy, 0.2)
        assert str(uncalibrated) == UNCALIBRATED_SCHEDULE


def test_a_policy_is_the_same_however_it_is_written(tmp_path: Path) -> None:
    remember(tmp_path, "n", found("blend(2)"))
    asked = Schedule.parse("calibrated")
    assert resolve(tmp_path, "n", asked, "blend", 0.2).weights == WEIGHTS
    assert not resolve(tmp_path, "n", asked, "blend(3)", 0.2).weights


def test_calibrating_again_replaces_what_was_found(tmp_path: Path) -> None:
    remember(tmp_path, "n", found())
    remember(tmp_path, "n", found(weights=(0.2, 0.2, 0.2)))
    assert [each.weights for each in recall(tmp_path, "n")] == [(0.2, 0.2, 0.2)]


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "{}", '{"calibrations": [{"policy": 1}]}', entry(weights=["a"]),
        entry(weights=[-1.0, 2.0]), entry(weights=[0.0]), entry(ratio=None), entry(ratio=7),
    ],
)  # fmt: skip
def test_a_damaged_record_is_no_record(tmp_path: Path, content: str) -> None:
    remember(tmp_path, "n", found())
    (tmp_path / "verified" / "n.schedules.json").write_text(content)
    assert recall(tmp_path, "n") == ()


# -- through an engine --------------------------------------------------------------------------


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[BlendEngine]:
    with tiny.engine(tiny.llama(), tmp_path / "s", policy="query") as made:
        made.ingest([tiny.document(i) for i in range(3)])
        yield made


def calibration(**changes: Any) -> CalibrationOptions:
    given = {"policy": "query", "ratio": RATIO, "samples": 3, "top_k": 4, **changes}
    return CalibrationOptions(**given)


def measured(engine: BlendEngine, policy: str, ratio: float) -> float:
    used, texts = engine.resources, tiny.chunk_texts(engine, 0)
    plan = engine.plan("\n\n".join([*texts, "What did the company build?"]))
    namespace = engine.adapter.identity.namespace
    with engine.adapter.lock:
        expected = reference(engine.adapter, plan)
        controller = engine.controller(namespace)
        schedule = Schedule("constant")
        got = deviation(used.fusor, controller, expected, make_policy(policy), schedule, ratio)
    assert got is not None
    assert len(expected.answer) == ANSWER_TOKENS
    return got


def test_deviation_is_nothing_at_ratio_one_and_something_below(engine: BlendEngine) -> None:
    assert measured(engine, "query", 1.0) < 1e-6
    assert measured(engine, "reuse", 0.0) > 1e-3


def test_deviation_is_the_divergence_of_what_generate_would_see(engine: BlendEngine) -> None:
    """The slow reference: the same answer, blended and not, one token after the other."""
    prompt = "\n\n".join([*tiny.chunk_texts(engine, 0), "What did the company build?"])
    ids = torch.tensor([engine.plan(prompt).ids])
    said = engine.adapter.model.generate(ids, max_new_tokens=ANSWER_TOKENS, do_sample=False)
    full = tiny.stock(engine.adapter.model, said)[0, ids.shape[1] - 1 : -1].log_softmax(-1)
    used = engine.resources
    namespace = engine.adapter.identity.namespace
    asked = PlanOptions("blend", make_policy("query"), lambda _: Schedule("constant"), RATIO)
    plan = engine.controller(namespace).plan(engine.plan(prompt), asked)
    logits, cache, _ = used.fusor.prefill(ids, plan.request(ids.shape[1]), ANSWER_TOKENS)
    rows = [logits[0, -1]]
    with torch.inference_mode():
        for token in said[0, ids.shape[1] : -1]:
            out = engine.adapter.model(input_ids=token.view(1, 1), past_key_values=cache)
            rows.append(out.logits[0, -1])
    plan.close()
    blended = torch.stack(rows).log_softmax(-1)
    expected = float((full.exp() * (full - blended)).sum(-1).mean())
    assert measured(engine, "query", RATIO) == pytest.approx(expected, rel=1e-2)


def test_what_was_found_is_what_calibrated_runs(engine: BlendEngine) -> None:
    prompt = "\n\n".join([*tiny.chunk_texts(engine, 0), "What did the company build?"])
    options = Options(schedule="calibrated", ratio=RATIO)
    before = engine.generate(prompt, options).metrics
    assert before.schedule == UNCALIBRATED_SCHEDULE
    assert any("blendrag calibrate" in note for note in before.notes)
    report = engine.calibrate(calibration())
    kept = report.calibration
    assert kept.deviation <= min(family.deviation for family in report.families)
    assert kept.deviation < kept.reuse_deviation
    assert sum(kept.weights) / len(kept.weights) == pytest.approx(RATIO)
    after = engine.generate(prompt, options).metrics
    assert after.schedule == str(kept.schedule)
    assert after.notes == ()
    assert Schedule.parse(after.schedule).name == "calibrated"
    assert engine.generate(prompt, Options(schedule="linear")).metrics.schedule == "linear"
    other = engine.generate(prompt, Options(schedule="calibrated", policy="hkvd")).metrics
    assert other.schedule == UNCALIBRATED_SCHEDULE


@pytest.mark.parametrize("asked", ["calibrated", None])
def test_what_was_found_at_another_ratio_is_used_with_a_note(
    engine: BlendEngine, asked: str | None
) -> None:
    prompt = "\n\n".join([*tiny.chunk_texts(engine, 0), "What did the company build?"])
    kept = engine.calibrate(calibration(questions=("Where is Paragraph 3?",))).calibration
    metrics = engine.generate(prompt, Options(schedule=asked, ratio=0.5)).metrics
    assert metrics.schedule == str(kept.schedule)
    (note,) = metrics.notes
    assert "found at ratio 0.2, the nearest to 0.5" in note
    assert "blendrag calibrate --policy 'query' --ratio 0.5" in note
    for other in (Options(schedule="linear", ratio=0.5), Options(schedule=asked, mode="reuse")):
        assert engine.generate(prompt, other).metrics.notes == ()


def test_unasked_only_what_was_found_on_questions_runs(engine: BlendEngine) -> None:
    prompt = "\n\n".join([*tiny.chunk_texts(engine, 0), "What did the company build?"])
    options = Options(ratio=RATIO)
    engine.calibrate(calibration())  # on sentences in place of questions
    assert engine.generate(prompt, options).metrics.schedule == UNCALIBRATED_SCHEDULE
    kept = engine.calibrate(calibration(questions=("Where is Paragraph 3?",))).calibration
    engine.calibrate(calibration())  # replaces what was found on sentences alone
    metrics = engine.generate(prompt, options).metrics
    assert metrics.schedule == str(kept.schedule)
    assert metrics.notes == ()


def test_that_a_model_is_not_calibrated_is_said_once(engine: BlendEngine) -> None:
    prompt = "\n\n".join([*tiny.chunk_texts(engine, 0), "What did the company build?"])
    for options in (Options(mode="full"), Options(mode="reuse"), Options(policy="hkvd-once")):
        assert engine.generate(prompt, options).metrics.notes == ()
    (note,) = engine.generate(prompt).metrics.notes
    assert "no schedule is calibrated" in note
    assert "blendrag calibrate" in note
    assert engine.generate(prompt).metrics.notes == ()
    assert engine.generate(prompt, Options(policy="hkvd")).metrics.notes == (note,)


@pytest.mark.parametrize(
    ("gain", "error", "is_noise"),
    [(0.5, 0.1, False), (0.1, 0.1, True), (-0.5, 0.1, True), (0.5, None, True)],
)
def test_a_gain_within_noise_is_called_none(
    gain: float, error: float | None, is_noise: bool
) -> None:
    report = CalibrationReport(found(), (), 3, 1.0, False, False, gain, error)
    assert bool(report.note) == is_noise
    if is_noise:
        assert report.note.startswith("recomputing nothing scores as well on these 4 prompts")
        assert tiny.one_sentence(report.note)


def test_the_gain_is_that_of_the_schedule_found_over_reuse(engine: BlendEngine) -> None:
    report = engine.calibrate(calibration())
    kept = report.calibration
    assert report.gain == pytest.approx(kept.reuse_deviation - kept.deviation)
    assert report.gain_error is not None


def test_the_calibrated_schedule_decides_how_many_tokens_are_recomputed(
    engine: BlendEngine,
) -> None:
    prompt = "\n\n".join([*tiny.chunk_texts(engine, 0), "What did the company build?"])
    root, namespace = engine.resources.root, engine.adapter.identity.namespace
    charged = []
    for weights in ((0.2, 0.2, 0.2), (0.6, 0.0, 0.0)):
        remember(root, namespace, found(weights=weights))
        answer = engine.generate(prompt, Options(schedule="calibrated", ratio=RATIO))
        charged.append(answer.metrics.charged_ratio)
    assert charged[0] == pytest.approx(0.2, abs=0.02)
    assert charged[1] == pytest.approx(0.3, abs=0.02)  # what enters layer 1 enters layer 0


def test_calibrating_again_goes_on_from_what_was_found_and_stores_no_kv(
    engine: BlendEngine,
) -> None:
    root, namespace = engine.resources.root, engine.adapter.identity.namespace
    before = sorted(engine.resources.store.keys(namespace))
    one = engine.calibrate(calibration())
    (root / "verified" / f"{namespace}.schedules.json").unlink()
    again = engine.calibrate(calibration())
    assert again.calibration == one.calibration

    def watch(step: Step) -> None:
        raise KeyboardInterrupt

    after = engine.calibrate(calibration(), watch)
    assert after.tried == 2  # what was known, and one family
    assert after.calibration.deviation == pytest.approx(one.calibration.deviation, rel=1e-6)
    assert after.calibration.weights == pytest.approx(one.calibration.weights)
    assert sorted(engine.resources.store.keys(namespace)) == before
    json.dumps(one.as_dict())


def test_interrupted_the_best_so_far_is_kept(engine: BlendEngine) -> None:
    def watch(step: Step) -> None:
        if step.tried == 2:
            raise KeyboardInterrupt

    report = engine.calibrate(calibration(), watch)
    assert report.interrupted
    assert recall(engine.resources.root, engine.adapter.identity.namespace) == (report.calibration,)


def test_a_model_changed_meanwhile_is_not_measured_over_kv_of_the_one_before(
    engine: BlendEngine,
) -> None:
    namespace = engine.adapter.identity.namespace

    def watch(step: Step) -> None:
        with torch.no_grad():
            engine.adapter.model.model.layers[1].self_attn.v_proj.weight.mul_(1.5)

    with pytest.raises(IdentityChangedError, match="changed during the calibration") as raised:
        engine.calibrate(calibration(), watch)
    assert tiny.one_sentence(str(raised.value))
    assert recall(engine.resources.root, namespace) == ()


@pytest.mark.parametrize(
    "options",
    [
        Options(schedule="calibrated", policy="boundary(2)"),
        Options(schedule="calibrated", policy="hkvd-once"),
        Options(schedule="calibrated", mode="reuse"),
    ],
)
def test_nobody_is_told_to_calibrate_what_follows_no_schedule(
    engine: BlendEngine, options: Options
) -> None:
    prompt = "\n\n".join([*tiny.chunk_texts(engine, 0), "What did the company build?"])
    assert engine.generate(prompt, options).metrics.notes == ()


def test_given_questions_are_asked_over_what_is_retrieved_for_them(engine: BlendEngine) -> None:
    asked = ("What did Paragraph 3 build?", "Where is Paragraph 101?")
    with tiny.counted(engine.resources.retriever().__class__, "retrieve") as calls:
        report = engine.calibrate(calibration(questions=asked))
    assert sorted(call[1] for call in calls) == sorted(asked)
    assert report.calibration.questions == "questions given"
    assert report.calibration.prompts == 2


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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ratio": 0.0}, "ratio 0.0"),
        ({"ratio": 1.0}, "ratio 1.0"),
        ({"ratio": float("nan")}, "ratio nan"),
        ({"samples": 0}, "samples is 0"),
        ({"minutes": 0.0}, "minutes is 0"),
        ({"top_k": 0}, "top_k is 0"),
        ({"policy": "boundary(4)"}, "follows no schedule"),
        ({"policy": "hkvd-once"}, "follows no schedule"),
        ({"policy": "best"}, "is not one of"),
    ],
)
def test_bad_options_are_one_sentence(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words) as raised:
        calibration(**changes)
    assert tiny.one_sentence(str(raised.value))


def test_a_store_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with tiny.engine(tiny.llama(), tmp_path / "s") as engine:
        engine.ingest([tiny.document(0)])
    with (
        tiny.engine(tiny.llama(), tmp_path / "s", read_only=True) as engine,
        pytest.raises(StoreUnavailableError, match="cannot be written") as raised,
    ):
        engine.calibrate(calibration())
    assert tiny.one_sentence(str(raised.value))


def test_a_corpus_without_kv_of_this_model_is_refused(engine: BlendEngine) -> None:
    namespace = engine.adapter.identity.namespace
    for key in list(engine.resources.store.keys(namespace)):
        engine.resources.store.delete(namespace, key)
    with pytest.raises(InvalidInputError, match="no KV") as raised:
        engine.calibrate(calibration())
    assert tiny.one_sentence(str(raised.value))


def test_prompts_longer_than_the_context_are_refused(tmp_path: Path) -> None:
    model = tiny.llama(max_position_embeddings=256)
    with tiny.engine(model, tmp_path / "s") as engine:
        engine.ingest([tiny.document(i) for i in range(3)])
        with pytest.raises(ContextOverflowError, match="fewer chunks or"):
            engine.calibrate(calibration(top_k=9))
