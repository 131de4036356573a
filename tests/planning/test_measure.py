"""Measuring a tiny model and remembering it: whole or not at all, and only for what it was measured on."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import tiny
from blendrag.engine import BlendEngine, Options
from blendrag.engine.resources import CorpusSettings
from blendrag.errors import InvalidInputError, StoreFullError
from blendrag.planning import measure, page_cache, prefills
from blendrag.planning.model_times import SHORTEST
from blendrag.planning.profile import Profile
from blendrag.planning.profile_record import (
    UNREADABLE,
    Remembered,
    conditions_of,
    cores,
    path_of,
    recall,
    remember,
)
from blendrag.planning.tier_times import Reading, measure_directory, tier_of


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured is not looked at here, so little is enough."""
    monkeypatch.setattr(measure, "LENGTHS", (64, 128))
    monkeypatch.setattr(prefills, "QUESTIONS", (8,))
    monkeypatch.setattr(measure, "ROUNDS", 1)
    monkeypatch.setattr(page_cache, "cached_share", lambda files: 0.0)  # wherever the tests run


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[BlendEngine]:
    with tiny.engine(tiny.llama(), tmp_path / "store") as made:
        yield made


def namespace_of(engine: BlendEngine) -> str:
    return engine.resources.kv_validity.namespace


def kept(engine: BlendEngine) -> Path:
    return path_of(engine.resources.root, namespace_of(engine))


