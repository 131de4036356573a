"""docs/quality.md: written from kept results alone; its figures, standings and commands."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer
from pydantic import TypeAdapter

import tiny
from blendrag.cli.app import app
from blendrag.config import DEFAULT_POLICY
from blendrag.errors import BlendragError, InvalidInputError
from blendrag_lab.evaluation import deviation
from blendrag_lab.evaluation.deviation import DeviationReport
from blendrag_lab.evaluation.pretrained import fidelities, means_of_models, pretrained_text
from blendrag_lab.evaluation.rows import ArenaRow
from blendrag_lab.evaluation.scoring import Kept
from cli.commands import invoke_program
from lab.pages import quality_plots as plots
from lab.pages.quality_page import (
    RUNS,
    Result,
    collect,
    execute,
    load_measured,
    load_result,
    main,
)
from lab.pages.writers_page import frontiers, model_of, writer_runs, writers_text
from lab.tests.evaluation.invented import baseline, row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PUBLISHED = Path(__file__).parents[3] / "docs" / "quality.md"


def published(name: str) -> Result:
    return load_result(PUBLISHED.with_suffix("") / f"{name}.json")


def copy_page(out: Path) -> Path:
    """The page and its results without pictures; returns their folder."""
    shutil.copy(PUBLISHED, out)
    ignored = shutil.ignore_patterns("*.png")
    return Path(shutil.copytree(PUBLISHED.with_suffix(""), out / "quality", ignore=ignored))


def test_the_published_page_is_short_and_written_from_its_results(tmp_path):
    text = PUBLISHED.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    folder = copy_page(tmp_path)
    assert invoke_program(main, "--page-only", "--out", tmp_path).exit_code == 0
    assert (tmp_path / PUBLISHED.name).read_text(encoding="utf-8") == text
    drawn = list(folder.glob("*.png"))
    assert all(picture.stat().st_size > 5000 for picture in drawn)
    on_schemas = (PUBLISHED.with_suffix("") / "schemas.md").read_text(encoding="utf-8")
    assert (folder / "schemas.md").read_text(encoding="utf-8") == on_schemas
    shown = re.findall(r"\]\(quality/([a-z-]+\.png)\)", text)
    assert sorted(shown) == sorted(picture.name for picture in drawn)
    assert all((PUBLISHED.with_suffix("") / name).is_file() for name in shown)


def test_a_missing_result_is_one_sentence(tmp_path):
    ended = invoke_program(main, "--page-only", "--out", tmp_path)
    assert ended.exit_code == 2
    assert "policies.json holds no results of the arena" in ended.stderr
    (tmp_path / "x.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(InvalidInputError) as refused:
        load_result(tmp_path / "x.json")
    assert tiny.one_sentence(str(refused.value))


def curve(axes: Axes, label: str) -> tuple[Any, Any]:
    """x and y of the line with that label."""
    found: Any = next(line for line in axes.get_lines() if line.get_label() == label)
    return list(found.get_xdata()), list(found.get_ydata())


def test_quality_is_drawn_over_ratio_and_ttft():
    policies = {"full", "none", "reuse", "query", "hkvd"}
    rows = [r for r in published("policies").rows if r.policy in policies]
    hkvd = [r for r in rows if (r.policy, r.kind) == ("hkvd", "coreference")]
    panel = plots.quality_against_ratio(rows, ("all", "coreference")).axes[1]
    assert panel.get_title() == "coreference"
    assert curve(panel, "hkvd") == ([r.ratio for r in hkvd], [r.pgr for r in hkvd])
    paths: Any = (path for drawn in panel.collections for path in drawn.get_paths())
    bounds = {height for path in paths for height in path.vertices[:, 1]}
    assert bounds >= {bound for r in hkvd for bound in (r.pgr_low, r.pgr_high)}
    assert panel.get_ylim()[0] <= min(bounds) <= max(bounds) <= panel.get_ylim()[1]
    axes = plots.quality_against_ttft(rows).axes[0]
    assert set(axes.get_legend_handles_labels()[1]) == policies - {"none"}
    unknown = [row("query", ratio=0.02, pgr=None), row("query")]
    axes = plots.quality_against_ratio(unknown, ("all",)).axes[0]
    assert curve(axes, "query") == ([0.05], [0.9])


def test_chunks_schedules_and_deviations_are_drawn_as_measured():
    rows = [r for r in published("chunks").rows if (r.policy, r.kind) == ("query", "all")]
    by_count = [r for r in rows if r.chunk_tokens == 64]
    by_length = sorted((r for r in rows if r.n_chunks == 6), key=lambda r: r.chunk_tokens)
    count, length, count_ms, length_ms = plots.quality_against_chunks(rows).axes
    assert curve(count, "query") == ([r.n_chunks for r in by_count], [r.pgr for r in by_count])
    assert curve(count_ms, "query")[1] == [r.ttft_ms for r in by_count]
    assert curve(length, "query")[0] == [r.chunk_tokens for r in by_length]
    assert curve(length_ms, "query")[1] == [r.ttft_ms for r in by_length]
    rows = [r for r in published("schedules").rows if (r.policy, r.kind) == ("hkvd", "all")]
    axes = plots.quality_by_schedule(rows).axes[0]
    assert curve(axes, "hkvd") == (list(range(len(rows))), [r.pgr for r in rows])
    report = TypeAdapter(DeviationReport).validate_python(published("deviations").printed[0])
    points = [p for p in report.points if p.policy == "query"]
    axes = plots.deviation_against_ratio(report).axes[0]
    assert curve(axes, "query") == ([p.ratio for p in points], [p.attention for p in points])
    axes = plots.deviation_distribution(report).axes[0]
    assert curve(axes, "layer 11")[0] == list(report.distribution[-1].quantiles)
    bars = plots.layer_correlation(report).axes[0].patches
    assert [bar.get_height() for bar in bars] == [pair.rho for pair in report.correlation]  # type: ignore[attr-defined]


def printing(text: str) -> str:
    """A command that prints ``text``."""
    return shlex.join(("python", "-c", f"print({text!r})"))


def parsed(command: str) -> dict[str, Any]:
    _, subcommand, *arguments = shlex.split(command)
    made = typer.main.get_command(app).commands[subcommand]  # type: ignore[attr-defined]
    params: dict[str, Any] = made.make_context(subcommand, arguments).params
    return params


def test_every_command_of_the_runs_is_valid_and_calibrated_policies_come_first():
    (deviations,) = RUNS["deviations"]
    program, _, module, *arguments = deviations.split()
    assert (program, module) == ("python", deviation.__name__)
    assert invoke_program(deviation.main, *arguments, "--help").exit_code == 0
    calibration, *evaluations = [run for name, run in RUNS.items() if name != "deviations"]
    calibrated = {parsed(command)["policy"] for command in calibration[1:]}
    for given in (parsed(command) for run in evaluations for command in run):
        assert given["json"] is True
        if "calibrated" in given["schedules"]:
            assert set(given["policies"].split(",")) <= calibrated
            assert str(given["store"]) in calibration[0]


def test_a_kept_result_is_measured_again_only_if_its_commands_changed(tmp_path):
    run = {"one": [printing("[0.123456789]")]}
    said: list[str] = []
    found = collect(tmp_path, run, keep=True, say=said.append)
    assert found["one"].printed == ([0.123457],)
    collect(tmp_path, run, keep=True, say=said.append)
    assert len(said) == 1
    collect(tmp_path, run, keep=False, say=said.append)
    changed = {"one": [printing("[]")]}
    assert collect(tmp_path, changed, keep=True, say=said.append)["one"].rows == []
    assert len(said) == 3


def test_a_failing_command_is_named_in_one_sentence_and_nothing_is_kept(tmp_path):
    run = {"two": ["python -c 'raise SystemExit(2)'"]}
    with pytest.raises(BlendragError, match="status 2") as failed:
        collect(tmp_path, run, keep=False, say=lambda text: None)
    assert tiny.one_sentence(str(failed.value))
    assert not list(tmp_path.rglob("*.json"))


def printed_by_eval(loss: float, ttft_ms: float) -> list[ArenaRow]:
    """Rows of one task: full, reuse, and the default policy, which loses ``loss`` nats of reuse's 0.4."""
    task: dict[str, Any] = {"dataset": "asked", "metric": "f1", "n": 6}
    figures: dict[str, Any] = {
        "recovered": 1 - loss / 0.4,
        "recovered_low": 0.1,
        "recovered_high": 0.9,
    }
    return [
        replace(baseline("none"), **task, token_kl=3.0),
        replace(baseline("full"), **task, token_kl=0.0, recovered=1.0),
        replace(baseline("reuse", charged=0.0), **task, token_kl=0.4, recovered=0.0, ttft_ms=3.0),
        row(DEFAULT_POLICY, ratio=0.15, token_kl=loss, ttft_ms=ttft_ms, **task, **figures),
    ]


