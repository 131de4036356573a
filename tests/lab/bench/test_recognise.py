"""Finding known chunks in a prompt: what is measured, and that a wrong search ends the bench."""

from __future__ import annotations

import pytest

from blendrag.lab.bench.recognise import RecogniseWorkload, recognise
from blendrag.lab.bench.rounds import MeasuredNothingError
from blendrag.text.recognition import ChunkIndex
from cli.commands import invoke
from lab.bench.small import measured

SMALL = ("--chunks", "60", "--prompt-chars", "9000", "--rounds", "2")


def test_both_corpora_are_searched_for_whole_chunks_cut_ones_and_none() -> None:
    result = measured("recognise", *SMALL)
    assert [row["way"] for row in result["rows"]] == [
        f"{corpus}: {prompt}"
        for corpus in ("distinct", "first 200 shared")
        for prompt in ("whole chunks", "chunks cut off", "no chunks")
    ]
    for row, cpu_ms in zip(result["rows"], result["cpu_ms"], strict=True):
        assert 0 < row["low_ms"] <= row["ms"] <= row["high_ms"]
        assert 0 < cpu_ms <= row["high_ms"]
    for load in result["loads"]:
        assert load["chunks"] == 60
        assert min(load["add_s"], load["load_s"], load["follow_s"]) > 0


def test_without_json_a_table_is_printed() -> None:
    shown = invoke("bench", "recognise", *SMALL)
    assert shown.exit_code == 0
    for text in (
        "60 chunks, prompts of 9,000 characters, 2 rounds",
        "CPU ms",
        "distinct: chunks cut off",
    ):
        assert text in shown.stdout
    assert "followed a change in" in " ".join(shown.stdout.split())


def test_a_search_that_misses_a_chunk_ends_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    find = ChunkIndex.find
    monkeypatch.setattr(ChunkIndex, "find", lambda index, prompt: find(index, prompt)[:-1])
    with pytest.raises(MeasuredNothingError, match=r"chunks (found|loaded)"):
        recognise(RecogniseWorkload(60, 9000, 1))
