"""Measuring a machine profile: whole or not at all, remembered, and only for what it was measured on."""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from scipy import optimize

import tiny
from blendrag.engine import BlendEngine, Options
from blendrag.errors import InvalidInputError, UnsupportedModelError
from blendrag.fusor import Fusor
from blendrag.planning import measure, tier_times
from blendrag.planning.measure import (
    DEVIATION_POLICY,
    FRESH_TOKENS,
    MAX_FAR_TOKENS,
    MIN_PROMPT_TOKENS,
    MOVING_POLICY,
    PLAIN_POLICY,
    RATIOS,
    SCOUT_POLICY,
    STOCK,
    Measure,
    ModelTimes,
    Point,
    PromptToTime,
    Timed,
    figures,
    fit,
    isotonic_regression,
    median,
    non_negative_least_squares,
    prefills_to_time,
)  # fmt: skip
from blendrag.planning.profile import Curve, profiles, recall_profile
from blendrag.planning.tier_times import Reading, tier_of

LAYERS = 4


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "LENGTHS", (64, 128))
    monkeypatch.setattr(measure, "SCOUTED_FRESH_TOKENS", (8,))
    monkeypatch.setattr(measure, "RATIOS", (0.0, 0.15, 1.0))
    monkeypatch.setattr(measure, "ROUNDS", 1)
    monkeypatch.setattr(tier_times, "ROUNDS", 1)
    monkeypatch.setattr(tier_times, "READ_BYTES", 1 << 16)
    monkeypatch.setattr(tier_times, "cached_share", lambda files: 0.0)  # on any file system


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    with tiny.engine(tiny.llama(), tmp_path_factory.mktemp("measure") / "store") as made:
        made.ingest([tiny.document(0)])
        yield made


@pytest.fixture
def engine(shared: BlendEngine) -> Iterator[BlendEngine]:
    """Without a profile."""
    yield shared
    kept(shared).unlink(missing_ok=True)


def namespace_of(engine: BlendEngine) -> str:
    return engine.kv_namespace.validity.namespace


def kept(engine: BlendEngine) -> Path:
    return profiles(engine.root, namespace_of(engine)).path


# -- through an engine -------------------------------------------------------------------------------


def test_all_of_a_profile_is_measured_and_the_store_gains_nothing(engine, tmp_path):
    before = engine.stats()
    steps: list[tuple[str, int, int]] = []
    report = engine.profile([tmp_path], watch=lambda *step: steps.append(step))
    found = report.profile
    assert report.is_new
    assert report.kept
    names = [tier.name for tier in found.tiers]
    assert names == ["memory", "disk", "disk-cold", str(tmp_path), f"{tmp_path} (cold)"]
    assert found.device_bytes_per_s is None  # a CPU
    assert found.layers == LAYERS
    times = [found.prefill_s(n) for n in (32, 64, 128, 1000)]
    assert times == sorted(times)
    assert times[0] > 0
    assert found.layer(64, 64) > 0 < found.scout(8, 64)
    assert found.last(64, 64) > 0
    assert [done for _, done, _ in steps] == list(range(len(steps)))
    assert {total for _, _, total in steps} == {len(steps)}
    assert recall_profile(engine.root, found.conditions) == (found, "")
    after = engine.stats()
    assert (after.entries, after.size_bytes) == (before.entries, before.size_bytes)


def test_it_is_measured_once_and_then_remembered(engine, monkeypatch, tmp_path):
    first = engine.profile().profile
    monkeypatch.setattr(Measure, "profile", None)  # measuring now would fail
    second = engine.profile()
    assert not second.is_new
    assert second.profile == first
    assert engine.kv_namespace.profile_of(namespace_of(engine)) == (first, "")
    more = engine.profile([tmp_path, tmp_path / "." / "."])  # only the directory, once
    assert more.is_new
    assert more.profile.layer == first.layer
    assert [tier.name for tier in more.profile.tiers].count(str(tmp_path)) == 1
    assert engine.kv_namespace.profile_of(namespace_of(engine)) == (more.profile, "")


def test_a_remote_is_measured_once_and_ratio_auto_decides_with_it(tmp_path):
    pytest.importorskip("obstore")
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    url = f"file://{bucket}"
    with tiny.engine(tiny.shared_llama(), tmp_path / "one", remote=url) as one:
        one.ingest([tiny.document(0)])
    before = sorted(bucket.rglob("*.kv"))
    with tiny.engine(tiny.shared_llama(), tmp_path / "two") as two:
        first = two.profile().profile
    with tiny.engine(tiny.shared_llama(), tmp_path / "two", remote=url) as two:
        report = two.profile()
        assert report.is_new
        assert report.profile.layer == first.layer
        assert report.profile.tier("remote").bytes_per_s > 0
        assert sorted(bucket.rglob("*.kv")) == before
        assert not two.profile().is_new
        two.ingest([tiny.document(0)])
        metrics = two.generate(tiny.prompt(two, 0), ratio="auto").metrics
        assert metrics.decision
        assert not any("no times for reading" in note for note in metrics.notes)


