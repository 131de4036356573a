"""``blendrag calibrate``: what it prints, how ``ask`` uses what was found, and bad input."""

from __future__ import annotations

import json
from operator import itemgetter
from pathlib import Path

import pytest

from blendrag.cli.calibrate import _questions
from blendrag.cli.progress import StatusLine
from blendrag.config import DEFAULT_POLICY
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
    assert found["policy"] in (found["candidate"], DEFAULT_POLICY)
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


@pytest.mark.parametrize("form", ["a line each", "lines of JSON", "a list of records"])
def test_questions_are_lines_or_the_questions_of_records(tmp_path: Path, form: str) -> None:
    records = [{"question": f" Where is windmill {n}? ", "answers": ["here"]} for n in range(3)]
    file = tmp_path / "questions"
    if form == "a list of records":
        text = json.dumps(records, indent=1)
    else:
        line = json.dumps if form == "lines of JSON" else itemgetter("question")
        text = "\n\n".join(map(line, records))
    file.write_text(f"\ufeff\n{text}\n", encoding="utf-8")
    assert _questions(file) == tuple(f"Where is windmill {n}?" for n in range(3))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('\n{"question": "Where?"}\n{"question"', "line 3 of --questions"),
        ('[{"question": "Where?"}, "What?"]', "record 2 of --questions"),
        ('{"answers": ["red"]}', "record 1 of --questions"),
        ('{"question": "  "}', "record 1 of --questions"),
        ("[Draft] Where?", "is not JSON"),
    ],
)
def test_records_without_a_question_are_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(text)
    told = refused("calibrate", "--store", tmp_path / "none", "--questions", str(file))
    assert words in told
    assert told.endswith("expected one question a line, or JSON records of {question, …}")


def test_undo_says_that_unfinished_measurements_are_removed(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def impatient(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StatusLine, "show", impatient)
        begun = invoke("calibrate", "--store", store, *FEW)
    assert begun.stdout.startswith("1 prompt was measured and nothing was chosen yet")
    undone = invoke("calibrate", "--store", store, "--undo")
    assert undone.stdout == (
        "nothing was calibrated yet for this model; 1 measured prompt of an unfinished calibration removed\n"
    )
    undone = invoke("calibrate", "--store", store, "--undo")
    assert undone.stdout == "nothing was calibrated for this model\n"


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
