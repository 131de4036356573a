"""docs/quality.md: written from kept results alone; its figures, standings and commands."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import typer
from matplotlib.axes import Axes

import tiny
from blendrag.cli.app import app
from blendrag.errors import BlendragError, InvalidInputError
from blendrag.lab import plots
from blendrag.lab.evaluation import deviation
from blendrag.lab.evaluation.quality_page import (
    RUNS,
    Result,
    ahead,
    collect,
    execute,
    load_result,
    main,
    rivals,
    save_result,
    write_page,
)
from lab.evaluation import invented
from lab.evaluation.invented import baseline, by_context, row

REGIONS = ("policies", "default", "schedules", "chunks", "deviations")
CALIBRATED = {
    "policy": "query", "ratio": 0.05, "deviation": 0.0123, "prompts": 16, "reuse_deviation": 2.5,
    "weights": [0.2, 0.1, 0.05], "family_deviation": 0.0345,
}  # fmt: skip
PRINTED: dict[str, Any] = {
    "policies": [asdict(row) for row in invented.sweep()],
    "long": [asdict(row) for row in invented.sweep(chunk_tokens=512)],
    "schedules": [asdict(row) for row in invented.schedules()],
    "prefix": [asdict(row) for row in invented.prefix()],
    "chunks": [asdict(row) for row in invented.chunks()],
    "calibration": CALIBRATED,
    "deviations": asdict(invented.deviations()),
}


# -- the page -------------------------------------------------------------------------------------


def empty_page(folder: Path) -> Path:
    regions = "\n\n".join(f"<!-- bench:{name} -->\n<!-- /bench:{name} -->" for name in REGIONS)
    page = folder / "quality.md"
    page.write_text(f"# Quality\n\nBy hand.\n\n{regions}\n", encoding="utf-8")
    return page


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written by the command from kept results."""
    folder = tmp_path_factory.mktemp("page")
    made = empty_page(folder)
    for name, printed in PRINTED.items():
        save_result(Result(("blendrag …",), (printed,)), folder / "quality" / f"{name}.json")
    main(["--page-only", "--out", str(folder)])
    return made


def test_equal_results_give_an_equal_page_and_equal_pictures(tmp_path: Path, page: Path) -> None:
    results = {name: load_result(page.parent / "quality" / f"{name}.json") for name in PRINTED}
    again = empty_page(tmp_path)
    write_page(again, results)
    assert again.read_bytes() == page.read_bytes()
    pictures = sorted(page.with_suffix("").glob("*.png"))
    assert len(pictures) == 7
    for picture in pictures:
        assert picture.read_bytes() == (tmp_path / "quality" / picture.name).read_bytes()
        assert picture.stat().st_size > 5000
    assert "By hand." in page.read_text(encoding="utf-8")


def test_the_published_page_is_short_and_written_from_its_results(tmp_path: Path) -> None:
    published = Path(__file__).parents[3] / "docs" / "quality.md"
    text = published.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    results = {name: load_result(published.with_suffix("") / f"{name}.json") for name in RUNS}
    again = tmp_path / "quality.md"
    again.write_text(text, encoding="utf-8")
    write_page(again, results)
    assert again.read_text(encoding="utf-8") == text
    shown = re.findall(r"\]\(quality/([a-z-]+\.png)\)", text)
    assert sorted(shown) == sorted(path.name for path in (tmp_path / "quality").iterdir())
    assert all((published.with_suffix("") / name).is_file() for name in shown)


