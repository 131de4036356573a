"""``blendrag calibrate``: what it prints, how ``ask`` uses what was found, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from blendrag.cli.progress import StatusLine
from cli.commands import ask, invoke, refused

FEW = ("--samples", "10", "--top-k", "3", "--ratio", "0.2")


@pytest.mark.slow
def test_what_was_found_is_printed_kept_and_used(store: Path) -> None:
    result = invoke("calibrate", "--store", store, *FEW, "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert len(report["rows"]) == 9  # as many as the corpus has chunks
    assert [found["ratio"] for found in report["ratios"]] == [0.0, 0.05, 0.15, 0.2]
    found = report["ratios"][-1]
    assert found["policy"] in (found["candidate"], "query")
    ran = ask(store, "--ratio", "0.2")["metrics"]["policy"]
    assert ran.partition("(")[0] == found["policy"].partition("(")[0]
    chosen = report["calibration"]["ratio"]
    assert ask(store)["metrics"]["ratio"] == pytest.approx(chosen, abs=0.02)
    undone = invoke("calibrate", "--store", store, "--undo")
    assert (undone.exit_code, undone.stdout) == (0, "what was calibrated is forgotten\n")
    assert ask(store)["metrics"]["ratio"] == pytest.approx(0.3, abs=0.02)
    undone = invoke("calibrate", "--store", store, "--undo")
    assert undone.stdout == "nothing was calibrated for this model\n"


def test_too_few_questions_are_refused(store: Path, tmp_path: Path) -> None:
    questions = tmp_path / "questions.txt"
    questions.write_text("What is the topic of document 1?\n\nWhere is the windmill?\n")
    words = refused("calibrate", "--store", store, *FEW, "--questions", str(questions))
    assert "there are 2 prompts to calibrate on, expected 7 or more" in words


def test_an_interrupted_calibration_says_what_was_used(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def impatient(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(StatusLine, "show", impatient)
    result = invoke("calibrate", "--store", store, *FEW, "--json")
    assert result.exit_code == 130
    assert "the prompts measured so far were used" in result.stderr.splitlines()[-1]
    assert len(json.loads(result.stdout)["rows"]) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--ratio", "1.0"), "ratio 1.0"),
        (("--ratio", "0"), "ratio 0 leaves nothing to compare"),
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
