"""``blendrag calibrate``: what it prints, what ``ask`` does with it, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from blendrag.cli import progress
from blendrag.cli.ask import say_metrics
from blendrag.metrics import RequestMetrics
from cli.commands import ingest_args, invoke, said

FEW = ("--samples", "2", "--top-k", "3", "--minutes", "0.3", "--ratio", "0.2", "--policy", "query")


@pytest.fixture
def store(model_dir: Path, docs: Path, tmp_path: Path) -> str:
    assert invoke(*ingest_args(docs, model_dir, tmp_path / "store")).exit_code == 0
    return str(tmp_path / "store")


def test_what_was_found_is_printed_kept_and_used(store: str) -> None:
    result = invoke("calibrate", "--store", store, *FEW, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["policy"] == "query"
    assert found["prompts"] == 2
    assert found["deviation"] <= min(found["families"].values())
    assert sum(found["weights"]) / len(found["weights"]) == pytest.approx(0.2)
    asked = invoke(
        "ask", "What is the topic?", "--store", store, "--policy", "query", "--ratio", "0.2",
        "--schedule", "calibrated", "--max-new-tokens", "2", "--json",
    )  # fmt: skip
    ran = json.loads(asked.stdout)["metrics"]["schedule"]
    weights = ",".join(f"{weight:g}" for weight in found["weights"])
    assert ran == f"calibrated:{weights}"


def test_in_words_an_answer_names_the_schedule_that_ran(ingested: Path) -> None:
    ask = ("ask", "What is the topic?", "--store", str(ingested), "--max-new-tokens", "2")
    for asked in ("first:2", "0.4,0.2"):
        shown = said(invoke(*ask, "--policy", "query", "--schedule", asked))
        assert shown.endswith(f"mode blend, query at ratio 0.15, schedule {asked}")
    for more in (("--policy", "boundary(3)"), ("--mode", "reuse")):  # follow none
        assert "schedule" not in said(invoke(*ask, *more))


def test_a_long_schedule_is_named_by_its_beginning(capsys: pytest.CaptureFixture[str]) -> None:
    long = "calibrated:" + ",".join(["0.123"] * 40)
    counts = (0,) * 5
    say_metrics(
        RequestMetrics("blend", 0.0, 0.0, 0.0, *counts, 0.1, 0.1, policy="query", schedule=long)
    )
    shown = capsys.readouterr().err
    assert "schedule calibrated:0.123,0.123," in shown
    assert shown.endswith("0.123,…\n")
    assert len(shown) < 300


def test_the_table_names_families_and_where_the_questions_came_from(
    store: str, tmp_path: Path
) -> None:
    result = invoke("calibrate", "--store", store, *FEW)
    assert "first sentences of chunks" in result.stdout
    assert "constant: " in result.stdout
    assert "used only with --schedule calibrated" in " ".join(result.stderr.split())
    questions = tmp_path / "questions.txt"
    questions.write_text("What is the topic of document 1?\n\nWhere is the windmill?\n")
    shown = invoke("calibrate", "--store", store, *FEW, "--questions", str(questions)).stdout
    assert "on 2 prompts (questions given)" in shown


def test_where_nothing_recomputed_is_as_good_it_says_so(store: str) -> None:
    result = invoke("calibrate", "--store", store, *FEW, "--ratio", "0.0001", "--json")
    assert result.exit_code == 0, result.stderr
    assert "recomputing nothing scores as well on these 2 prompts" in result.stderr
    assert json.loads(result.stdout)["gain"] == 0.0


def test_interrupted_it_says_that_the_best_so_far_is_kept(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Impatient(progress.SearchProgress):
        def __call__(self, step: object) -> None:
            super().__call__(step)  # type: ignore[arg-type]
            raise KeyboardInterrupt

    monkeypatch.setattr(progress, "SearchProgress", Impatient)
    result = invoke("calibrate", "--store", store, *FEW, "--json")
    assert result.exit_code == 130
    assert "the best schedule so far is kept" in result.stderr.splitlines()[-1]
    assert json.loads(result.stdout)["tried"] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--policy", "boundary(3)"), "follows no schedule"),
        (("--policy", "best"), "is not one of"),
        (("--ratio", "1.0"), "ratio 1.0"),
        (("--minutes", "0"), "minutes is 0"),
        (("--questions", "nowhere.txt"), "cannot be read"),
    ],
)
def test_bad_input_is_one_sentence_before_anything_is_loaded(
    tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    result = invoke("calibrate", "--store", str(tmp_path / "none"), *arguments)
    assert result.exit_code == 2
    assert words in said(result)


def test_no_corpus_is_one_sentence(tmp_path: Path) -> None:
    result = invoke("calibrate", "--model", "demo", "--store", str(tmp_path / "none"), *FEW)
    assert result.exit_code == 2
    assert "ingest first" in said(result)
    assert not (tmp_path / "none").exists()
