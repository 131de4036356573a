"""Finding known chunks in a prompt: what is measured, and that a wrong search ends the bench."""

from __future__ import annotations

import pytest

from blendrag.lab.bench.recognise import recognise, recognise_table
from blendrag.lab.bench.rounds import MeasuredNothingError
from blendrag.text.recognition import ChunkIndex


def test_both_corpora_are_searched_for_whole_chunks_cut_ones_and_none() -> None:
    result = recognise(60, 9000, 2)
    assert [row.way for row in result.rows] == [
        f"{corpus}: {prompt}"
        for corpus in ("distinct", "first 200 shared")
        for prompt in ("whole chunks", "chunks cut off", "no chunks")
    ]
    assert all(min(load.add_s, load.load_s, load.follow_s) > 0 for load in result.loads)
    table = recognise_table(result)
    assert table.title == "60 chunks, prompts of 9,000 characters, 2 rounds"
    assert [row[0] for row in table.rows] == [row.way for row in result.rows]
    assert "followed a change in" in table.notes[0]


def test_a_search_that_misses_a_chunk_ends_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    find = ChunkIndex.find
    monkeypatch.setattr(ChunkIndex, "find", lambda index, prompt: find(index, prompt)[:-1])
    with pytest.raises(MeasuredNothingError, match=r"chunks (found|loaded)"):
        recognise(60, 9000, 1)
