"""``blendrag calibrate``: what it prints, how ``ask`` uses the schedule found, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from blendrag.cli.progress import StatusLine
from cli.commands import ask, invoke, refused

FEW = ("--samples", "2", "--top-k", "3", "--minutes", "0.3", "--ratio", "0.2", "--policy", "query")


@pytest.mark.slow
def test_the_schedule_found_is_printed_kept_and_used(store: Path) -> None:
    result = invoke("calibrate", "--store", store, *FEW, "--json")
    assert result.exit_code == 0, result.stderr
    assert "used only with --schedule calibrated" in result.stderr
    found = json.loads(result.stdout)
    assert found["policy"] == "query"
    assert found["prompts"] == 2
    assert found["deviation"] <= min(found["families"].values())
    assert sum(found["weights"]) / len(found["weights"]) == pytest.approx(0.2)
    asked = ask(store, "--policy", "query", "--ratio", "0.2", "--schedule", "calibrated")
    ran = asked["metrics"]["schedule"]
    assert ran == "calibrated:" + ",".join(f"{weight:g}" for weight in found["weights"])


def test_the_table_names_schedules_the_source_of_the_questions_and_the_time_limit(
    store: Path, tmp_path: Path
) -> None:
    questions = tmp_path / "questions.txt"
    questions.write_text("What is the topic of document 1?\n\nWhere is the windmill?\n")
    given = ("--questions", str(questions), "--minutes", "0.0001")
    result = invoke("calibrate", "--store", store, *FEW, *given)
    assert "on 2 prompts (questions given)" in result.stdout
    assert "constant: " in result.stdout
    assert "the search stopped after 0.0001 minutes; allow more with --minutes" in result.stderr
    assert "--schedule calibrated;" not in result.stderr


def test_an_interrupted_search_keeps_the_best_so_far(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def impatient(line: StatusLine, text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(StatusLine, "show", impatient)
    result = invoke("calibrate", "--store", store, *FEW, "--json")
    assert result.exit_code == 130
    assert "the best schedule so far is kept" in result.stderr.splitlines()[-1]
    assert json.loads(result.stdout)["tried"] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--policy", "boundary(3)"), "follows no schedule"),
        (("--ratio", "1.0"), "ratio 1.0"),
        (("--minutes", "0"), "minutes is 0"),
        (("--questions", "nowhere.txt"), "cannot be read"),
        (("--model", "demo"), "ingest first"),
    ],
)
def test_bad_input_is_one_sentence_before_anything_is_loaded(
    tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    assert words in refused("calibrate", "--store", tmp_path / "none", *arguments)
    assert not (tmp_path / "none").exists()