def test_all_of_a_profile_is_measured(engine: BlendEngine, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    steps: list[tuple[str, int, int]] = []
    report = engine.profile([elsewhere], watch=lambda *step: steps.append(step))
    found = report.profile
    assert report.is_new
    assert report.kept
    names = [tier.name for tier in found.tiers]
    assert names == ["memory", "disk", "disk-cold", str(elsewhere), f"{elsewhere} (cold)"]
    assert found.device_bytes_per_s is None  # a CPU
    assert found.layers == 4
    times = [found.prefill_s(n) for n in (32, 64, 128, 1000)]
    assert times == sorted(times)
    assert times[0] > 0
    assert found.layer(64, 64) > 0 < found.scout(8, 64)
    assert found.last(64, 64) > 0
    assert [done for _, done, _ in steps] == list(range(len(steps)))
    assert {total for _, _, total in steps} == {len(steps)}


def test_it_is_measured_once_and_then_remembered(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = engine.profile().profile
    monkeypatch.setattr(measure.Measure, "profile", None)  # measuring now would fail
    second = engine.profile()
    assert not second.is_new
    assert second.profile == first
    assert engine.resources.profile_of(namespace_of(engine)) == (first, "")
    more = engine.profile([tmp_path])  # only the directory is measured
    assert more.is_new
    assert more.profile.layer == first.layer
    assert more.profile.tier(str(tmp_path)) is not None
    assert recall(engine.resources.root, first.conditions) == more.profile


def test_again_measures_again(engine: BlendEngine) -> None:
    first, second = engine.profile(), engine.profile(again=True)
    assert second.is_new
    assert second.replaces == ""
    assert second.profile != first.profile


def test_again_keeps_the_directories_measured_before(engine: BlendEngine, tmp_path: Path) -> None:
    there, away = tmp_path / "there", tmp_path / "away"
    for directory in (there, away):
        directory.mkdir()
    first = engine.profile([there, away]).profile
    away.rmdir()
    steps: list[str] = []
    second = engine.profile(again=True, watch=lambda what, *_: steps.append(what)).profile
    assert [tier.name for tier in second.tiers] == [tier.name for tier in first.tiers]
    assert second.tier(str(there)) != first.tier(str(there))  # measured anew
    assert second.tier(str(away)) == first.tier(str(away))  # nothing else is known of it
    assert [what for what in steps if str(tmp_path) in what] == [f"reading from {there}"]


@pytest.mark.parametrize(
    "error", [StoreFullError("no room"), InvalidInputError("not writable"), OSError("stale")]
)
def test_again_keeps_what_is_known_of_a_directory_that_refuses_now(
    engine: BlendEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    first = engine.profile([tmp_path]).profile

    def refusing(directory: Path, *given: Any) -> Any:
        if directory == tmp_path:
            raise error
        return measure_directory(directory, *given)

    monkeypatch.setattr("blendrag.planning.measure.measure_directory", refusing)
    second = engine.profile(again=True).profile
    assert second.tier(str(tmp_path)) == first.tier(str(tmp_path))
    assert second.took_s != first.took_s
    with pytest.raises(type(error)):  # named now, it is not passed over
        engine.profile([tmp_path], again=True)


def test_a_directory_that_is_named_twice_is_measured_once(
    engine: BlendEngine, tmp_path: Path
) -> None:
    found = engine.profile([tmp_path, tmp_path / "." / "."]).profile
    names = [tier.name for tier in found.tiers]
    assert names.count(str(tmp_path)) == 1


@pytest.mark.skipif(not torch.backends.openmp.is_available(), reason="one count for all threads")
def test_conditions_are_those_of_the_thread_that_computes(engine: BlendEngine) -> None:
    """torch counts threads for each thread of its caller's, once that one has computed."""
    engine.generate("What was built?")
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        report = engine.profile()
    finally:
        torch.set_num_threads(threads)
    assert report.profile.conditions.threads == threads
    assert report.profile.is_shared == (threads >= cores())
    metrics = engine.generate("What was built?", options=Options(ratio="auto")).metrics
    assert not metrics.notes


def test_reading_is_shared_where_torch_computes_on_every_core(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for count, is_shared in ((1, True), (1000, False)):
        monkeypatch.setattr(measure, "cores", lambda count=count: count)
        assert engine.profile(again=True).profile.is_shared == is_shared


def test_a_store_of_another_model_is_refused(tmp_path: Path) -> None:
    with tiny.engine(tiny.llama(), tmp_path / "store") as one:
        one.ingest([tiny.document(0)])
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens(["<|more|>"])
    with tiny.engine(tiny.llama(), tmp_path / "store", tokenizer=tokenizer) as other:
        with pytest.raises(InvalidInputError, match="was ingested with model") as refused:
            other.profile()
        assert tiny.one_sentence(str(refused.value))


def test_an_empty_corpus_binds_nobody(tmp_path: Path) -> None:
    with tiny.engine(tiny.llama(), tmp_path / "store") as one:
        one.resources.create_corpus()
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens(["<|more|>"])
    with tiny.engine(tiny.llama(), tmp_path / "store", tokenizer=tokenizer) as other:
        assert other.profile().kept


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"machine": "another (64 cores)"}, "machine another (64 cores)"),
        ({"device": "NVIDIA H200", "threads": 64}, "device NVIDIA H200, threads 64"),
        ({"torch": "1.0"}, "torch 1.0"),
        ({"dtype": "float16"}, "dtype float16"),
        ({"blendrag": "9"}, "blendrag 9"),
    ],
)
def test_a_profile_of_something_else_is_not_used_and_is_measured_anew(
    engine: BlendEngine, change: dict[str, Any], says: str
) -> None:
    mine = engine.profile().profile
    theirs = replace(mine, conditions=replace(mine.conditions, **change))
    kept(engine).unlink()
    remember(engine.resources.root, theirs)
    assert engine.resources.profile_of(namespace_of(engine)) == (None, says)
    report = engine.profile()
    assert report.is_new
    assert report.replaces == says
    found, _ = engine.resources.profile_of(namespace_of(engine))
    assert found == report.profile
    assert recall(engine.resources.root, theirs.conditions) == theirs  # that machine's is kept, too


def test_another_models_profile_is_not_seen(tmp_path: Path) -> None:
    with tiny.engine(tiny.llama(), tmp_path / "store") as one:
        one.profile()
    with tiny.engine(tiny.llama(seed=1), tmp_path / "store") as other:
        assert other.resources.profile_of(namespace_of(other)) == (None, "")


def test_interrupted_at_any_step_it_keeps_nothing(engine: BlendEngine) -> None:
    for last in (0, 2, 3, 7, 20):

        def interrupt(what: str, done: int, steps: int, last: int = last) -> None:
            if done == last:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            engine.profile(watch=interrupt)
        assert not kept(engine).exists()
        assert not list(engine.resources.root.glob(".profile-*"))
        assert engine.resources.profile_of(namespace_of(engine)) == (None, "")
    assert engine.profile().kept