def test_pretrained_models_are_measured_by_commands_without_paths(tmp_path, monkeypatch):
    asked: list[list[str]] = []
    rows = json.dumps([asdict(row) for row in printed_by_eval(0.1, 6.0)]).encode()

    def run(line: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        asked.append(line)
        return subprocess.CompletedProcess(line, returncode="tables" in line, stdout=rows)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr("lab.pages.quality_page.write_png", lambda figure, path: None)
    results = copy_page(tmp_path) / "pretrained"
    shutil.rmtree(results, ignore_errors=True)
    model, questions = tmp_path / "tiny", tmp_path / "asked.json"
    given = ("--out", tmp_path, "--model", model, "--questions", questions, "--contexts", 3)
    assert invoke_program(main, *given).exit_code == 1  # one failed, the others are kept
    kept = {path.stem: load_result(path) for path in results.iterdir()}
    assert set(kept) == {f"tiny-{task}" for task in ("asked", "code", "long", "chat")}
    (command,) = kept["tiny-asked"].commands
    assert str(tmp_path) not in command
    options = parsed(command)
    assert (options["model"], options["dataset"]) == ("MODELS/tiny", "asked.json")
    assert (options["contexts"], options["dtype"], options["json"]) == (3, "bfloat16", True)
    assert {str(model), str(questions)} <= set(asked[0])
    invoke_program(main, *given, "--keep")
    assert len(asked) == 6  # only the failed one is repeated
    assert "| asked | 6 |" in (tmp_path / "quality.md").read_text(encoding="utf-8")
    assert list(load_measured(results)) == ["tiny"]


def test_prompts_of_schemas_are_a_table_on_a_page_of_their_own(tmp_path, monkeypatch):
    rows = json.dumps([asdict(replace(r, token_kl_error=0.02)) for r in printed_by_eval(0.1, 6.0)])

    def run(line: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess(line, returncode=0, stdout=rows.encode())

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr("lab.pages.quality_page.write_png", lambda figure, path: None)
    results = copy_page(tmp_path) / "schemas"
    shutil.rmtree(results, ignore_errors=True)
    given = ("--out", tmp_path, "--schemas")
    assert invoke_program(main, *given).exit_code == 0
    more = ("--model", tmp_path / "tiny", "--questions", tmp_path / "asked.json", "--contexts", 3)
    assert invoke_program(main, *given, *more).exit_code == 0
    assert {path.stem for path in results.iterdir()} == {"embedded", "tiny-asked"}
    (command,) = load_result(results / "tiny-asked.json").commands
    options = parsed(command)
    assert (options["schema"], options["model"], options["contexts"]) == (True, "MODELS/tiny", 3)
    page = results.with_suffix(".md").read_text(encoding="utf-8")
    assert f"$ {command}\n" in page
    expected = f"blend: `{DEFAULT_POLICY}`, r = 0.15 | 0.1 ± 0.02 | 0.90 | 0.75 [0.10, 0.90] |"
    assert f"| tiny | asked, n = 6 | {expected}" in page
    assert f"| embedded | asked, n = 6 | {expected}" in page


def test_pretrained_models_are_a_table_and_a_picture():
    one, other = printed_by_eval(0.1, 6.0), printed_by_eval(0.3, 12.0)
    both = {"asked": fidelities(one), "chat": fidelities(other)}
    models = {"one": {"asked": both["asked"]}, "two": both}
    lines = [line for line in pretrained_text(models).splitlines() if line.startswith("|")]
    cells = [line.strip("| ").split(" | ") for line in lines]
    assert [line[0] for line in cells[2:]] == ["two", "asked", "chat", "all"]  # one has no chat
    other_policies = [point for point in both["chat"] if point.policy != DEFAULT_POLICY]
    with pytest.raises(
        InvalidInputError, match=f"two on chat have no policy {re.escape(DEFAULT_POLICY)}"
    ):
        pretrained_text({"two": {"chat": other_policies}})
    assert cells[0] == ["mean of", "n", "r = 0.15: KL", "recovered", "agreement"]
    assert cells[2] == ["two", "12", "0.4 → 0.2", "0.50", "0.90"]
    assert cells[3] == ["asked", "12", "0.4 → 0.1", "0.75", "0.90"]
    assert cells[5] == ["all", "18", "0.4 → 0.17", "0.58", "0.90"]
    answers = [Kept(3, 1 / 3, 0.0), Kept(2, 1.0, 0.25)]  # of 6 questions each
    counted = {
        name: {"asked": [replace(point, answers=kept) for point in fidelities(one)]}
        for name, kept in zip(("one", "two"), answers, strict=True)
    }
    assert (
        "answers 5 of these questions right and 7 wrong (summaries are neither). Of the 5 are kept, and of "
        f"the 7 are gained: 3 and 1 by `reuse`, 3 and 1 by `{DEFAULT_POLICY}` at r = 0.15."
    ) in pretrained_text(counted)
    models = {"one": {"asked": both["asked"]}, "two": {"chat": both["chat"]}}
    panel = plots.fidelity_against_ttft(means_of_models(models)).axes[1]
    assert panel.get_title() == "two"
    assert curve(panel, DEFAULT_POLICY) == ([0.4], [pytest.approx(0.25)])
    assert curve(panel, "reuse") == ([0.1], [0.0])
    assert "arena-real" in pretrained_text({})


def printed_with_writer(dataset: str) -> list[ArenaRow]:
    """As ``eval --writer`` would print: agreement of reuse .5 → .7 and of the default policy .8 → .85."""
    task: dict[str, Any] = {"dataset": dataset, "n": 6, "ratio": 0.15}

    def loss(kl: float, recovered: float) -> dict[str, Any]:
        bounds = {"recovered_low": recovered - 0.1, "recovered_high": recovered + 0.1}
        return {"token_kl": kl, "recovered": recovered, **bounds}

    near, nearer = loss(0.2, 0.5), loss(0.1, 0.75)
    reuse: dict[str, Any] = {"dataset": dataset, "n": 6, "charged": 0.0, "ttft_ms": 3.0}
    _, full, *_ = printed_by_eval(0.1, 6.0)
    return [
        replace(full, dataset=dataset),
        baseline(
            "reuse",
            **reuse,
            recovered=0.0,
            token_kl=0.4,
            agreement=0.5,
            right=3,
            right_agreement=0.4,
        ),
        row(DEFAULT_POLICY, **{**task, **near, "agreement": 0.8, "ttft_ms": 6.0}),
        baseline("reuse+writer", **reuse, **near, agreement=0.7, right=3, right_agreement=0.6),
        row(f"{DEFAULT_POLICY}+writer", **{**task, **nearer, "agreement": 0.85, "ttft_ms": 6.0}),
    ]


def test_writers_are_compared_by_commands_without_paths(tmp_path, monkeypatch):
    asked: list[list[str]] = []

    def run(line: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        asked.append(line)
        rows = printed_with_writer(Path(line[line.index("--dataset") + 1]).stem)
        printed = json.dumps([asdict(row) for row in rows]).encode()
        return subprocess.CompletedProcess(line, returncode=0, stdout=printed)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr("lab.pages.quality_page.write_png", lambda figure, path: None)
    results = copy_page(tmp_path) / "writers"
    shutil.rmtree(results, ignore_errors=True)
    model, writers = tmp_path / "tiny", tmp_path / "made"
    (writers / "tiny").mkdir(parents=True)
    given = ("--out", tmp_path, "--model", model, "--writers", writers)
    more = ("--questions", tmp_path / "asked.json", "--contexts", 3)
    assert invoke_program(main, *given, *more).exit_code == 0
    names = ("asked", "code", "long", "tables", "chat")
    assert {path.stem for path in results.iterdir()} == {f"tiny-{name}" for name in names}
    (command,) = load_result(results / "tiny-asked.json").commands
    assert str(tmp_path) not in command
    options = parsed(command)
    assert (options["fidelity"], options["contexts"]) == (True, 3)
    assert str(options["writer"]) == "WRITERS/tiny"
    assert {str(model), str(writers / "tiny")} <= set(asked[0])
    ratios = {path.stem: parsed(*load_result(path).commands)["ratio"] for path in results.iterdir()}
    assert {name for name, given in ratios.items() if given} == {"tiny-asked"}
    lines = (tmp_path / "quality.md").read_text(encoding="utf-8").splitlines()
    table = [line.strip("| ").split(" | ") for line in lines if line.startswith("| tiny |")]
    half = "**0.50 [0.40, 0.60]**"
    assert table[:2] == [
        ["tiny", "6", "0.00", "0.4<br>0.500; 10.0×", f"0.2<br>{half}<br>0.700; 10.0×"],
        ["tiny", "6", "0.15", f"0.2<br>{half}<br>0.800; 5.0×",
         "0.1<br>**0.75 [0.65, 0.85]**<br>0.850; 5.0×"],
    ]  # fmt: skip
    code = ["0.4<br>0.500", f"0.2<br>{half}<br>0.700", "n = 3: 0.400 → 0.600"]
    assert table[2] == ["tiny", "code", "6", *code]
    written = load_measured(results)
    panel = plots.agreement_against_ttft(frontiers(written)).axes[0]
    assert curve(panel, DEFAULT_POLICY) == ([0.1, 0.2], [0.5, 0.8])
    assert curve(panel, f"{DEFAULT_POLICY}+writer") == ([0.1, 0.2], [0.7, 0.85])
    assert "WRITERS" in writers_text({})


def test_a_model_without_a_writer_is_measured_over_chunks_after_similar_ones(tmp_path):
    (command,) = writer_runs([Path("tiny")], [Path("a.json")], 3, tmp_path)["tiny-a"]
    options = parsed(command)
    assert (options["writer"], options["encode_after"]) == (None, 2)
    assert model_of(command) == "tiny"


def test_an_interrupted_page_says_which_runs_are_left(tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr("blendrag.cli.interrupt.expect", lambda text, *_: said.append(text))

    def stop(line: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        if "tables" in line:
            raise KeyboardInterrupt
        rows = json.dumps([asdict(row) for row in printed_by_eval(0.1, 6.0)]).encode()
        return subprocess.CompletedProcess(line, returncode=0, stdout=rows)

    monkeypatch.setattr(subprocess, "run", stop)
    copy_page(tmp_path)
    ended = invoke_program(main, "--out", tmp_path, "--model", tmp_path / "tiny")
    assert ended.exit_code == 130
    assert said[-1] == "2 of 4 runs are kept; repeat with --keep for tiny-tables, tiny-chat"


def test_a_row_that_several_commands_printed_is_taken_once():
    full, query, hkvd = (row(policy) for policy in ("full", "query", "hkvd"))
    again = row("full", ttft_ms=99.0)
    commands = [
        printing(json.dumps([asdict(r) for r in rows])) for rows in ([full, query], [again, hkvd])
    ]
    assert [r.ttft_ms for r in execute(commands).rows] == [30.0] * 3
