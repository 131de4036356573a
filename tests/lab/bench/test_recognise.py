"""The benchmark of recognition: every way finds what stands there, and would say if it did not."""

from __future__ import annotations

from typing import Any

import pytest

from blendrag.lab.bench.recognise import RecogniseWorkload, run_recognise
from blendrag.lab.bench.store_rounds import MeasuredNothingError
from blendrag.text.matches import Match
from blendrag.text.recognition import ChunkIndex
from cli.commands import invoke
from lab.bench.lab import measured

SMALL = ("--chunks", "60", "--prompt-chars", "9000", "--rounds", "2")


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return measured("recognise", *SMALL)


def test_both_corpora_are_searched_for_whole_chunks_cut_ones_and_none(
    result: dict[str, Any],
) -> None:
    names = [row["way"] for row in result["rows"]]
    assert names == [
        f"{corpus}: {prompt}"
        for corpus in ("distinct", "first 200 shared")
        for prompt in ("whole chunks", "chunks cut off", "no chunks")
    ]
    for row, cpu_ms in zip(result["rows"], result["cpu_ms"], strict=True):
        assert 0 < row["low_ms"] <= row["ms"] <= row["high_ms"]
        assert 0 < cpu_ms <= row["high_ms"]


def test_loading_and_following_a_change_are_measured(result: dict[str, Any]) -> None:
    for load in result["loads"]:
        assert load["chunks"] == 60
        assert load["add_s"] > 0
        assert load["load_s"] > 0
        assert load["follow_s"] > 0


def test_a_table_is_printed() -> None:
    printed = invoke("bench", "recognise", *SMALL)
    assert printed.exit_code == 0
    assert "chunks cut off" in printed.stdout


def test_a_search_that_finds_nothing_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_less(index: ChunkIndex, prompt: str) -> list[Match]:
        return find(index, prompt)[:-1]

    find = ChunkIndex.find
    run_recognise(RecogniseWorkload(60, 9000, 1))
    monkeypatch.setattr(ChunkIndex, "find", one_less)
    with pytest.raises(MeasuredNothingError, match=r"chunks (found|loaded)"):
        run_recognise(RecogniseWorkload(60, 9000, 1))