def test_interrupted_while_reading_it_leaves_no_files_behind(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("blendrag.store.disk.DiskStore.open", read)
    with pytest.raises(KeyboardInterrupt):
        engine.profile()
    assert not list(engine.resources.root.glob(".profile-*"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"profiles": []}', ""),
        ("", UNREADABLE),
        ("{", UNREADABLE),
        ("[]", UNREADABLE),
        ('{"profiles": 3}', UNREADABLE),
        ('{"profiles": [3, {}, {"version": 1}]}', UNREADABLE),
        ('{"profiles": ' + 100_000 * "[" + 100_000 * "]" + "}", UNREADABLE),
    ],
)
def test_a_damaged_file_is_no_profile_and_is_said_to_be_there(
    engine: BlendEngine, text: str, says: str
) -> None:
    path = kept(engine)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    assert engine.resources.profile_of(namespace_of(engine)) == (None, says)
    report = engine.profile()
    assert report.replaces == says
    assert engine.resources.profile_of(namespace_of(engine)) == (report.profile, "")


def test_requests_are_answered_whatever_the_file_holds(engine: BlendEngine) -> None:
    engine.ingest([tiny.document(0)])
    text = tiny.chunk_texts(engine, 0)[0] + "\n\nQuestion: What did the company build?\nAnswer:"
    path = kept(engine)
    path.parent.mkdir(parents=True, exist_ok=True)
    found = engine.profile().profile
    for damaged in ({**found.as_dict(), "layer_bytes": [float("inf")]}, {"version": 1}):
        path.write_text(json.dumps({"profiles": [damaged]}))
        for ratio in (0.2, "auto"):
            options = Options(mode="blend", ratio=ratio, max_new_tokens=1)
            metrics = engine.generate(text, options=options).metrics
            assert metrics.reused_tokens > 0
            said = [note for note in metrics.notes if UNREADABLE in note]
            assert len(said) == (ratio == "auto")
            assert all(tiny.one_sentence(note) for note in said)
    path.write_text('{"profiles": ' + 100_000 * "[")
    assert engine.generate(text, options=Options(max_new_tokens=1)).metrics.reused_tokens > 0


def test_a_half_written_profile_beside_a_whole_one_is_left_out(engine: BlendEngine) -> None:
    found = engine.profile().profile
    entries = json.loads(kept(engine).read_text())["profiles"]
    broken = {**entries[0], "layer": {"rows": [1], "seconds": []}}
    kept(engine).write_text(json.dumps({"profiles": [broken, *entries]}))
    assert recall(engine.resources.root, found.conditions) == found


def test_a_store_that_cannot_be_written_is_not_written_and_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    elsewhere.mkdir()
    with tiny.engine(tiny.llama(), root) as made:
        made.ingest([tiny.document(0)])
    written: list[Path] = []
    mkdtemp = tempfile.mkdtemp
    monkeypatch.setattr(
        tempfile, "mkdtemp", lambda **given: written.append(given["dir"]) or mkdtemp(**given)
    )
    with tiny.engine(tiny.llama(), root, read_only=True) as reader:
        steps: list[tuple[int, int]] = []
        report = reader.profile([elsewhere], watch=lambda _, *step: steps.append(step))
        assert report.is_new
        assert not report.kept
        assert not kept(reader).exists()
        assert report.profile.tier("disk") is None
        assert report.profile.tier("memory") is not None
        assert report.profile.tier(str(elsewhere)) is not None
        assert set(written) == {elsewhere}
        assert [done for done, _ in steps] == list(range(steps[0][1]))


@pytest.mark.parametrize(("directories", "option"), [((), "--store"), (("place",), "--dir")])
def test_where_no_scratch_can_be_made_the_option_that_named_it_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    directories: tuple[str, ...],
    option: str,
) -> None:
    places = [tmp_path / name for name in directories]
    for place in places:
        place.mkdir()
    refused = places[0] if places else tmp_path / "store"
    mkdtemp = tempfile.mkdtemp

    def made(**given: Any) -> str:
        if given["dir"] == refused:
            raise PermissionError(errno.EACCES, "Permission denied")
        return mkdtemp(**given)

    monkeypatch.setattr(tempfile, "mkdtemp", made)
    with tiny.engine(tiny.llama(), tmp_path / "store") as engine:
        with pytest.raises(InvalidInputError, match=f"choose another {option}$") as error:
            engine.profile(places)
        assert str(refused) in str(error.value)