def test_again_measures_again_and_directories_keep_their_figures(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "cores", lambda: 1)
    first = engine.profile([tmp_path]).profile
    monkeypatch.setattr(measure, "cores", lambda: 1000)
    monkeypatch.setattr(tier_times, "cached_share", lambda files: 0.5)
    report = engine.profile(again=True)
    second = report.profile
    assert (report.is_new, report.replaces) == (True, "")
    assert second.layer != first.layer
    assert second.tier(str(tmp_path)) == first.tier(str(tmp_path))
    assert second.tier("disk") != first.tier("disk")
    assert (first.is_shared, second.is_shared) == (True, False)  # torch computes on one thread
    # files that stay in the page cache make no cold tier
    assert [tier.name for tier in second.tiers if tier.name != str(tmp_path)][-2:] == [
        "memory",
        "disk",
    ]
    assert second.tier("disk-cold") == second.tier("disk")


@pytest.mark.skipif(not torch.backends.openmp.is_available(), reason="one count for all threads")
def test_conditions_are_those_of_the_thread_that_computes(engine):
    """torch counts threads per thread, once that thread has computed."""
    engine.generate("What was built?", Options(max_new_tokens=1))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert engine.profile().profile.conditions.threads == threads
    finally:
        torch.set_num_threads(threads)


