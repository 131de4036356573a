"""Measuring a tiny model and remembering it: whole or not at all, and only for what it was measured on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tiny
from blendrag.engine import BlendEngine
from blendrag.errors import InvalidInputError
from blendrag.estimates import Profile
from blendrag.profile import conditions_of, measure, prefills, recall, remember
from blendrag.profile.record import Remembered, path_of
from blendrag.profile.tier_times import Reading, tier_of


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured is not looked at here, so little is enough."""
    monkeypatch.setattr(measure, "LENGTHS", (64, 128))
    monkeypatch.setattr(prefills, "QUESTIONS", (8,))
    monkeypatch.setattr(measure, "ROUNDS", 1)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[BlendEngine]:
    with tiny.engine(tiny.llama(), tmp_path / "store") as made:
        yield made


def namespace_of(engine: BlendEngine) -> str:
    return engine.resources.trust.namespace


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
    "text", ["", "{", "[]", '{"profiles": 3}', '{"profiles": [3, {}, {"version": 1}]}']
)
def test_a_damaged_file_is_no_profile(engine: BlendEngine, text: str) -> None:
    path = kept(engine)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    assert engine.resources.profile_of(namespace_of(engine)) == (None, "")


def test_a_half_written_profile_beside_a_whole_one_is_left_out(engine: BlendEngine) -> None:
    found = engine.profile().profile
    entries = json.loads(kept(engine).read_text())["profiles"]
    broken = {**entries[0], "layer": {"rows": [1], "seconds": []}}
    kept(engine).write_text(json.dumps({"profiles": [broken, *entries]}))
    assert recall(engine.resources.root, found.conditions) == found


def test_a_store_that_cannot_be_written_is_measured_and_keeps_nothing(tmp_path: Path) -> None:
    with tiny.engine(tiny.llama(), tmp_path / "store") as made:
        made.ingest([tiny.document(0)])
    with tiny.engine(tiny.llama(), tmp_path / "store", read_only=True) as reader:
        report = reader.profile()
        assert report.is_new
        assert not report.kept
        assert not kept(reader).exists()


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