def test_files_that_stay_in_the_cache_make_no_cold_tier(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(page_cache, "cached_share", lambda files: 0.5)
    report = engine.profile([tmp_path])
    assert [tier.name for tier in report.profile.tiers] == ["memory", "disk", str(tmp_path)]
    assert report.profile.tier("disk-cold") == report.profile.tier("disk")


@pytest.mark.parametrize("left", [SHORTEST + 1, 3, 0])
def test_a_prefix_that_leaves_no_prompt_is_refused_in_a_sentence(tmp_path: Path, left: int) -> None:
    with measured_behind(tmp_path, left) as made:
        with pytest.raises(InvalidInputError, match="behind a shorter prefix") as refused:
            made.profile()
        assert tiny.one_sentence(str(refused.value))


def test_the_longest_prefix_that_leaves_a_prompt_is_measured_behind(tmp_path: Path) -> None:
    with measured_behind(tmp_path, SHORTEST + 2) as made:
        assert made.profile().profile.chunk_tokens == SHORTEST // 4


@contextmanager
def measured_behind(root: Path, left: int) -> Iterator[BlendEngine]:
    """A prefix that leaves so many tokens of the context."""
    model = tiny.llama(max_position_embeddings=256)
    text = "x" * 300
    with tiny.engine(model, root / "store", prefix_text=text) as made:
        prefix = made.resources.prefix_ids
        assert len(prefix) >= 256
        with mock.patch.object(CorpusSettings, "prefix_ids", return_value=prefix[: 256 - left]):
            yield made


def test_a_directory_that_is_none_is_refused(engine: BlendEngine, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="is no directory"):
        engine.profile([tmp_path / "none"])
    for texts in (str(tmp_path / "none"), [str(tmp_path / "none")]):
        with pytest.raises(InvalidInputError, match="none is no directory"):
            engine.profile(texts)


def test_what_a_killed_measurement_left_behind_is_gone_after_the_next(engine: BlendEngine) -> None:
    root = engine.resources.root
    old, young = root / ".profile-killed", root / ".profile-running"
    for left in (old, young):
        (left / "kv").mkdir(parents=True)
    os.utime(old, (0, 0))
    engine.profile()
    assert not old.exists()
    assert young.exists()  # it may be another process that is measuring now


def test_the_store_gains_nothing_by_being_measured(engine: BlendEngine) -> None:
    before = engine.stats()
    engine.profile()
    after = engine.stats()
    assert (after.entries, after.size_bytes) == (before.entries, before.size_bytes)


def test_an_encoded_store_is_measured_as_it_is_kept(tmp_path: Path) -> None:
    sizes = {}
    for encoding in ("native", "int8"):
        with tiny.engine(tiny.llama(), tmp_path / encoding, encoding=encoding) as made:
            sizes[encoding] = sum(made.profile().profile.layer_bytes)
    assert sizes["int8"] < sizes["native"] / 2


def test_a_model_that_cannot_be_blended_is_refused(tmp_path: Path) -> None:
    from blendrag.errors import UnsupportedModelError

    with (
        tiny.engine(tiny.family("gpt2", n_positions=512), tmp_path / "store") as made,
        pytest.raises(UnsupportedModelError),
    ):
        made.profile()


def test_the_file_is_looked_at_again_when_it_changes(engine: BlendEngine) -> None:
    looked: list[str] = []

    def conditions(namespace: str) -> Any:
        looked.append(namespace)
        return conditions_of(engine.adapter, namespace)

    remembered = Remembered(engine.resources.root, conditions)
    namespace = namespace_of(engine)
    assert remembered(namespace) == remembered(namespace) == (None, "")
    assert len(looked) == 1
    found = engine.profile().profile
    assert remembered(namespace) == (found, "")
    kept(engine).unlink()
    assert remembered(namespace) == (None, "")


# -- readings ----------------------------------------------------------------------------------------


def test_a_tier_is_what_its_readings_say() -> None:
    def reading(chunk_bytes: int, reads: int) -> Reading:
        return Reading(reads * chunk_bytes, reads, reads * (chunk_bytes / 1e9 + 1e-4), 0.0)

    tier = tier_of("disk", [reading(1_000_000, 40), reading(100_000, 40)])
    assert tier.bytes_per_s == pytest.approx(1e9)
    assert tier.read_s == pytest.approx(1e-4)


def test_a_tier_of_odd_readings_is_still_one_of_finite_speed() -> None:
    """Short chunks that took longer than long ones, by chance."""
    tier = tier_of("disk", [Reading(10**8, 40, 0.1, 0.1), Reading(10**7, 40, 0.5, 0.1)])
    assert tier.seconds(10**8, 40) == pytest.approx(0.1)
    assert 1e9 <= tier.bytes_per_s <= 2e9
    assert 0 < tier.busy < 1


def test_what_is_measured_is_json(engine: BlendEngine) -> None:
    found = engine.profile().profile
    assert Profile.of(json.loads(json.dumps(found.as_dict()))) == found
