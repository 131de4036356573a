"""``blendrag profile``: what it prints and keeps, how ``ask`` uses it, and bad input."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from blendrag.planning import measure
from cli.commands import QUESTION, ask, invoke, refused, said, start


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "LENGTHS", (64, 128))
    monkeypatch.setattr(measure, "QUESTIONS", (8,))
    monkeypatch.setattr(measure, "ROUNDS", 1)


def profiles(store: Path) -> list[Path]:
    return list(Path(store, "verified").glob("*.profiles.json*"))


@pytest.mark.slow
def test_a_profile_is_printed_and_kept_and_ask_uses_it(store: Path) -> None:
    before = ask(store, "--ratio", "auto")["metrics"]
    assert before["predicted_ttft_s"] is None
    assert any("blendrag profile" in note for note in before["notes"])
    first = invoke("profile", "--store", str(store))
    assert first.exit_code == 0, first.stderr
    for word in ("prefill: 64 tokens", "layers by rows", "memory: ", "disk: ", "GB/s"):
        assert word in first.stdout
    after = ask(store, "--ratio", "auto")["metrics"]
    assert after["predicted_ttft_s"] > 0
    assert after["decision"]
    assert not [note for note in after["notes"] if "blendrag profile" in note]
    shown = invoke("ask", QUESTION, "--store", str(store), "--ratio", "auto").stderr
    assert " predicted (loading " in shown
    assert "\ndecision: " in shown
    second = invoke("profile", "--store", str(store))
    assert "this is the kept profile" in said(second)
    assert second.stdout == first.stdout


def test_a_profile_of_another_machine_is_measured_again_with_a_note(store: Path) -> None:
    assert invoke("profile", "--store", str(store)).exit_code == 0
    (path,) = profiles(store)
    kept = json.loads(path.read_text())
    kept["profiles"][0]["conditions"]["machine"] = "another (64 cores)"
    path.write_text(json.dumps(kept))
    result = invoke("profile", "--store", str(store), "--json")
    assert said(result) == (
        "note: the kept profile is of machine another (64 cores), so this machine was measured now"
    )
    assert json.loads(result.stdout)["is_new"]


def test_a_note_says_when_a_cold_disk_could_not_be_timed(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for share, noted in ((0.5, True), (0.0, False)):
        monkeypatch.setattr("blendrag.planning.tier_times.cached_share", lambda files, s=share: s)
        result = invoke("profile", "--store", str(store), "--again", "--json")
        assert json.loads(result.stdout)["is_new"]
        assert ("reading from a cold disk was not timed" in result.stderr) == noted


def test_a_store_that_cannot_be_written_is_measured_without_its_disk(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = os.access
    monkeypatch.setattr(
        os,
        "access",
        lambda path, mode: access(path, mode) and not (str(path) == str(store) and mode & os.W_OK),
    )
    picture = tmp_path / "latencies.png"
    result = invoke("profile", "--store", str(store), "--plot", str(picture))
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
    args = ("profile", "--store", str(store), "--dir", str(tmp_path), "--policy", "random")
    result = invoke(*args)
    assert result.exit_code == 0, result.stderr
    assert "cheapest that adds no latency: EBS" in result.stdout
    assert f"{tmp_path}: " in result.stdout  # --dir was timed
    assert not list(tmp_path.glob(".profile-*"))
    rated = json.loads(invoke(*args, "--json").stdout)["storage"]["rated"]
    assert len(rated) == 3
    assert {"device", "ttft_s", "waiting_s", "hides", "cost_per_month"} == set(rated[0])


@pytest.mark.slow
def test_ctrl_c_ends_the_command_and_keeps_nothing(store: Path) -> None:
    every_step = "import blendrag.cli.progress as p; p.LINE_EVERY_S = 0.0"
    process = start("profile", "--store", str(store), before=every_step)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if "over " in line:  # prefills are timed
                break
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "interrupted: nothing was kept" in rest
    assert not profiles(store)
    assert not list(store.glob(".profile-*"))


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
    assert words in refused("profile", "--store", str(store), *more)


def test_a_plot_without_matplotlib_says_what_to_install(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "blendrag[plots]" in refused("profile", "--store", str(store), "--plot", "p.png")


def test_a_model_that_cannot_be_blended_is_refused(refused_dir: Path, tmp_path: Path) -> None:
    args = ("profile", "--model", str(refused_dir), "--store", str(tmp_path / "s"))
    assert "use mode full" in refused(*args, status=3)
