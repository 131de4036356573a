"""The answer bench: every way answers the same prompt, and which is fastest for how many tokens."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag_lab.bench.answer import (
    LLAMA_CPP,
    STOCK,
    AnswerTimes,
    answer,
    answer_figure,
    answer_rows,
    answer_table,
    fastest_ranges,
)
from blendrag_lab.bench.workload import Workload
from blendrag_lab.plots import write_png
from cli.commands import refused
from lab.tests.bench.small import SMALL, timed

WORKLOAD = Workload(2, 64, 16, 0.3, rounds=2)


class FakeLlama:
    """Notes what llama.cpp is given."""

    made: list[FakeLlama]
    vocab = 3072

    def __init__(self, **given: Any) -> None:
        self.given, self.closed = given, False
        self.evaluated: list[int] = []
        type(self).made.append(self)

    def n_vocab(self) -> int:
        return self.vocab

    def reset(self) -> None:
        self.evaluated = []

    def eval(self, ids: list[int]) -> None:
        self.evaluated.append(len(ids))

    def sample(self, temp: float) -> int:
        assert temp == 0.0
        return 7

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> type[FakeLlama]:
    class Llama(FakeLlama):
        made: list[FakeLlama] = []  # noqa: RUF012

    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(Llama=Llama))
    return Llama


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    return path


def test_every_way_gives_the_first_and_the_last_token(llama, gguf, tmp_path):
    found = answer(timed(), WORKLOAD, new_tokens=4, decode_weights="native", gguf=gguf)
    rows = {row.way: row for row in found.rows}
    assert list(rows) == [
        "blendrag, full", "blendrag, blend, r = 0.3", "blendrag, reuse", STOCK, LLAMA_CPP
    ]  # fmt: skip
    assert all(row.last_ms.median >= row.first_ms.median for row in rows.values())
    assert (found.prompt_tokens > 128, found.new_tokens, found.gguf) == (True, 4, "model.gguf")
    (made,) = llama.made
    assert made.evaluated == [found.prompt_tokens, 1, 1, 1]
    assert made.given["flash_attn"]
    assert made.closed
    shown = answer_table(found)
    assert [line[0] for line in shown.rows] == [
        *(f"{way}, native weights" for way in list(rows)[:3]), STOCK, LLAMA_CPP
    ]  # fmt: skip
    assert "model.gguf in llama.cpp" in shown.title
    write_png(answer_figure(found), tmp_path / "answer.png")
    assert (tmp_path / "answer.png").read_bytes().startswith(b"\x89PNG")


def test_the_fastest_way_depends_on_the_number_of_tokens():
    samples = {
        STOCK: [AnswerTimes(10.0, 10.0 + 63 * 0.1)],
        "blend": [AnswerTimes(2.0, 2.0 + 63 * 0.1)],
        LLAMA_CPP: [AnswerTimes(12.0, 12.0 + 63 * 0.05)],
    }
    rows = {row.way: row for row in answer_rows(samples, 64, 1000)}
    assert (rows[STOCK].fastest_from, rows[STOCK].fastest_to) == (None, None)
    # 2 + .1 (n - 1) = 12 + .05 (n - 1) at n = 201
    assert (rows["blend"].fastest_from, rows["blend"].fastest_to) == (1, 201)
    assert (rows[LLAMA_CPP].fastest_from, rows[LLAMA_CPP].fastest_to) == (202, None)
    assert rows["blend"].token_ms == pytest.approx(100)


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 9)), min_size=1, max_size=5),
    st.integers(1, 60),
)
def test_ranges_name_the_fastest_way_for_every_number(lines, most):
    named = {str(number): (float(first), float(step)) for number, (first, step) in enumerate(lines)}
    ranges = fastest_ranges(named, most)
    for tokens in range(1, most + 1):
        (way,) = [
            name for name, (first, last) in ranges.items() if first <= tokens <= (last or most)
        ]
        times = {name: first + (tokens - 1) * step for name, (first, step) in named.items()}
        assert times[way] == min(times.values())


def test_modes_of_the_engine_decode_alike_in_the_ranges():
    samples = {
        "blendrag, blend, r = 0.3": [AnswerTimes(1.0, 1.0 + 63 * 0.099)],
        "blendrag, reuse": [AnswerTimes(0.5, 0.5 + 63 * 0.1)],
    }
    rows = {row.way: row for row in answer_rows(samples, 64, 1000)}
    assert rows["blendrag, reuse"].fastest_from == 1
    assert rows["blendrag, blend, r = 0.3"].fastest_from is None


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            ("--decode-weights", "int2"),
            "decode_weights 'int2' must be one of auto, native, int8, int4",
        ),
        (("--tier", "cold"), "tier 'cold' is not one of memory, disk"),
        (("--gguf", "nowhere.gguf"), "--gguf needs llama-cpp-python, which is not installed"),
    ],
)
def test_bad_input(monkeypatch, given, sentence):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    assert sentence in refused("bench", "answer", *SMALL, *given)


def test_a_file_that_is_not_of_the_model(llama, gguf, tmp_path):
    missing = refused("bench", "answer", *SMALL, "--gguf", str(tmp_path / "missing.gguf"))
    assert "missing.gguf is not a file" in missing
    llama.vocab = 5
    assert "expected a file of the same model" in refused(
        "bench", "answer", *SMALL, "--gguf", str(gguf)
    )
