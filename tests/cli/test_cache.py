"""``blendrag cache``: what is kept outside of stores, and its removal."""

from __future__ import annotations

from pathlib import Path

import pytest

from blendrag.model import measurements
from cli.commands import invoke, printed


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory with something of each kind."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("BLENDRAG_CACHE", str(folder))
    for name, size in {
        "decode-weights/m-int8-1-f.safetensors": 3000,
        "gguf/m-1-2-3/model.safetensors": 2000,
        "gguf/m.lock": 0,
        "verdicts/cache.db": 100,
        "eval-a1b2.jsonl": 50,
        "notes/mine.txt": 7,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x" * size)
    return folder


def sizes() -> dict[str, int]:
    return {each["kind"]: each["size_bytes"] for each in printed("cache")["kinds"]}


def test_what_is_kept_is_shown_by_kind(folder: Path) -> None:
    kinds = {"verdicts": 100, "decode-weights": 3000, "gguf": 2000, "runs": 50, "other": 7}
    assert sizes() == kinds
    assert printed("cache", "list") == printed("cache")
    first, *lines = invoke("cache").stdout.splitlines()
    assert first == f"{folder}: 5.0 KiB"
    assert [line.split(":")[0].strip() for line in lines] == [*kinds]
    assert "gguf: 2.0 KiB, 2 files; unpacked GGUF files" in lines[2]


def test_one_kind_or_all_known_ones_are_removed(folder: Path) -> None:
    (folder / "decode-weights" / "link").symlink_to(folder / "notes", target_is_directory=True)
    assert printed("cache", "clear", "--only", "decode-weights", "--yes")["removed_bytes"] == 3000
    assert sizes().keys() == {"verdicts", "gguf", "runs", "other"}
    assert invoke("cache", "clear", "--yes").stdout == "4 files removed, 2.1 KiB\n"
    assert sizes() == {"other": 7}
    assert (folder / "notes" / "mine.txt").exists()
    assert invoke("cache", "clear").stdout == "0 files removed, 0 bytes\n"  # asks nothing


def test_removal_asks_first(folder: Path) -> None:
    wrong = invoke("cache", "clear", "--only", "run").stderr
    assert "'--only': 'run' must be one of verdicts, decode-weights, gguf, runs\n" in wrong
    unasked = invoke("cache", "clear", "--only", "runs")
    assert unasked.exit_code == 2
    assert f"removing runs, 50 bytes, of {folder} needs confirmation" in unasked.stderr
    declined = invoke("cache", "clear", stdin="n\n")
    assert declined.exit_code == 1
    assert declined.stderr.endswith("note: nothing was removed\n")
    assert sizes()["runs"] == 50


def test_there_may_be_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLENDRAG_CACHE", str(tmp_path / "none"))
    assert printed("cache") == {"directory": str(tmp_path / "none"), "kinds": []}


def test_what_was_measured_is_a_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLENDRAG_CACHE", str(tmp_path))
    invoke("cache")
    measurements.remember("rows", 3)
    assert sizes().keys() == {"verdicts"}