def test_a_store_of_another_model_is_refused_unless_it_is_empty(tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens(["<|more|>"])
    with tiny.engine(tiny.shared_llama(), tmp_path / "store") as one:
        one.kv_namespace.corpus.create()
        with tiny.engine(tiny.llama(), tmp_path / "store", tokenizer=tokenizer) as other:
            assert other.profile().kept
        one.ingest([tiny.document(0)])
    other = tiny.engine(tiny.llama(), tmp_path / "store", tokenizer=tokenizer)
    with other, tiny.refuses("was ingested with model"):
        other.profile()


@pytest.mark.parametrize("last", [3, 9, "reading"])
def test_an_interrupted_measurement_keeps_nothing(engine, last, monkeypatch):
    def interrupt(what: Any, done: Any = None, *rest: Any) -> None:
        if last in (done, "reading"):
            raise KeyboardInterrupt

    if last == "reading":
        monkeypatch.setattr("blendrag.store.disk.DiskStore.open", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.profile(watch=interrupt if last != "reading" else lambda *step: None)
    assert not kept(engine).exists()
    assert not list(engine.root.glob(".profile-*"))
    assert engine.kv_namespace.profile_of(namespace_of(engine)) == (None, "")


def test_a_measurement_goes_on_with_the_rounds_that_were_timed(engine, monkeypatch):
    monkeypatch.setattr(measure, "ROUNDS", 3)
    whole = prefills_to_time([64, 128], 4000, engine.manifest.chunk_tokens)
    timed, steps = list[Any](), list[tuple[int, int]]()
    time = ModelTimes.time
    monkeypatch.setattr(ModelTimes, "time", lambda *given: [timed.append(given), time(*given)][1])

    def interrupt(what: str, done: int, of: int) -> None:
        if len(timed) == 3 + len(whole) + 2:  # in the second round
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.profile(watch=interrupt)
    assert not kept(engine).exists()
    timed.clear()
    engine.profile(watch=lambda what, done, of: steps.append((done, of)))
    assert len(timed) == 2 * len(whole)  # the lengths are known, and one round is timed
    assert steps[-1][0] + 1 == steps[-1][1]
    timed.clear()
    engine.profile(again=True)
    assert len(timed) == 3 + 3 * len(whole)


@pytest.mark.parametrize("lengths", [None, [], [64, 1 << 40]])
def test_a_measurement_whose_rounds_are_damaged_begins_anew(engine, lengths, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(measure, "figures", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.profile()
    (timings,) = engine.root.glob("verified/*.timings.json")
    found = json.loads(timings.read_text())
    found["timings"][0]["timed"]["lengths"] = lengths
    timings.write_text("{" if lengths is None else json.dumps(found))
    bearable = mock.Mock(return_value=[64, 128])
    monkeypatch.setattr(Measure, "bearable", bearable)
    assert engine.profile().kept
    bearable.assert_called_once()
    assert not timings.exists()


@pytest.mark.parametrize("ratio", [0.2, "auto"])
def test_a_damaged_record_only_takes_the_profile_away(engine, ratio):
    for damaged in ('{"profiles": [{"version": 1}]}', '{"profiles": ' + 100_000 * "["):
        kept(engine).write_text(damaged)
        options = Options(ratio=ratio, max_new_tokens=1)
        metrics = engine.generate(tiny.prompt(engine, 0), options).metrics
        assert metrics.reused_tokens > 0
        about = [note for note in metrics.notes if "machine profile" in note]
        assert len(about) == (ratio == "auto")
        assert all(tiny.one_sentence(note) for note in about)
        assert all(("another version" in note) == ("version" in damaged) for note in about)


def test_a_store_that_cannot_be_written_is_not_written_and_keeps_nothing(engine, tmp_path):
    with (
        tiny.engine(tiny.shared_llama(), engine.root, read_only=True) as reader,
        mock.patch.object(tempfile, "mkdtemp", wraps=tempfile.mkdtemp) as written,
    ):
        report = reader.profile([tmp_path])
        assert (report.is_new, report.kept) == (True, False)
        assert not kept(reader).exists()
    names = [tier.name for tier in report.profile.tiers]
    assert names == ["memory", str(tmp_path), f"{tmp_path} (cold)"]
    assert {call.args[2] for call in written.mock_calls} == {tmp_path}


@pytest.mark.parametrize("option", ["--store", "--dir"])
def test_a_directory_that_cannot_be_written_is_named_with_its_option(
    engine, tmp_path, monkeypatch, option
):
    refused = tmp_path if option == "--dir" else engine.root
    mkdtemp = tempfile.mkdtemp

    def made(suffix: str | None, prefix: str, directory: Path) -> str:
        if directory == refused:
            raise PermissionError(errno.EACCES, "Permission denied")
        return mkdtemp(suffix, prefix, directory)

    monkeypatch.setattr(tempfile, "mkdtemp", made)
    with pytest.raises(InvalidInputError, match=f"choose another {option}$") as error:
        engine.profile([tmp_path])
    assert str(refused) in str(error.value)
    for missing in ([tmp_path / "none"], str(tmp_path / "none")):
        with pytest.raises(InvalidInputError, match="none is not a directory"):
            engine.profile(missing)


def test_a_prefix_must_leave_room_for_a_prompt():
    adapter = tiny.adapter(tiny.llama(max_position_embeddings=256))
    fusor = Fusor(adapter)
    assert (
        ModelTimes(adapter, fusor, range(256 - MIN_PROMPT_TOKENS - 2)).longest == MIN_PROMPT_TOKENS
    )
    for left in (MIN_PROMPT_TOKENS + 1, 0):
        with pytest.raises(InvalidInputError, match="use a shorter prefix"):
            ModelTimes(adapter, fusor, range(256 - left))


def test_an_encoded_store_is_measured_as_it_is_kept(tmp_path):
    with tiny.engine(tiny.shared_llama(), tmp_path / "int8", kv_encoding="int8") as made:
        found, native = made.profile().profile, made.adapter.layout.encoded("native")
    kept = [native.layer_bytes(i, found.chunk_tokens) for i in range(LAYERS)]
    assert sum(found.layer_bytes) < sum(kept) / 2


def test_a_model_that_cannot_be_blended_is_refused(tmp_path):
    model = tiny.family("gpt2", n_positions=512)
    with tiny.engine(model, tmp_path / "store") as made, pytest.raises(UnsupportedModelError):
        made.profile()


# -- readings and the page cache ---------------------------------------------------------------------


def test_a_tier_follows_from_readings_of_long_and_short_chunks():
    def reading(chunk_bytes: int, reads: int) -> Reading:
        return Reading(reads * chunk_bytes, reads, reads * (chunk_bytes / 1e9 + 1e-4), 0.0)

    tier = tier_of("disk", [reading(1_000_000, 40), reading(100_000, 40)])
    assert tier.bytes_per_s == pytest.approx(1e9)
    assert tier.read_s == pytest.approx(1e-4)
    # finite even if short chunks took longer
    odd = tier_of("disk", [Reading(10**8, 40, 0.1, 0.1), Reading(10**7, 40, 0.5, 0.1)])
    assert odd.seconds(10**8, 40) == pytest.approx(0.1)
    assert 1e9 <= odd.bytes_per_s <= 2e9
    assert 0 < odd.busy < 1


def test_pages_in_the_cache_are_counted(tmp_path, monkeypatch):
    monkeypatch.undo()
    path, empty = tmp_path / "file", tmp_path / "empty"
    path.write_bytes(bytes(40 * mmap.PAGESIZE + 1))
    empty.touch()
    assert tier_times.cached_share([path, empty]) > 0.5
    assert tier_times.cached_share([empty]) == 0.0
    if tier_times.drop_cached([path, empty]):
        assert tier_times.cached_share([path, empty]) < 0.5


def test_files_are_dropped_again_and_count_as_dropped_only_if_counted(monkeypatch):
    refused = OSError(errno.ENOSYS, "mincore")
    for shares, dropped in (([0.5, 0.0], hasattr(os, "posix_fadvise")), ([refused] * 3, False)):
        monkeypatch.setattr(tier_times, "cached_share", mock.Mock(side_effect=shares))
        assert tier_times.drop_cached([]) == dropped


# -- which prefills are timed ------------------------------------------------------------------------


def prefills(longest: int, context: int = 32768, chunk_tokens: int = 512) -> list[PromptToTime]:
    lengths = [n for n in (64, 128, 256, 512, 1024, 2048, 4096) if n <= longest]
    return prefills_to_time(lengths, context, chunk_tokens)


def of(made: list[PromptToTime], policy: str) -> list[PromptToTime]:
    return [prefill for prefill in made if prefill.policy == policy]


def test_a_far_longer_prompt_is_timed_at_ratios_that_compute_few_tokens(monkeypatch):
    monkeypatch.setattr(measure, "RATIOS", RATIOS)
    made = prefills(512)
    ratios: dict[PromptToTime, list[float]] = {}
    for prefill in of(made, PLAIN_POLICY):
        ratios.setdefault(replace(prefill, ratio=0.0), []).append(prefill.ratio)
    far = PromptToTime(PLAIN_POLICY, FRESH_TOKENS, 5, 512)  # six times 512 tokens, in whole chunks
    assert ratios.pop(far) == [0.0, 0.05, 0.15]
    assert list(ratios.values()) == [list(RATIOS)] * 2
    assert max(prompt.tokens for prompt in ratios) <= 512
    assert max(prefill.candidates for prefill in of(made, SCOUT_POLICY)) == 5 * 512


@pytest.mark.parametrize("longest", [64, 4096])
@pytest.mark.parametrize("context", [300, 5000, 32768])
def test_no_prompt_exceeds_the_context_or_the_limit(longest, context):
    made = prefills(min(longest, context), context, min(512, context // 4))
    for policy in (PLAIN_POLICY, SCOUT_POLICY, DEVIATION_POLICY):
        assert of(made, policy)
        for prefill in of(made, policy):
            assert prefill.tokens <= min(context, max(MAX_FAR_TOKENS, longest))


@pytest.mark.parametrize(
    ("times_s", "bearable"),
    [
        ((9.0, 3.0, 7.0), [128, 256]),  # the first is slow even warm: two lengths all the same
        ((9.0, 0.4, 0.9, 2.0), [128, 256, 512]),  # that it was slow cold says nothing
        ((9.0, 0.1, 0.2, 0.3, 0.6, 0.9), [128, 256, 512, 1024, 2048]),
    ],
)
def test_lengths_end_where_they_take_too_long_but_there_are_at_least_two(times_s, bearable):
    left = list(times_s)
    measuring: Any = SimpleNamespace(
        _time=lambda prefill: SimpleNamespace(total_s=left.pop(0)), _step=lambda what: None
    )
    lengths = [128, 256, 512, 1024, 2048][: len(bearable) + 1]
    assert Measure.bearable(measuring, lengths) == bearable


# -- what their times say ----------------------------------------------------------------------------


def test_the_median_counts():
    runs = [Timed(1, 0.2, 0.9, 1.9), Timed(9, 0.1, 0.2, 9.2), Timed(2, 0.9, 0.1, 2.1)]
    assert median(runs) == Timed(2, 0.2, 0.2, 2.1)


@pytest.mark.parametrize(("layers", "pass_s", "each"), [(4, 3 * 0.2 + 0.05, 0.2), (1, 0.05, 0.05)])
def test_the_last_layer_is_timed_apart_from_the_others(layers, pass_s, each):
    found = figures({one: Timed(pass_s, 0.05, 0.1, pass_s + 0.1) for one in prefills(256)}, layers)
    for name, seconds in (("layer", each), ("last", 0.05)):
        assert min(found[name].seconds) == pytest.approx(seconds)
        assert max(found[name].seconds) == pytest.approx(seconds)
    assert found["fixed_s"] == 0.1


def test_moving_is_what_it_takes_longer_than_staying():
    times = {one: Timed(0.65, 0.05, 0.1, 0.75) for one in prefills(256)}
    (moving,) = of(list(times), MOVING_POLICY)
    times[moving] = times[moving]._replace(total_s=0.78)
    each = 0.03 / (LAYERS - 1) / moving.candidates
    assert figures(times, LAYERS)["shift_s"] == pytest.approx(each)


@pytest.mark.parametrize(("longest", "pair_s"), [(128, LAYERS * 5e-7), (2048, 0.0)])
def test_a_prefill_timed_at_few_lengths_takes_attention_from_the_layers(longest, pair_s):
    layer = Curve((1.0, 1e4), (1e-3, 1.0), 1e-4, pair_s=5e-7)
    times = {}
    for one in prefills(longest):
        layer_s = layer(*one.point(0.0)[:2])
        stock_s = 1e-2 * one.tokens
        pass_s = stock_s if one.policy == STOCK else LAYERS * layer_s
        times[one] = Timed(pass_s, layer_s, 0.1, pass_s + 0.1)
    assert figures(times, LAYERS)["prefill"].pair_s == pytest.approx(pair_s, abs=1e-8)


# -- fitting -----------------------------------------------------------------------------------------


def test_a_fit_finds_the_terms_that_times_were_made_of():
    points = [
        Point(rows, context, placed, 2e-3 + 1e-4 * rows + 3e-8 * rows * context + 1e-6 * placed)
        for rows in (10, 50, 200, 800)
        for context, placed in ((500, 900), (1000, 400), (1500, 3000))
    ]
    curve = fit(points)
    assert curve.pair_s == pytest.approx(3e-8, rel=1e-3)
    assert curve.placed_s == pytest.approx(1e-6, rel=1e-3)
    assert curve(200, 1000, 400) == pytest.approx(2e-3 + 2e-2 + 6e-3 + 4e-4, rel=1e-3)
    # beyond what was measured
    assert curve(1600, 800) == pytest.approx(2e-3 + 0.16 + 3e-8 * 1600 * 800, rel=1e-2)


def test_a_fit_follows_a_flat_start_and_is_proportional_at_one_length():
    flat = fit([Point(rows, 1, 0, max(1e-3, 1e-5 * rows)) for rows in (1, 30, 100, 400, 800)])
    for rows, seconds in ((30, 1e-3), (100, 1e-3), (600, 6e-3)):  # as on a GPU
        assert flat(rows, 1) == pytest.approx(seconds, rel=0.02)
    alone = fit([Point(128, 64, 0, 1.0), Point(128, 64, 0, 1.2)])
    assert alone(1280, 640) == pytest.approx(11.0)
    with pytest.raises(InvalidInputError, match="no time was measured"):
        fit([Point(10, 10, 0, 0.0)])


def test_a_fit_of_noise_never_falls_and_has_no_negative_term():
    draw = random.Random(3)
    for _ in range(20):
        points = [
            Point(rows, context, 0, draw.uniform(0.001, 0.1))
            for rows in (8, 32, 128, 512)
            for context in (100, 1000)
        ]
        curve = fit(points)
        assert min(curve.row_s, curve.pair_s, curve.placed_s) >= 0
        times = [curve(rows, 500) for rows in range(0, 2000, 7)]
        assert times == sorted(times)


def test_two_lengths_and_the_cost_of_attention_predict_a_long_prefill():
    def seconds(n: int) -> float:
        return 0.1 + 7e-3 * n + 2e-6 * n * n / 2

    points = [Point(n, n / 2, 0, seconds(n)) for n in (128, 256)]
    curve = fit(points, 2e-6)
    assert curve.pair_s == 2e-6
    assert curve(4096, 2048) == pytest.approx(seconds(4096), rel=0.02)
    slow = fit(points, 1.0)  # attention that would take longer than everything
    assert slow.row_s > 0
    assert slow(128, 64) == pytest.approx(points[0].seconds, rel=0.1)


@pytest.mark.parametrize("seed", range(20))
def test_fits_are_those_of_scipy(seed):
    numbers = np.random.default_rng(seed)
    matrix = numbers.standard_normal((12, 4)) + numbers.integers(0, 2)
    matrix[:, numbers.integers(4)] *= numbers.integers(0, 2)  # a term that no point has
    target = np.ones(12) if seed % 2 else numbers.standard_normal(12)
    expected, _ = optimize.nnls(matrix, target)
    np.testing.assert_allclose(non_negative_least_squares(matrix, target), expected, atol=1e-9)
    values = numbers.standard_normal(30).cumsum()
    np.testing.assert_allclose(isotonic_regression(values), optimize.isotonic_regression(values).x)
