"""``blendrag profile``: what it prints and keeps, what ``ask`` makes of it, and bad input."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from blendrag.planning import measure, prefills
from cli.commands import invoke, said, start

DEVICES = """
[[devices]]
name = "dear"
throughput = "10 GB/s"
price_per_gb_month = 0.5
[[devices]]
name = "cheap"
throughput = "9 GB/s"
price_per_gb_month = 0.1
[[devices]]
name = "tape"
throughput = 10
price_per_gb_month = 0.001
"""


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "LENGTHS", (64, 128))
    monkeypatch.setattr(prefills, "QUESTIONS", (8,))
    monkeypatch.setattr(measure, "ROUNDS", 1)


@pytest.fixture
def store(ingested: Path, tmp_path: Path) -> str:
    return str(shutil.copytree(ingested, tmp_path / "store"))


@pytest.fixture
def devices(tmp_path: Path) -> str:
    path = tmp_path / "devices.toml"
    path.write_text(DEVICES)
    return str(path)


def test_figures_are_printed_and_kept_and_ask_goes_by_them(store: str) -> None:
    ask = (
        "ask",
        "What is the topic?",
        "--store",
        store,
        "--ratio",
        "auto",
        "--max-new-tokens",
        "2",
    )
    before = json.loads(invoke(*ask, "--json").stdout)["metrics"]
    assert before["predicted_ttft_s"] is None
    assert any("blendrag profile --model" in note for note in before["notes"])
    first = invoke("profile", "--store", store)
    assert first.exit_code == 0, first.stderr
    for word in ("prefill: 64 tokens", "layers by rows", "memory: ", "disk: ", "GB/s"):
        assert word in first.stdout
    after = json.loads(invoke(*ask, "--json").stdout)["metrics"]
    assert after["predicted_ttft_s"] > 0
    assert after["decision"]
    assert not [note for note in after["notes"] if "blendrag profile" in note]
    shown = invoke(*ask).stderr
    assert " predicted (loading " in shown
    assert "\ndecision: " in shown
    second = invoke("profile", "--store", store)
    assert "kept profile" in said(second)
    assert second.stdout == first.stdout
    again = json.loads(invoke("profile", "--store", store, "--again", "--json").stdout)
    assert again["is_new"]
    assert again["kept"]
    assert again["profile"]["conditions"]["threads"] >= 1


def test_a_profile_of_another_machine_is_replaced_with_one_line(store: str) -> None:
    assert invoke("profile", "--store", store).exit_code == 0
    (path,) = Path(store, "verified").glob("*.profiles.json")
    kept = json.loads(path.read_text())
    kept["profiles"][0]["conditions"]["machine"] = "another (64 cores)"
    path.write_text(json.dumps(kept))
    result = invoke("profile", "--store", store, "--json")
    assert said(result) == (
        "note: the kept profile is of machine another (64 cores), so this machine was measured now"
    )
    assert json.loads(result.stdout)["is_new"]


def test_a_profile_of_an_earlier_form_is_named_and_left_there(store: str) -> None:
    assert invoke("profile", "--store", store).exit_code == 0
    (path,) = Path(store, "verified").glob("*.profiles.json")
    kept = json.loads(path.read_text())
    kept["profiles"][0]["version"] -= 1
    path.write_text(json.dumps(kept))
    result = invoke("profile", "--store", store)
    assert said(result) == (
        "note: the kept profile is of a form that this version cannot read, so this machine was "
        "measured now"
    )
    assert json.loads(path.read_text())["profiles"][0] == kept["profiles"][0]


def test_a_store_of_another_model_is_refused_before_anything_is_measured(
    store: str, other_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure.Measure, "profile", None)
    result = invoke("profile", "--store", store, "--model", str(other_model_dir))
    assert result.exit_code == 2
    assert "was ingested with model" in said(result)


def test_a_system_that_keeps_files_in_memory_is_told_of(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "reading from a cold disk was not timed"
    for share, is_said in ((0.5, True), (0.0, False)):
        monkeypatch.setattr("blendrag.planning.page_cache.cached_share", lambda files, s=share: s)
        result = invoke("profile", "--store", store, "--again")
        assert result.exit_code == 0, result.stderr
        assert (said in " ".join(result.stderr.split())) == is_said


def test_a_store_that_cannot_be_written_is_measured_without_its_disk(
    store: str, devices: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = os.access
    monkeypatch.setattr(
        os,
        "access",
        lambda path, mode: access(path, mode) and not (str(path) == store and mode & os.W_OK),
    )
    picture = tmp_path / "latencies.png"
    result = invoke("profile", "--store", store, "--devices", devices, "--plot", str(picture))
    assert result.exit_code == 0, result.stderr
    assert (
        "note: the store cannot be written, so reading from its disk was not timed and the profile was not "
        "kept; ratio=auto uses the profile kept before, if any"
    ) in result.stderr
    assert "  memory: " in result.stdout
    assert "  disk: " not in result.stdout
    assert "cheap: first token after" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not list(Path(store, "verified").glob("*.profiles.json"))


def test_the_cheapest_device_that_adds_no_latency_is_named(store: str, devices: str) -> None:
    result = invoke("profile", "--store", store, "--devices", devices, "--policy", "random")
    assert result.exit_code == 0, result.stderr
    assert "cheapest that adds no latency: cheap" in result.stdout
    assert "tape: " in result.stdout
    fields = json.loads(invoke("profile", "--store", store, "--devices", devices, "--json").stdout)
    assert [each["device"]["name"] for each in fields["storage"]["rated"]] == [
        "dear",
        "cheap",
        "tape",
    ]
    assert [each["hides"] for each in fields["storage"]["rated"]][2] is False


def test_a_directory_is_timed_too(store: str, tmp_path: Path) -> None:
    result = invoke("profile", "--store", store, "--dir", str(tmp_path))
    assert result.exit_code == 0, result.stderr
    assert f"{tmp_path}: " in result.stdout
    assert not list(tmp_path.glob(".profile-*"))


def test_the_plot_is_a_png(store: str, tmp_path: Path) -> None:
    picture = tmp_path / "latencies.png"
    assert invoke("profile", "--store", store, "--plot", str(picture)).exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_interrupted_it_keeps_nothing_and_says_so(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measure.Measure, "_in_rounds", interrupt)
    result = invoke("profile", "--store", store)
    assert result.exit_code == 130
    assert "nothing was kept" in said(result)
    assert not list(Path(store, "verified").glob("*.profiles.json"))


def test_ctrl_c_while_prefills_are_timed_ends_the_command_and_keeps_nothing(store: str) -> None:
    every_step = "import blendrag.cli.progress as p; p.LINE_EVERY_S = 0.0"
    process = start("profile", "--store", store, before=every_step)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if "over " in line:  # in the rounds
                break
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "interrupted: nothing was kept" in rest
    assert not list(Path(store, "verified").glob("*.profiles.json*"))
    assert not list(Path(store).glob(".profile-*"))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--dir", "no/such/place"), "is no directory"),
        (("--devices", "no-such-list.json"), "cannot be read"),
        (("--plot", "picture.jpg"), "ends in .png"),
        (("--plot", "no/such/place/p.png"), "directory that exists"),
        (("--policy", "magic"), "policy 'magic' is not one of"),
    ],
)
def test_bad_input_is_refused_in_a_sentence_before_anything_is_measured(
    store: str, more: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure.Measure, "profile", None)
    result = invoke("profile", "--store", store, *more)
    assert result.exit_code == 2
    assert says in said(result)


def test_devices_that_make_no_sense_are_refused(store: str, tmp_path: Path) -> None:
    path = tmp_path / "devices.json"
    path.write_text('[{"name": "a", "throughput": "fast", "price_per_gb_month": 1}]')
    result = invoke("profile", "--store", store, "--devices", str(path))
    assert result.exit_code == 2
    assert "throughput 'fast'" in said(result)


def test_without_matplotlib_the_plot_is_refused(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = invoke("profile", "--store", store, "--plot", str(tmp_path / "p.png"))
    assert result.exit_code == 2
    assert "blendrag[plots]" in said(result)


@pytest.mark.parametrize(
    ("name", "value"),
    [("BLENDRAG_RATIO", "1.5"), ("BLENDRAG_RATIO", "automatic"), ("BLENDRAG_MIN_RATIO", "auto")],
)
def test_a_ratio_of_the_environment_that_is_none_is_named_as_it_is_spelled(
    store: str, name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    result = invoke("ask", "Who?", "--store", store)
    assert result.exit_code == 2
    assert said(result).startswith(f"error: {name}={value} cannot be used (Input should be ")
    assert ("'auto'" in said(result)) == (name == "BLENDRAG_RATIO")


@pytest.mark.parametrize("ratio", ["1.5", "-0.1", "nan", "automatic", ""])
def test_ask_refuses_a_ratio_that_is_none(store: str, ratio: str) -> None:
    result = invoke("ask", "Who?", "--store", store, "--ratio", ratio)
    assert result.exit_code == 2
    assert "auto" in result.stderr


def test_a_model_that_cannot_be_blended_is_refused(refused_dir: Path, tmp_path: Path) -> None:
    result = invoke("profile", "--model", str(refused_dir), "--store", str(tmp_path / "s"))
    assert result.exit_code == 3
    assert "use mode full" in said(result)
