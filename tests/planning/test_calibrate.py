"""Calibration: the choice, what it measures, its record, and what requests do with it."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import tiny
import writers
from blendrag.config import AUTO, CALIBRATED, DEFAULT_POLICY
from blendrag.corpus.documents import LEARNED, Entry, NewEntry
from blendrag.engine import BlendEngine, CalibrationOptions, CalibrationReport, Options
from blendrag.engine.planner import _calibrated
from blendrag.errors import (
    ContextOverflowError,
    IdentityChangedError,
    StoreFullError,
    StoreUnavailableError,
)
from blendrag.fusor.selection import Blending
from blendrag.planning.calibrate import (
    ANSWER_TOKENS,
    CANDIDATES,
    CONSTANT_SCHEDULE,
    MAX_KL,
    MIN_CHECK_PROMPTS,
    MIN_PROMPTS,
    REUSE,
    Calibration,
    Closeness,
    Race,
    Row,
    Trial,
    calibrations,
    deviation,
    divergence,
    policy_at,
    question_about,
    reference,
    sample_corpus,
    sample_questions,
)
from blendrag.store.records import Records
from blendrag.text.chunking import Chunk, learned_id

RATIO = 0.2
FIRST, *OTHERS = CANDIDATES
#: Of the shared engine, with two or three chunks each.
DOCUMENTS = 8


def found(policy: str = FIRST, candidate: str = FIRST, **more: Any) -> Calibration:
    return Calibration(
        policy, DEFAULT_POLICY, candidate, RATIO, 16, 0.1, 0.2, 0.9, 0.1, 0.01, **more
    )


# -- the choice ---------------------------------------------------------------------------------


def race(kl: dict[str, float], prompts: int, samples: int) -> Race:
    """After ``prompts`` of ``samples``, with the same KL for each prompt up to a part of 10%."""
    running = Race(RATIO)
    for number in range(prompts):
        running.narrow(number / samples)
        scale = 1 + 0.1 * (number % 3 - 1)
        row = {trial: Closeness(scale * kl.get(trial.policy, 1.0), 0.9) for trial in running.trials}
        running.rows.append(row)
    return running


def largest(running: Race) -> Calibration | None:
    """What was found at the largest ratio."""
    return next(iter(running.result()[-1:]), None)


def test_candidates_are_dropped_early_and_the_last_is_checked_on_other_prompts():
    kl = {name: 0.1 + i / 10 for i, name in enumerate(reversed(CANDIDATES))}
    measured = [len(row) for row in race(kl, 32, 32).rows]
    assert measured == [2 + len(CANDIDATES)] * 4 + [4] * 8 + [1 + 2 * 3] * 20  # at three ratios
    result = largest(race(kl, 32, 32))
    assert result is not None
    assert (result.policy, result.candidate, result.prompts) == (CANDIDATES[-1],) * 2 + (20,)
    assert result.candidate_kl == pytest.approx(0.1, rel=0.02)
    assert result.gain == pytest.approx(0.9, rel=0.02)


def test_an_early_end_decides_on_the_prompts_after_the_last_drop_or_not_at_all():
    kl = {name: 0.1 + i / 10 for i, name in enumerate(CANDIDATES)}
    result = largest(race(kl, 4 + MIN_CHECK_PROMPTS, 32))
    assert result is not None
    assert (result.policy, result.prompts) == (FIRST, MIN_CHECK_PROMPTS)
    for prompts in (0, 4, 3 + MIN_CHECK_PROMPTS):
        assert race(kl, prompts, 32).result() == ()
    assert largest(race(kl, MIN_PROMPTS, MIN_PROMPTS)) is not None
    assert race(kl, MIN_PROMPTS - 1, MIN_PROMPTS - 1).result() == ()


def checked(*kl_and_agreement: tuple[float, float], noise: float = 0.0) -> tuple[Calibration, ...]:
    """What is found for ratios 0, .05, .15 and .2 with these figures of each, on eight prompts."""
    running = Race(RATIO, candidates=[FIRST], chosen_by=1)
    for number in range(9):
        row: dict[Trial, Closeness] = {}
        for ratio, (kl, agreement) in zip((0, *running.ratios), kl_and_agreement, strict=True):
            kl += (noise if number % 2 else -noise) * (ratio < RATIO)
            policies = (DEFAULT_POLICY, FIRST) if ratio else (REUSE.policy,)
            row.update({Trial(policy, ratio): Closeness(kl, agreement) for policy in policies})
        running.rows.append(row)
    return running.result()


@pytest.mark.parametrize(
    ("figures", "noise", "chosen"),
    [
        (((0.1, 0.95), (0.1, 0.95), (0.1, 0.95), (0.1, 0.95)), 0.0, 0.0),
        (((0.4, 0.95), (0.1, 0.95), (0.1, 0.95), (0.1, 0.95)), 0.0, 0.05),
        (((0.11, 0.90), (0.11, 0.93), (0.11, 0.945), (0.1, 0.95)), 0.1, 0.15),  # within noise
        (
            ((0.4, 0.95), (0.16, 0.95), (0.14, 0.95), (0.1, 0.95)),
            1.0,
            0.15,
        ),  # so is all, but .16 is far
        (((0.4, 0.90), (0.3, 0.90), (0.2, 0.90), (0.1, 0.95)), 0.01, 0.2),
    ],
)
def test_the_smallest_ratio_is_chosen_that_is_as_close_as_the_largest(figures, noise, chosen):
    results = checked(*figures, noise=noise)
    assert [each.ratio for each in results] == [0.0, 0.05, 0.15, RATIO]
    assert [each.ratio for each in results if each.is_chosen] == [chosen]
    assert [each.policy for each in results] == ["reuse", *[DEFAULT_POLICY] * 3]
    assert results[0].agreement == pytest.approx(figures[0][1])


def test_a_policy_is_chosen_for_each_ratio():
    running = Race(RATIO, candidates=[FIRST], chosen_by=1)
    for number in range(9):
        kl = dict.fromkeys([REUSE, *(Trial(DEFAULT_POLICY, r) for r in running.ratios)], 1.0)
        kl |= {Trial(FIRST, 0.05): 0.5, Trial(FIRST, 0.15): 1.0, Trial(FIRST, RATIO): 2.0}
        row = {t: Closeness(each + 0.01 * (number % 2), 0.9) for t, each in kl.items()}
        running.rows.append(row)
    assert [each.policy for each in running.result()[1:]] == [FIRST, DEFAULT_POLICY, DEFAULT_POLICY]


def test_the_default_stays_if_the_gain_is_within_noise():
    default, own = [1.0, 1.2, 0.8, 1.1], [0.5, 0.6, 0.4, 0.5]

    def compared(own: list[float], default: list[float]) -> Calibration:
        rows: list[Row] = [
            {
                Trial("hkvd", RATIO): Closeness(one, 1.0),
                Trial("query", RATIO): Closeness(other, 1.0),
                REUSE: Closeness(other, 1.0),
            }
            for one, other in zip(own, default, strict=True)
        ]
        return Calibration.of("query", "hkvd", RATIO, rows)

    sure = compared(own, default)
    assert (sure.policy, sure.gains) == ("hkvd", True)
    for unsure in (compared([0.0, 2.0, 0.5, 1.0], default), compared(default, own)):
        assert (unsure.policy, unsure.candidate, unsure.gains) == ("query", "hkvd", False)


def test_the_conclusion_says_what_was_chosen_for_which_ratio_and_how_to_undo_it():
    results = checked((0.4, 0.9), (0.1, 0.95), (0.1, 0.95), (0.1, 0.95))
    rows: list[Row] = [{}] * 9
    report = CalibrationReport(results, Race(RATIO, rows=rows), 1.0, False)
    first, *lines, about, undo = report.conclusion.splitlines()
    assert first == (
        "ratio 0.05 is as close to full prefill as 0.2: requests that name neither ratio nor policy take "
        f"ratio 0.05, {DEFAULT_POLICY}"
    )
    assert [line.split(":")[0] for line in lines] == [
        "  ratio 0, reuse",
        *(f"  ratio {ratio}, {DEFAULT_POLICY}" for ratio in (0.05, 0.15, 0.2)),
    ]
    assert "KL 0.4, 90.0% agree" in lines[0]
    assert lines[1].endswith(f"; {FIRST} gains 0 ± 0, which is not enough")
    assert "8 of 9 prompts" in about
    assert "± is two standard errors" in about
    assert "each policy holds for its ratio" in undo
    assert "blendrag calibrate --undo" in undo
    json.dumps(report.as_dict())
    few = CalibrationReport((), Race(RATIO, rows=rows[:3]), 1.0, False)
    assert tiny.one_sentence(few.conclusion)
    assert few.conclusion.startswith(
        "3 prompts were measured and nothing was chosen yet, because 7 or"
    )


# -- the measure --------------------------------------------------------------------------------


def test_divergence_is_the_kl_and_large_if_it_is_not_a_number():
    full = torch.tensor([[0.5, 0.5, 0.0]]).log()
    assert divergence(full, full) == 0.0
    assert divergence(full, torch.tensor([[0.25, 0.25, 0.5]]).log()) == pytest.approx(math.log(2))
    assert divergence(full, torch.full((1, 3), math.nan)) == MAX_KL


# -- the record ---------------------------------------------------------------------------------


def test_a_calibration_replaces_the_one_before(tmp_path):
    for each in (found(), found("hkvd")):
        calibrations(tmp_path, "n").replace([each])
    assert calibrations(tmp_path, "n").entries() == [found("hkvd")]
    assert calibrations(tmp_path, "another").entries() == []
    assert calibrations(tmp_path, "n").clear()
    assert not calibrations(tmp_path, "n").clear()
    assert calibrations(tmp_path, "n").entries() == []


def test_a_calibration_of_before_ratios_were_chosen_holds_for_its_ratio(tmp_path):
    kept = calibrations(tmp_path, "n")
    kept.replace([found()])
    new = ("agreement", "loss", "loss_error", "lost_agreement", "is_chosen")
    old = {name: value for name, value in asdict(found()).items() if name not in new}
    kept.path.write_text(json.dumps({"calibrations": [old]}))
    assert kept.entries() == [found()]
    assert policy_at(kept.entries(), RATIO) == FIRST
    assert policy_at(kept.entries(), 0.3) == DEFAULT_POLICY


def test_ratio_auto_that_may_begin_at_0_is_not_held_there_by_a_calibration():
    nothing = Calibration.of(REUSE.policy, REUSE.policy, 0.0, [{REUSE: Closeness(0.1, 0.9)}] * 2)
    auto = Blending.of(CALIBRATED, ratio=AUTO, min_ratio=0.0)
    known = _calibrated(lambda: [nothing, found()], auto)
    assert str(known.policy) == DEFAULT_POLICY
    assert known.is_auto
    assert str(known.at(0.0).policy) == REUSE.policy


@pytest.mark.parametrize(
    "change", [{"policy": 1}, {"policy": "offset+query"}, {"ratio": 7}, {"gain": "x"}]
)
def test_a_damaged_calibration_is_left_out(tmp_path, change):
    kept = calibrations(tmp_path, "n")
    kept.keep(found())
    kept.path.write_text(json.dumps({"calibrations": [{**asdict(found()), **change}]}))
    assert kept.entries() == []


# -- through an engine --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    root = tmp_path_factory.mktemp("calibrate") / "s"
    with tiny.engine(tiny.llama(), root) as made:
        made.ingest([tiny.document(i) for i in range(DOCUMENTS)])
        yield made


@pytest.fixture
def engine(shared: BlendEngine) -> Iterator[BlendEngine]:
    """Without a calibration."""
    yield shared
    shared.forget_calibration()


@pytest.fixture
def best(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, float]]:
    """KL by policy, in place of what would be measured; ``blend`` is closest to full prefill."""
    kl = {"blend": 0.1}

    def invented(*given: Any) -> Closeness:
        trial: Trial = given[3]
        return Closeness(kl.get(f"{trial.ratio:g}", kl.get(trial.policy, 1.0)), 0.9)

    monkeypatch.setattr("blendrag.engine.calibration.deviation", invented)
    monkeypatch.setattr("blendrag.engine.calibration.reference", mock.Mock())
    return kl


def kept(engine: BlendEngine) -> Records[Calibration]:
    return calibrations(engine.root, engine.adapter.identity.namespace)


def options(**changes: Any) -> CalibrationOptions:
    return CalibrationOptions(**{"ratio": RATIO, "samples": 16, "top_k": 3, **changes})


def metrics(engine: BlendEngine, **asked: Any) -> Any:
    return engine.generate(prompt(engine), Options(max_new_tokens=1, **asked)).metrics


def prompt(engine: BlendEngine) -> str:
    return tiny.prompt(engine, 0)


def test_deviation_is_the_divergence_of_what_generate_would_see(engine):
    """The slow reference: the same answer, blended and not, token by token."""
    adapter, fusor = engine.adapter, engine.kv_namespace.model.fusor
    asked = engine.segments(prompt(engine))
    ids = torch.tensor([asked.ids])
    controller = engine.planner.controller(adapter.identity.namespace)
    with adapter.lock:
        answer = reference(adapter, asked)
        measured = [
            deviation(fusor, controller, answer, trial)
            for trial in (Trial("query", RATIO), Trial("query", 1.0), REUSE)
        ]
    assert all(measured)
    said = adapter.model.generate(ids, max_new_tokens=ANSWER_TOKENS, do_sample=False)
    assert answer.answer == tuple(said[0, ids.shape[1] :].tolist())
    full = tiny.stock(adapter.model, said)[0, ids.shape[1] - 1 : -1].log_softmax(-1)
    plan = controller.plan(asked, "blend", Blending.of("query", CONSTANT_SCHEDULE, RATIO))
    logits, cache, _ = fusor.prefill(ids, plan.request(ids.shape[1]), ANSWER_TOKENS)
    rows = [logits[0, -1]]
    with torch.inference_mode():
        for token in said[0, ids.shape[1] : -1]:
            out = adapter.model(input_ids=token.view(1, 1), past_key_values=cache)
            rows.append(out.logits[0, -1])
    plan.close()
    blended = torch.stack(rows).log_softmax(-1)
    expected = float((full.exp() * (full - blended)).sum(-1).mean())
    assert measured[0].kl == pytest.approx(expected, rel=1e-2)
    assert measured[1].kl < 1e-6 < 1e-3 < measured[2].kl
    chosen = (blended.argmax(-1) == torch.tensor(answer.answer)).float().mean()
    assert measured[0].agreement == pytest.approx(float(chosen))
    assert measured[1].agreement == 1.0


def test_what_was_found_runs_for_requests_that_name_no_policy(engine, best):
    assert metrics(engine, ratio=RATIO).policy == DEFAULT_POLICY
    best["0.05"] = best["0.15"] = best["0"] = 2.0  # too far from full prefill
    watched: list[float] = []
    report = engine.calibrate(options(), lambda race, done: watched.append(done))
    assert watched == [n / 16 for n in range(1, 17)]
    assert kept(engine).entries() == [*report.found]
    assert report.chosen is report.found[-1]
    assert report.chosen.prompts == 10
    after = metrics(engine)
    assert (after.policy, after.notes) == ("blend(2)", ())
    assert after.ratio == pytest.approx(RATIO, abs=0.01)
    assert metrics(engine, policy="hkvd").policy == "hkvd"
    assert metrics(engine, ratio=0.3).policy == DEFAULT_POLICY  # it was not measured there
    best["blend"] = 1.0
    assert "which is not enough" in engine.calibrate(options()).conclusion
    assert metrics(engine).policy == DEFAULT_POLICY


@pytest.mark.parametrize("chosen", [0.0, 0.05])
def test_the_ratio_that_was_found_runs_until_it_is_forgotten(engine, best, chosen):
    best |= {"0": 0.1 if chosen == 0 else 2.0, "0.05": 0.1}
    report = engine.calibrate(options())
    assert report.chosen is not None
    assert report.chosen.ratio == chosen
    after = metrics(engine)
    assert after.ratio == pytest.approx(chosen, abs=0.01)
    assert (after.policy == "reuse") == (chosen == 0)
    # whoever names a policy or a ratio gets it
    assert metrics(engine, policy="hkvd").ratio == pytest.approx(0.3, abs=0.01)
    assert metrics(engine, ratio=0.25).ratio == pytest.approx(0.25, abs=0.01)
    with tiny.engine(engine.adapter.model, engine.root, ratio=0.1) as other:
        assert metrics(other).ratio == pytest.approx(0.1, abs=0.01)
    assert engine.forget_calibration()
    assert not engine.forget_calibration()
    before = metrics(engine)
    assert (before.policy, before.ratio) == (DEFAULT_POLICY, pytest.approx(0.3, abs=0.01))


def test_a_writer_is_calibrated_apart(tmp_path, best):
    model = tiny.llama()
    best |= {"0": 0.1}
    with tiny.engine(model, tmp_path / "s") as without:
        without.ingest([tiny.document(i) for i in range(4)])
        folder = writers.writer(model, tmp_path / "writer")
        with tiny.engine(model, tmp_path / "s", writer=folder) as made:
            made.ingest([tiny.document(i) for i in range(4)])
            report = made.calibrate(options())
            assert report.chosen is not None
            assert metrics(made).charged_ratio == report.chosen.ratio == 0
    with tiny.engine(model, tmp_path / "s", writer="none") as without:
        assert metrics(without).ratio == pytest.approx(0.3, abs=0.01)


@pytest.mark.slow
def test_a_calibration_measures_and_stores_no_kv(engine):
    store, namespace = engine.store, engine.adapter.identity.namespace
    before = sorted(store.keys(namespace))
    asked = tuple(f"What did Paragraph {i} build?" for i in range(MIN_PROMPTS))
    with tiny.counted(engine.kv_namespace.corpus.retriever().__class__, "retrieve") as calls:
        report = engine.calibrate(options(questions=asked))
    assert sorted(call[1] for call in calls) == sorted(asked)
    assert kept(engine).entries() == [*report.found]
    for row in report.race.rows:
        assert 0 < row[Trial(DEFAULT_POLICY, RATIO)].kl < row[REUSE].kl
    assert sorted(store.keys(namespace)) == before


def test_an_interrupt_or_the_time_limit_concludes_from_the_finished_prompts(engine, best):
    def interrupt(race: Race, done: float) -> None:
        if len(race.rows) == 2 + MIN_CHECK_PROMPTS:
            raise KeyboardInterrupt

    report = engine.calibrate(options(), interrupt)
    assert report.interrupted
    assert kept(engine).entries() == [*report.found] != []
    assert engine.forget_calibration()
    late = engine.calibrate(options(minutes=1e-9))
    assert (len(late.race.rows), late.found) == (1, ())
    assert kept(engine).entries() == []


def test_a_calibration_goes_on_where_the_same_one_ended(engine, best, monkeypatch):
    whole = engine.calibrate(options())
    assert engine.forget_calibration()
    asked = []
    monkeypatch.setattr("blendrag.engine.calibration.reference", lambda _, p: asked.append(p))

    def interrupt(race: Race, done: float) -> None:
        if len(race.rows) in (3, 8):
            raise KeyboardInterrupt

    runs = [engine.calibrate(options(), interrupt) for _ in range(2)]
    assert [(len(run.race.rows), run.before) for run in runs] == [(3, 0), (8, 3)]
    another = engine.calibrate(options(samples=8), interrupt)
    assert (len(another.race.rows), another.before) == (3, 0)  # other prompts: from the beginning
    engine.calibrate(options(), interrupt)
    asked.clear()
    last = engine.calibrate(options())
    assert (last.found, last.before) == (whole.found, 3)
    assert len(asked) == len(last.race.rows) - 3
    asked.clear()
    assert engine.calibrate(options()).before == 0  # a complete one is measured again
    assert len(asked) == len(whole.race.rows)


def test_a_calibration_of_an_earlier_version_is_named_once_and_not_used(engine, monkeypatch):
    monkeypatch.setattr(engine.planner, "told", set())
    path = kept(engine).path
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"calibrations": [{"policy": "hkvd", "weights": [0.5, 0.1]}]}))
    first, second = metrics(engine), metrics(engine)
    assert first.policy == DEFAULT_POLICY
    (note,) = first.notes
    assert "earlier version" in note
    assert "blendrag calibrate" in note
    assert second.notes == ()


def test_a_model_changed_meanwhile_ends_the_calibration(tmp_path, best):
    with tiny.engine(tiny.shared_llama(), tmp_path / "s") as engine:
        engine.ingest([tiny.document(i) for i in range(4)])

        def watch(race: Race, done: float) -> None:
            with torch.no_grad():
                engine.adapter.model.model.layers[1].self_attn.v_proj.weight.mul_(1.5)

        with tiny.refuses("changed during the calibration", IdentityChangedError):
            engine.calibrate(options(), watch)
        assert kept(engine).entries() == []


def test_a_sample_takes_neighbours_along_and_is_repeatable(engine):
    corpus = engine.corpus
    assert corpus is not None
    one, two = (list(sample_corpus(corpus, 6, 4)) for _ in range(2))
    assert one == two
    texts = [tiny.chunk_texts(engine, number) for number in range(DOCUMENTS)]
    for asked in one:
        assert 1 <= len(asked.chunks) <= 4
        assert len(set(asked.chunks)) == len(asked.chunks)
        assert asked.question in map(question_about, asked.chunks)
        for own in texts:
            at = [own.index(chunk) for chunk in asked.chunks if chunk in own]
            assert not at or at == list(range(at[0], at[0] + len(at)))  # in reading order


def test_passages_learned_from_prompts_are_not_in_the_sample(tmp_path):
    """They would be plain text in the prompt: only their own scope recognises them."""
    with tiny.engine(tiny.llama(), tmp_path / "s") as engine:
        engine.ingest([tiny.document(0)]).whole()
        corpus = engine.require_corpus()
        before = list(sample_corpus(corpus, 6, 4))
        text = "The board of Quillon Works alone knows the price. " * 4
        chunk = Chunk(text, 0, len(text), 40, learned_id("acme", text))
        entry = Entry(chunk.chunk_id, text, parent=LEARNED)
        corpus.entries.put([NewEntry(entry, chunk, "digest", np.zeros(0))])
        assert list(sample_corpus(corpus, 6, 4)) == before


def test_no_prompt_is_measured_twice(engine, monkeypatch):
    """A prompt that helped to choose a policy says nothing about it afterwards."""
    monkeypatch.setattr("blendrag.planning.calibrate.question_about", str)
    corpus = engine.require_corpus()
    texts = {chunk for number in range(DOCUMENTS) for chunk in tiny.chunk_texts(engine, number)}
    asked = [prompt.question for prompt in sample_corpus(corpus, 100, 4)]
    assert sorted(asked) == sorted(texts)
    assert sorted(sample_questions(("b?", "a?", " b? ", "a?"), 4)) == ["a?", "b?"]


def test_a_question_is_about_the_longest_name_of_a_chunk():
    told = "In 1947 the Lisbon Tram Company hired Ana. She liked Porto."
    assert question_about(told) == "What does the context say about Lisbon Tram Company?"
    assert question_about("nothing but small words") == (
        "What does the context say about nothing but small words?"
    )


# -- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ratio": 0.0}, "ratio 0.0 leaves nothing to compare"),
        ({"ratio": 1.0}, "ratio 1.0"),
        ({"ratio": float("nan")}, "ratio nan"),
        ({"samples": 0}, "samples is 0"),
        ({"minutes": 0.0}, "minutes is 0"),
        ({"top_k": 0}, "top_k is 0"),
    ],
)
def test_bad_options_are_one_sentence(changes, words):
    with tiny.refuses(words):
        options(**changes)


def test_too_few_prompts_are_refused_before_one_is_measured(engine):
    asked = ("What did Paragraph 3 build?", "Where is Paragraph 101?")
    with tiny.refuses("there are 2 prompts to calibrate on, expected 7 or more"):
        engine.calibrate(options(questions=asked))


def test_a_store_that_cannot_be_written_or_holds_no_kv_is_refused(tmp_path):
    with tiny.engine(tiny.shared_llama(), tmp_path / "s") as engine:
        engine.ingest([tiny.document(i) for i in range(4)])
        with (
            tiny.engine(tiny.shared_llama(), tmp_path / "s", read_only=True) as reader,
            tiny.refuses("cannot be written", StoreUnavailableError),
        ):
            reader.calibrate(options())
        namespace = engine.adapter.identity.namespace
        for key in list(engine.store.keys(namespace)):
            engine.store.delete(namespace, key)
        with tiny.refuses("no KV"):
            engine.calibrate(options())


def test_prompts_longer_than_the_context_are_refused(tmp_path):
    model = tiny.llama(max_position_embeddings=256, num_hidden_layers=2)
    with tiny.engine(model, tmp_path / "s") as engine:
        engine.ingest([tiny.document(i, 4) for i in range(7)])
        with pytest.raises(ContextOverflowError, match="fewer chunks or"):
            engine.calibrate(options(top_k=9))


def test_a_result_that_cannot_be_written_loses_no_measured_prompt(engine, best, monkeypatch):
    replace = Records.replace

    def fail(records, entries) -> None:
        if records.kind is Calibration:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(records, entries)

    with monkeypatch.context() as patched:
        patched.setattr(Records, "replace", fail)
        with pytest.raises(StoreFullError, match=r"writing the calibration below \S+; free"):
            engine.calibrate(options())
    (kept_race,) = engine.root.glob("verified/*.races.json")
    assert json.loads(kept_race.read_text())["races"]
    kept_race.write_text("{")  # damaged: measured from the beginning
    assert engine.calibrate(options()).before == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"candidates": []},
        {"candidates": ["no-policy"]},
        {"rows": [[]]},
        {"chosen_by": 4},
        {"prompts_done": -1},
    ],
)
def test_a_calibration_whose_partial_race_is_damaged_begins_anew(engine, best, wrong):
    def interrupt(race: Race, done: float) -> None:
        if len(race.rows) == 3:
            raise KeyboardInterrupt

    engine.calibrate(options(), interrupt)
    (races,) = engine.root.glob("verified/*.races.json")
    (entry,) = json.loads(races.read_text())["races"]
    races.write_text(json.dumps({"races": [entry | wrong]}))
    assert engine.calibrate(options(), interrupt).before == 0
