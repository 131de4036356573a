"""``blendrag profile``: what it prints and keeps, how ``ask`` uses it, and bad input."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from blendrag.planning import measure
from cli.commands import QUESTION, ask, invoke, printed, refused, said


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "LENGTHS", (64, 128))
    monkeypatch.setattr(measure, "SCOUTED_FRESH_TOKENS", (8,))
    monkeypatch.setattr(measure, "ROUNDS", 1)


def profiles(store: Path) -> list[Path]:
    return list(Path(store, "verified").glob("*.profiles.json*"))


@pytest.mark.slow
def test_a_profile_is_printed_and_kept_and_ask_uses_it(store: Path) -> None:
    before = ask(store, "--ratio", "auto")["metrics"]
    assert before["predicted_ttft_s"] is None
    assert any("blendrag profile" in note for note in before["notes"])
    first = invoke("profile", "--store", store)
    assert first.exit_code == 0, first.stderr
    for word in ("prefill: 64 tokens", "layers by rows", "memory: ", "disk: ", "GB/s"):
        assert word in first.stdout
    after = ask(store, "--ratio", "auto")["metrics"]
    assert after["predicted_ttft_s"] > 0
    assert after["decision"]
    assert not [note for note in after["notes"] if "blendrag profile" in note]
    args = ("ask", QUESTION, "--store", store, "--ratio", "auto", "--max-new-tokens", "2")
    shown = invoke(*args).stderr
    assert " predicted (loading " in shown
    assert "\ndecision: " in shown
    second = invoke("profile", "--store", store)
    assert "this is the kept profile" in said(second)
    assert second.stdout == first.stdout


@pytest.mark.slow
def test_notes_name_another_machine_and_a_cold_disk_that_could_not_be_timed(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blendrag.planning.tier_times.cached_share", lambda files: 0.5)
    first = invoke("profile", "--store", store, "--json")
    assert "reading from a cold disk was not timed" in said(first)
    (path,) = profiles(store)
    kept = json.loads(path.read_text())
    kept["profiles"][0]["conditions"]["machine"] = "another (64 cores)"
    path.write_text(json.dumps(kept))
    monkeypatch.setattr("blendrag.planning.tier_times.cached_share", lambda files: 0.0)
    second = invoke("profile", "--store", store, "--json")
    assert said(second) == (
        "note: the kept profile is of machine another (64 cores), so this machine was measured now"
    )
    assert json.loads(second.stdout)["is_new"]


@pytest.mark.slow
def test_a_store_that_cannot_be_written_is_measured_without_its_disk(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = os.access

    def refuse_writing(path: Any, mode: int) -> bool:
        return access(path, mode) and (path != store or not mode & os.W_OK)

    monkeypatch.setattr(os, "access", refuse_writing)
    picture = tmp_path / "latencies.png"
    result = invoke("profile", "--store", store, "--plot", str(picture))
    assert result.exit_code == 0, result.stderr
    assert (
        "note: the store cannot be written, so reading from its disk was not timed and the profile was not "
        "kept; ratio=auto uses the profile kept before, if any"
    ) in result.stderr
    assert "  memory: " in result.stdout
    assert "  disk: " not in result.stdout
    assert "EBS gp3 (SSD): first token after" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not profiles(store)


@pytest.mark.slow
def test_directories_and_storage_devices_are_rated(store: Path, tmp_path: Path) -> None:
    args = ("profile", "--store", store, "--dir", str(tmp_path), "--policy", "random")
    result = invoke(*args)
    assert result.exit_code == 0, result.stderr
    assert "cheapest that adds no latency: EBS" in result.stdout
    assert f"{tmp_path}: " in result.stdout  # --dir was timed
    assert "less than $0.01 a month" in result.stdout
    assert not list(tmp_path.glob(".profile-*"))
    rated = printed(*args)["storage"]["rated"]
    assert len(rated) == 3
    assert {"device", "ttft_s", "waiting_s", "hides", "cost_per_month"} == set(rated[0])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--dir", "no/such/place"), "no/such/place"),
        (("--plot", "picture.jpg"), ".png"),
        (("--plot", "no/such/place/p.png"), "no/such/place/p.png cannot be written"),
        (("--policy", "magic"), "policy 'magic' is not one of"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(
    store: Path, more: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure.Measure, "profile", None)
    assert words in refused("profile", "--store", store, *more)


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "blendrag[plots]" in refused("profile", "--plot", "p.png")