def test_a_missing_result_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--page-only", "--out", str(tmp_path)])
    assert left.value.code == 2
    assert "calibration.json holds no results of the arena" in capsys.readouterr().err
    (tmp_path / "x.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(InvalidInputError) as refused:
        load_result(tmp_path / "x.json")
    assert tiny.one_sentence(str(refused.value))


# -- the default and its rivals -------------------------------------------------------------------


def test_another_policy_is_significantly_better_only_by_more_than_the_interval() -> None:
    query, hkvd, blend = rows = [
        row("query", pgr=0.90, by_context=by_context(4, 5, 3, 4, 5, 3, 4, 4)),
        row("hkvd", pgr=0.96, by_context=by_context(5, 5, 3, 4, 5, 3, 4, 5)),
        row("blend", pgr=0.93, by_context=by_context(5, 5, 4, 4, 5, 4, 4, 5)),
    ]
    rows += [
        baseline("full"),
        row("random", pgr=0.99, ratio=0.15),  # at another r
        baseline("boundary(16)", pgr=0.99, charged_ratio=0.3),  # at a higher r
        row("hkvd", pgr=0.99, encode_prefix=False),  # of other KV
    ]
    # hkvd is above in two contexts of eight, which a draw in ten leaves out; blend in four
    assert rivals(rows, query, same_policy=False) == [hkvd, blend]
    assert ahead([hkvd, blend], query) == [blend]
    assert rivals(rows, blend, same_policy=False)[0] == hkvd
    assert ahead(rivals(rows, blend, same_policy=False), blend) == []


def test_a_calibrated_schedule_is_compared_with_the_families_of_its_policy() -> None:
    calibrated, linear, constant = rows = [
        row("query", schedule="calibrated", by_context=by_context(4, 4, 4, 4)),
        row("query", schedule="linear", by_context=by_context(4, 4, 4, 4)),
        row("query", schedule="constant", pgr=0.95, by_context=by_context(5, 5, 5, 5)),
    ]
    rows += [
        baseline("full"),
        row("query", schedule="constant", pgr=1.0, ratio=0.15),  # at another r
        row("hkvd", schedule="constant", pgr=1.0),  # another policy
    ]
    assert rivals(rows, calibrated, same_policy=True) == [constant, linear]
    assert ahead([constant, linear], calibrated) == [constant]


# -- figures --------------------------------------------------------------------------------------


def curve(axes: Axes, label: str) -> tuple[list[float], list[float]]:
    """x and y of the line with that label."""
    found = next(line for line in axes.get_lines() if line.get_label() == label)
    return list(found.get_xdata()), list(found.get_ydata())


def test_quality_is_drawn_over_ratio_and_ttft() -> None:
    rows = invented.sweep()
    hkvd = [r for r in rows if (r.policy, r.kind) == ("hkvd", "coreference")]
    panel = plots.quality_against_ratio(rows, ("all", "coreference")).axes[1]
    assert panel.get_title() == "coreference"
    assert curve(panel, "hkvd") == ([r.ratio for r in hkvd], [r.pgr for r in hkvd])
    bars = [tuple(s[:, 1]) for lines in panel.collections for s in lines.get_segments()]  # type: ignore[attr-defined]
    assert {(r.pgr_low, r.pgr_high) for r in hkvd} <= set(bars)
    assert panel.get_ylim()[0] <= min(map(min, bars)) <= max(map(max, bars)) <= panel.get_ylim()[1]
    axes = plots.quality_against_ttft(rows).axes[0]
    names = {"full", "reuse", "boundary(4)", "query", "hkvd"}
    assert set(axes.get_legend_handles_labels()[1]) == names
    unknown = plots.quality_against_ratio(
        [row("query", ratio=0.02, pgr=None), row("query")], ("all",)
    )
    assert curve(unknown.axes[0], "query") == ([0.05], [0.9])


def test_chunks_schedules_and_deviations_are_drawn_as_measured() -> None:
    count, length, count_ms, length_ms = plots.quality_against_chunks(invented.chunks()).axes
    assert curve(count, "query")[0] == [3, 6, 12]
    assert curve(length, "query")[0] == [64, 128, 512]
    assert curve(length_ms, "full")[1] == [0.3 * 6 * tokens for tokens in (64, 128, 512)]
    assert curve(count_ms, "hkvd")[1] == [22 + 0.08 * n * 64 for n in (3, 6, 12)]
    axes = plots.quality_by_schedule(invented.schedules()).axes[0]
    assert curve(axes, "hkvd") == ([0, 1, 2], [0.9] * 3)
    report = invented.deviations()
    points = [p for p in report.points if p.policy == "query"]
    axes = plots.deviation_against_ratio(report).axes[0]
    assert curve(axes, "query") == ([p.ratio for p in points], [p.attention for p in points])
    axes = plots.deviation_distribution(report).axes[0]
    assert curve(axes, "layer 11")[0] == list(report.distribution[-1].quantiles)
    bars = plots.layer_correlation(report).axes[0].patches
    assert [bar.get_height() for bar in bars] == [pair.rho for pair in report.correlation]  # type: ignore[attr-defined]


# -- the runs -------------------------------------------------------------------------------------


def printing(text: str) -> str:
    """A command that prints ``text``."""
    return shlex.join(("python", "-c", f"print({text!r})"))


def parsed(command: str) -> dict[str, Any]:
    program, subcommand, *arguments = shlex.split(command)
    assert program == "blendrag"
    made = typer.main.get_command(app).commands[subcommand]  # type: ignore[attr-defined]
    params: dict[str, Any] = made.make_context(subcommand, arguments).params
    return params


def test_every_command_of_the_runs_is_valid_and_calibrated_policies_come_first() -> None:
    (deviations,) = RUNS["deviations"]
    program, _, module, *arguments = deviations.split()
    assert (program, module) == ("python", deviation.__name__)
    assert deviation.parser().parse_args(arguments).chunk_tokens == 64
    calibration, *evaluations = [run for name, run in RUNS.items() if name != "deviations"]
    calibrated = {parsed(command)["policy"] for command in calibration[1:]}
    for given in (parsed(command) for run in evaluations for command in run):
        assert given["json"] is True
        if "calibrated" in given["schedules"]:
            assert set(given["policies"].split(",")) <= calibrated
            assert str(given["store"]) in calibration[0]


def test_a_kept_result_is_measured_again_only_if_its_commands_changed(tmp_path: Path) -> None:
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


def test_a_failing_command_is_named_in_one_sentence_and_nothing_is_kept(tmp_path: Path) -> None:
    run = {"two": ["python -c 'raise SystemExit(2)'"]}
    with pytest.raises(BlendragError, match="status 2") as failed:
        collect(tmp_path, run, keep=False, say=lambda text: None)
    assert tiny.one_sentence(str(failed.value))
    assert not list(tmp_path.rglob("*.json"))


def test_a_row_that_several_commands_printed_is_taken_once() -> None:
    full, query, hkvd = (row(policy) for policy in ("full", "query", "hkvd"))
    again = row("full", ttft_ms=99.0)
    commands = [
        printing(json.dumps([asdict(r) for r in rows])) for rows in ([full, query], [again, hkvd])
    ]
    assert [r.ttft_ms for r in execute(commands).rows] == [30.0] * 3
