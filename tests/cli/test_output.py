"""Sizes, ratios, JSON, help and progress: what every command parses and prints."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from blendrag import __version__
from blendrag.cli import progress
from blendrag.cli.options import parse_ratio, parse_size
from blendrag.cli.output import print_json
from blendrag.cli.progress import TimeLeft
from blendrag.lab import commands
from cli.commands import invoke, said


@pytest.mark.parametrize(
    ("command", "shown"), [(["--help"], "ingest"), (["bench", "--help"], "ttft")]
)
def test_help_imports_neither_torch_nor_transformers(command: list[str], shown: str) -> None:
    code = (
        "import sys\nfrom blendrag.cli.main import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'faiss', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    args = [sys.executable, "-c", code, *command]
    done = subprocess.run(args, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout


def test_version_is_the_version_of_the_package() -> None:
    assert invoke("--version").stdout.strip() == f"blendrag {__version__}"


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("0", 0), ("1048576", 1 << 20), ("500MB", 500 * 10**6), ("2GiB", 2 << 30), ("1.5k", 1500),
     ("64 gib", 64 << 30), ("3M", 3 * 10**6)],
)  # fmt: skip
def test_sizes_are_bytes_or_carry_a_unit(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["1.5", "-0.1", "nan", "automatic", ""])
def test_a_ratio_is_a_share_or_auto(text: str) -> None:
    assert (parse_ratio("0.2"), parse_ratio("auto")) == (0.2, "auto")
    with pytest.raises(typer.BadParameter, match=r"must be a number in \[0, 1\] or 'auto'"):
        parse_ratio(text)


def test_json_has_null_for_nan_and_infinity(capsys: pytest.CaptureFixture[str]) -> None:
    nan, infinite = float("nan"), float("inf")
    print_json({"a": nan, "b": [1.5, (infinite,)], "c": {"d": -infinite}, "e": True})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {
        "a": None, "b": [1.5, [None]], "c": {"d": None}, "e": True,
    }  # fmt: skip


@pytest.mark.parametrize("library", ["torchao", "torch.utils._pytree"])
def test_libraries_warn_only_with_verbose(library: str) -> None:
    invoke("store", "stats", "--store", "nowhere")
    assert not logging.getLogger(library).isEnabledFor(logging.WARNING)


def test_without_a_terminal_progress_is_a_line_every_few_seconds(
    ingested: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    lines = invoke("store", "check", "--store", str(ingested)).stderr.splitlines()
    assert len(lines) == 10
    assert all(line.startswith("progress: ") and " checked" in line for line in lines)


@pytest.mark.parametrize(
    ("seconds", "total", "kept", "expected"),
    [
        ([60.0, 1.0, 1.0, 1.0], 10, 0, [None, None, None, 7.0, 6.0]),  # the first step warms up
        ([9.0, 1.0, 5.0, 1.0, 5.0], 11, 0, [None, None, None, 24.0, 49 / 3, 18.0]),
        ([60.0, 2.0, 2.0], 200, 100, [None, None, None, 194.0]),  # steps of an earlier run
        ([9.0, 1.0, 1.0], 3, 0, [None, None, None, None]),  # the end
    ],
)
def test_time_left_is_estimated_from_the_mean_after_the_first_step(
    seconds: list[float], total: int, kept: int, expected: list[float | None]
) -> None:
    left, now = TimeLeft(), 0.0
    found = [left(kept, total, now)]
    for done, step in enumerate(seconds, kept + 1):
        now += step
        found.append(left(done, total, now))
    assert found == expected


# -- commands of extras ---------------------------------------------------------------------------


def test_bench_gets_its_own_arguments() -> None:
    assert "ttft" in invoke("bench", "--help").stdout
    assert invoke("bench", "no-such-benchmark").exit_code == 2


@pytest.mark.parametrize("command", [["bench"], ["bench", "ttft", "--rounds", "1"], ["eval", "-h"]])
def test_without_the_extra_its_commands_say_how_to_install_it(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = typer.Typer()
    app.command()(lambda: None)
    monkeypatch.setattr(commands, "REQUIREMENTS", ("not_installed",))
    commands.register(app)
    monkeypatch.setattr("cli.commands.app", app)
    result = invoke(*command)
    assert result.exit_code == 2
    assert said(result).endswith("not_installed; pip install 'blendrag[lab]'")
