"""The quality page: made from kept results alone, always the same, with every number of the rows."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

import tiny
from blendrag.cli.app import app
from blendrag.errors import BlendragError, InvalidInputError
from blendrag.lab.evaluation import deviations
from blendrag.lab.evaluation.quality_page import collect, write_page
from blendrag.lab.evaluation.reached import (
    calibrated_standings,
    calibrated_table,
    reached_table,
    standings,
)
from blendrag.lab.evaluation.runs import (
    CALIBRATION,
    DEVIATIONS,
    RUNS,
    Result,
    Run,
    RunFailedError,
    execute,
    load_result,
    save_result,
    shell,
)
from blendrag.lab.evaluation.tables import kind_table, way_table
from lab.evaluation import invented_rows

KINDS = ("direct", "coreference", "unanswerable")

CALIBRATED = {
    "policy": "query", "ratio": 0.05, "deviation": 0.0123, "prompts": 16, "reuse_deviation": 2.5,
    "weights": [0.2, 0.1, 0.05], "families": {"constant": 0.4, "geometric:0.5": 0.0345}, "tried": 31,
}  # fmt: skip


def sweep() -> list[dict[str, Any]]:
    """PGR of unanswerable questions is undefined."""
    return [
        {**row, "pgr": None, "pgr_low": None, "pgr_high": None}
        if row["kind"] == "unanswerable"
        else row
        for row in invented_rows.sweep(KINDS)
    ]


def schedules() -> list[dict[str, Any]]:
    names = ("constant", "linear", "calibrated")
    full = invented_rows.unsteered("full", "all", 1.0)
    return [full, *(invented_rows.row("hkvd", schedule=name) for name in names)]


def results() -> dict[str, Result]:
    return {
        "calibration": Result(("blendrag ingest …", "blendrag calibrate …"), ({}, CALIBRATED)),
        "policies": Result(("blendrag eval --policies query,hkvd --json",), (sweep(),)),
        "chunks": Result(("blendrag eval --chunks 3", "…"), (invented_rows.chunks(), [])),
        "schedules": Result(("blendrag eval --schedules …",), (schedules(),)),
        "deviations": Result(("python -m …",), (invented_rows.deviations(),)),
    }


def cells(table: str, first: str) -> list[list[str]]:
    """Rows of a Markdown table that begin with ``first``."""
    lines = [line.strip("| ").split(" | ") for line in table.splitlines()]
    return [[cell.strip() for cell in line] for line in lines if line[0].strip() == first]


# -- the page -----------------------------------------------------------------------------------


def kept(folder: Path) -> dict[str, Result]:
    """The results as they come back from files in ``folder``."""
    for name, result in results().items():
        save_result(result, folder / f"{name}.json")
    return {name: load_result(folder / f"{name}.json") for name in results()}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    return write_page(folder, kept(folder / "results"), RUNS, "query", "constant")


def test_what_was_written_by_hand_of_other_models_is_on_the_page(tmp_path: Path) -> None:
    (tmp_path / "quality").mkdir()
    (tmp_path / "quality" / "real-models.md").write_text("## Real models\n", encoding="utf-8")
    assert write_page(tmp_path, {}).read_text(encoding="utf-8").endswith("## Real models\n")


def test_equal_results_give_an_equal_page_and_equal_pictures(tmp_path: Path, page: Path) -> None:
    again = write_page(tmp_path, kept(tmp_path / "results"), RUNS, "query", "constant")
    assert again.read_bytes() == page.read_bytes()
    pictures = sorted((page.parent / "quality").iterdir())
    assert len(pictures) == 8
    for picture in pictures:
        assert picture.read_bytes() == (tmp_path / "quality" / picture.name).read_bytes()


def test_every_picture_that_the_page_shows_lies_beside_it(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    shown = set(re.findall(r"\((quality/[a-z-]+\.png)\)", text))
    assert len(shown) == 8
    assert all((page.parent / name).stat().st_size > 5000 for name in shown)


def test_the_page_names_the_commands_and_leaves_out_runs_without_result(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "$ blendrag eval --policies query,hkvd --json" in text
    titles = {run.name: run.title for run in RUNS}
    assert f"## {titles['policies']}" in text
    assert f"## {titles['prefix']}" not in text


def test_deviations_are_shown_by_ratio_and_by_layer(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    by_ratio = cells(text, "hkvd, geometric")[0]
    assert by_ratio[1:] == ["0.450", "0.406", "0.325", "0.221", "0.072", "0.000"]
    stored = cells(text, "as stored")
    assert stored[0][:3] == ["as stored", "0", "0.55"]
    assert stored[1][:4] == ["as stored", "0", "0.00", "1.10"]  # Δ_kv of layer 0, then of layer 1


def test_a_calibrated_schedule_is_shown_beside_the_best_family(page: Path) -> None:
    (line,) = [line for line in cells(page.read_text(encoding="utf-8"), "query") if "31" in line]
    assert line[2:] == ["2.5", "geometric:0.5 0.0345", "0.0123", "31", "0.20 0.10 0.05"]


# -- tables -------------------------------------------------------------------------------------


def test_a_way_stands_in_the_table_with_score_interval_and_costs() -> None:
    rows = sweep()
    table = way_table(rows)
    assert table.splitlines()[0] == (
        "| policy | r | charged | score | PGR [95%] | KL | agrees | TTFT ms |"
    )
    row = next(r for r in rows if (r["policy"], r["ratio"], r["kind"]) == ("hkvd", 0.15, "all"))
    expected = f"{row['pgr']:.2f} [{row['pgr_low']:.2f}, {row['pgr_high']:.2f}]"
    assert cells(table, "hkvd")[2] == [
        "hkvd", "0.15", "0.275", f"{row['score']:.3f}", expected, "0.01", "0.90",
        f"{row['ttft_ms']:.0f}",
    ]  # fmt: skip
    assert cells(table, "full")[0][1] == ""  # no ratio steers it


def test_what_varies_has_a_column_and_what_does_not_has_none() -> None:
    rows = [invented_rows.row("query", encode_prefix=on) for on in (True, False)]
    table = way_table([*rows, invented_rows.unsteered("full", "all", 1.0)])
    assert cells(table, "query")[0][:2] == ["query", "on"]
    assert cells(table, "full")[0][:2] == ["full", ""]
    assert "schedule" not in table


def test_where_pgr_is_undefined_kinds_show_the_score() -> None:
    line = cells(kind_table(sweep()), "reuse")[0]
    assert line[2].startswith("0.30 [")
    assert line[4].startswith("score 0.")


def test_a_ratio_that_was_measured_may_differ_by_kind() -> None:
    rows = [
        invented_rows.unsteered("reuse", kind, 0.3 + ratio, charged_ratio=ratio)
        for kind, ratio in (("all", 0.1), ("direct", 0.11), ("coreference", 0.09))
    ]
    (line,) = cells(kind_table(rows), "reuse")
    assert [cell[:4] for cell in line[2:]] == ["0.41", "0.39", "0.40"]


# -- the default --------------------------------------------------------------------------------


def by_context(*right: float) -> list[list[float]]:
    """So many of five questions right, context by context."""
    return [[5, score] for score in right]


def test_the_default_is_behind_where_another_is_above_by_more_than_the_interval() -> None:
    rows = [
        invented_rows.unsteered("full", "all", 1.0),
        invented_rows.row("query", pgr=0.90, by_context=by_context(4, 5, 3, 4, 5, 3, 4, 4)),
        invented_rows.row("hkvd", pgr=0.96, by_context=by_context(5, 5, 3, 4, 5, 3, 4, 5)),
        invented_rows.row("blend", pgr=0.93, by_context=by_context(5, 5, 4, 4, 5, 4, 4, 5)),
        invented_rows.row("random", pgr=0.99, ratio=0.15),  # at another r
        invented_rows.unsteered("boundary(16)", "all", 0.99, charged_ratio=0.3),  # at a higher r
        invented_rows.row("hkvd", pgr=0.99, encode_prefix=False),  # of other KV
    ]
    (behind,) = standings(rows, "query", "constant")
    # hkvd is above in two contexts of eight, which a draw in ten leaves out; blend in four
    assert [row["policy"] for row in behind.others] == ["hkvd", "blend"]
    assert [row["policy"] for row in behind.ahead] == ["blend"]
    (ahead,) = standings(rows, "blend", "constant")
    assert (ahead.best or {})["policy"] == "hkvd"
    assert (ahead.ahead, ahead.is_known) == ((), True)


def test_a_lead_in_every_context_counts_however_wide_the_intervals_are() -> None:
    own, other = by_context(1, 4, 0, 3, 2, 4), by_context(2, 5, 1, 4, 3, 5)
    rows = [
        invented_rows.unsteered("full", "all", 1.0),
        invented_rows.row("query", pgr=0.5, pgr_low=0.2, pgr_high=0.9, by_context=own),
        invented_rows.row("hkvd", pgr=0.7, pgr_low=0.3, pgr_high=1.0, by_context=other),
    ]
    assert len(standings(rows, "query", "constant")[0].ahead) == 1


def test_of_one_context_nothing_is_said() -> None:
    rows = [
        invented_rows.unsteered("full", "all", 1.0),
        invented_rows.row("query", pgr=0.5, by_context=by_context(2)),
        invented_rows.row("hkvd", pgr=0.7, by_context=by_context(3)),
    ]
    (standing,) = standings(rows, "query", "constant")
    assert (standing.ahead, standing.is_known) == ((), False)
    assert reached_table([rows], "query", "constant").splitlines()[-1].endswith("| – |")


def test_where_pgr_is_undefined_the_score_decides() -> None:
    rows = [
        invented_rows.row("full", pgr=None, score=0.9),
        invented_rows.row("query", pgr=None, score=0.80),
        invented_rows.row("hkvd", pgr=None, score=0.78),
    ]
    assert not standings(rows, "query", "constant")[0].ahead
    (line,) = cells(reached_table([rows], "query", "constant"), "6 × 64")
    assert line[-3:] == ["score -0.100", "hkvd, constant score 0.780 (charged 0.060)", "no"]
    rows[2] = invented_rows.row("hkvd", pgr=None, score=0.82)
    assert len(standings(rows, "query", "constant")[0].ahead) == 1
    behind = reached_table([rows], "query", "constant").splitlines()[-1]
    assert behind.endswith("| **hkvd, constant score 0.820 (charged 0.060)** |")


def test_a_calibrated_schedule_is_held_against_the_families_of_its_policy(page: Path) -> None:
    rows = [
        invented_rows.unsteered("full", "all", 1.0),
        invented_rows.row("query", schedule="calibrated", by_context=by_context(4, 4, 4, 4)),
        invented_rows.row("query", schedule="linear", by_context=by_context(4, 4, 4, 4)),
        invented_rows.row(
            "query", schedule="constant", pgr=0.95, by_context=by_context(5, 5, 5, 5)
        ),
        invented_rows.row("query", schedule="constant", pgr=1.0, ratio=0.15),  # at another r
        invented_rows.row("hkvd", schedule="constant", pgr=1.0),  # another policy
        invented_rows.row("hkvd", schedule="calibrated", pgr=1.0),
    ]
    query, hkvd = calibrated_standings(rows)
    assert [row["schedule"] for row in query.others] == ["constant", "linear"]
    assert [row["schedule"] for row in query.ahead] == ["constant"]
    assert ([row["schedule"] for row in hkvd.others], hkvd.ahead) == (["constant"], ())
    few = [row for row in rows if row["schedule"] != "linear"]
    assert (
        calibrated_table([few, rows]) == calibrated_table([rows, few]) == calibrated_table([rows])
    )
    assert "## What calibration is worth" in page.read_text(encoding="utf-8")


def test_the_default_is_named_by_size_ratio_and_kind_and_only_if_it_was_asked() -> None:
    table = reached_table([sweep(), invented_rows.chunks()], "query", "constant")
    sizes = [line.split(" | ")[0].strip("| ") for line in table.splitlines()[2:]]
    assert sizes == ["6 × 64"] * 12 + ["3 × 64", "12 × 64", "6 × 128", "6 × 512"]
    assert reached_table([sweep()], "query", "geometric:0.5") == ""


# -- the runs -----------------------------------------------------------------------------------


def printing(name: str, text: str) -> Run:
    """A run whose only command prints ``text``."""
    return Run(name, name, "", (("python", "-c", f"print({text!r})"),))


@pytest.mark.parametrize("command", [c for run in RUNS for c in run.commands], ids=shell)
def test_every_command_of_the_arena_is_understood(command: Sequence[str]) -> None:
    program, subcommand, *arguments = command
    assert (program, subcommand) == ("blendrag", "eval")
    parsed = typer.main.get_command(app).commands["eval"].make_context("eval", list(arguments))  # type: ignore[attr-defined]
    assert parsed.params["json"] is True
    assert parsed.params["policies"]


@pytest.mark.parametrize("command", CALIBRATION.commands, ids=shell)
def test_every_command_of_calibration_is_understood(command: Sequence[str]) -> None:
    program, subcommand, *arguments = command
    parsed = (
        typer.main.get_command(app)
        .commands[subcommand]
        .make_context(  # type: ignore[attr-defined]
            subcommand, list(arguments)
        )
    )
    assert (program, parsed.params["json"]) == ("blendrag", True)


def test_what_is_called_calibrated_was_calibrated_before() -> None:
    calibrated = {c[c.index("--policy") + 1] for c in CALIBRATION.commands if "--policy" in c}
    for command in (c for run in RUNS for c in run.commands if "calibrated" in shell(c)):
        asked = set(command[command.index("--policies") + 1].split(","))
        assert asked <= calibrated
        assert command[command.index("--store") + 1] in CALIBRATION.commands[0]


def test_the_command_for_deviations_is_understood() -> None:
    ((program, _, module, *arguments),) = DEVIATIONS.commands
    assert (program, module) == ("python", deviations.__name__)
    assert deviations.parser().parse_args(arguments).chunk_tokens == 64


def test_a_result_is_kept_and_not_asked_for_again(tmp_path: Path) -> None:
    run = printing("one", json.dumps([{"score": 0.123456789}]))
    said: list[str] = []
    found = collect(tmp_path, [run], keep=True, say=said.append)
    assert found["one"].rows == [{"score": 0.123457}]
    assert found["one"].commands == (shell(run.commands[0]),)
    collect(tmp_path, [run], keep=True, say=said.append)
    assert len(said) == 1
    collect(tmp_path, [run], keep=False, say=said.append)
    changed = printing("one", "[]")
    assert collect(tmp_path, [changed], keep=True, say=said.append)["one"].rows == []
    assert len(said) == 3


def test_a_command_that_fails_is_named_in_one_sentence_and_nothing_is_kept(tmp_path: Path) -> None:
    run = Run("two", "", "", (("python", "-c", "raise SystemExit(2)"),))
    with pytest.raises(RunFailedError, match="status 2") as failed:
        collect(tmp_path, [run], keep=False, say=lambda text: None)
    assert tiny.one_sentence(str(failed.value))
    assert isinstance(failed.value, BlendragError)
    assert not list(tmp_path.rglob("*.json"))


def test_rows_of_several_commands_follow_one_another_and_what_both_asked_counts_once() -> None:
    full, query, hkvd = (invented_rows.row(policy) for policy in ("full", "query", "hkvd"))
    again = {**full, "ttft_ms": 99.0}
    commands = [
        printing("", json.dumps(rows)).commands[0] for rows in ([full, query], [again, hkvd])
    ]
    assert execute(Run("", "", "", tuple(commands))).rows == [full, query, hkvd]


def test_a_file_that_is_no_result_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[1]", encoding="utf-8")
    for name in ("x.json", "none.json"):
        with pytest.raises(InvalidInputError) as refused:
            load_result(tmp_path / name)
        assert tiny.one_sentence(str(refused.value))
