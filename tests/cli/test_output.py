"""Sizes, ratios, JSON, help and progress: what every command parses and prints."""

from __future__ import annotations

import gc
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
import typer
from fastapi import FastAPI
from typer.testing import CliRunner
from uvicorn.config import LOGGING_CONFIG

from blendrag import __version__
from blendrag.cli import extras, options, progress
from blendrag.cli.app import app
from blendrag.cli.importing import lasting_imports
from blendrag.cli.options import ANSWER_TOKENS
from blendrag.cli.output import Guarded, print_json
from blendrag.cli.progress import StatusLine
from blendrag.config import DEFAULT_POLICY, DEFAULT_RATIO, Settings
from blendrag.option import parse_size
from blendrag.server.running import server_of
from cli.commands import invoke, said


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["--help"], "ingest"),
        (["ask", "-h"], "--top-k"),
        pytest.param(["bench", "-h"], "ttft", marks=pytest.mark.slow),
    ],
)
def test_help_imports_neither_torch_nor_transformers(command: list[str], shown: str) -> None:
    code = (
        "import sys\nfrom blendrag.cli.main import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'faiss', 'matplotlib'} & set(sys.modules)\n"
        "print('heavy:', heavy)"
    )
    args = [sys.executable, "-c", code, *command]
    done = subprocess.run(args, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout
    assert done.stdout.endswith("heavy: set()\n")


def helps_below(*group: str) -> Iterator[tuple[str, str]]:
    """Each command of a group, those of its groups included, and what its help says."""
    helped = invoke(*group, "--help").stdout
    yield " ".join(group), helped
    for line in helped.partition("Commands:\n")[2].splitlines():
        name = line[2:].partition(" ")[0]  # empty in a line that goes on
        if name and name not in ("bench", "cluster"):  # imports torch; needs Ray
            yield from helps_below(*group, name)


@pytest.mark.parametrize("group", ["", pytest.param("bench", marks=pytest.mark.slow)])
def test_help_names_values_in_capitals_and_no_types_of_python(group: str) -> None:
    helps = dict(helps_below(*group.split()))
    assert {"store gc", "ask", "models pull"} <= helps.keys() or "bench ttft" in helps
    for command, helped in helps.items():
        usage, _, described = helped.partition("\n")
        assert not set("{}<>") & set(usage), command
        typed = re.findall(r"<(?:list|str|int|float|bool|path)\b.*|<\w+[|].*", described)
        assert typed == [], command
        assert "│" not in helped, command
    if not group:
        assert "ingest [OPTIONS] PATH...\n" in helps["ingest"]
        assert "\n  PATH...  Files or directories.  [required]\n" in helps["ingest"]
        assert "schema check [OPTIONS] FILE [PROMPT...]\n" in helps["schema check"]
        assert "--port 0..65535" in helps["serve"]
        assert "--only verdicts|decode-weights|gguf|runs" in helps["cache clear"]


@pytest.mark.parametrize(("command", "status"), [("--version", 0), ("--nothing", 2)])
def test_a_command_leaves_without_freeing_objects(command: str, status: int) -> None:
    code = (
        "import atexit\nfrom blendrag.cli.main import main\n"
        "class Freed:\n    def __del__(self): print('freed')\n"
        "freed = Freed()\n"
        "try: main()\nfinally: atexit.register(print, 'ended')"
    )
    args = [sys.executable, "-c", code, command]
    done = subprocess.run(args, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    assert done.stdout.endswith("ended\n")


@pytest.mark.parametrize("command", ["ask", "search", "serve", "profile"])
def test_the_garbage_collector_never_looks_at_what_a_command_imports(
    ingested: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    during: list[bool] = []
    monkeypatch.setattr("blendrag.cli.importing.sys", SimpleNamespace(modules={}))
    monkeypatch.setattr("gc.freeze", lambda: during.append(gc.isenabled()))
    question = ["windmill"] * (command in ("ask", "search"))
    store = ingested if command == "search" else "nowhere"
    invoke(command, *question, "--store", store)
    assert during
    assert not any(during)
    assert gc.isenabled()


def test_a_process_that_has_imported_torch_keeps_its_garbage_collected() -> None:
    frozen = gc.get_freeze_count()
    with lasting_imports():
        assert gc.isenabled()
    assert gc.get_freeze_count() == frozen


def test_help_shows_the_defaults_of_the_settings() -> None:
    command: Any = typer.main.get_command(app)
    helps = {option.name: option.help for option in command.commands["ask"].params}
    defaults = vars(Settings())
    defaults["max_new_tokens"] = ANSWER_TOKENS
    for name in ("store", "top_k", "mode", "schedule", "min_ratio", "max_new_tokens"):
        assert f"[default: {defaults[name]}]" in helps[name]
    for name, otherwise in (("policy", DEFAULT_POLICY), ("ratio", DEFAULT_RATIO)):
        assert f"else {otherwise}]" in helps[name]


def test_version_is_the_version_of_the_package() -> None:
    assert invoke("--version").stdout.strip() == f"blendrag {__version__}"


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("0", 0), ("1048576", 1 << 20), ("500MB", 500 * 10**6), ("2GiB", 2 << 30), ("1.5k", 1500),
     ("64 gib", 64 << 30), ("3M", 3 * 10**6)],
)  # fmt: skip
def test_sizes_are_bytes_or_carry_a_unit(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


def test_a_default_below_one_stays_what_it_is() -> None:
    program = typer.Typer()

    @program.command()
    def show(share: Annotated[float, options.number("A share.", 0, 1)] = 0.15) -> None:
        typer.echo(share)

    assert CliRunner().invoke(program, []).stdout == "0.15\n"


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
    lines = invoke("store", "check", "--store", ingested).stderr.splitlines()
    assert len(lines) >= 9
    assert all(line.startswith("progress: ") and " checked" in line for line in lines)


def test_time_left_is_estimated_after_the_first_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    seconds = [0.0]
    monkeypatch.setattr("rich.console.monotonic", lambda: seconds[-1])
    line = StatusLine()
    for done, now in ((100, 0.0), (101, 60.0), (102, 61.0), (103, 66.0), (110, 80.0)):
        seconds.append(now)
        line.show(f"{done}", done, 110)
    assert capsys.readouterr().err.splitlines() == [
        "progress: 100",  # by an earlier run
        "progress: 101",  # the first step warms up
        "progress: 102, about 8.0 s left",
        "progress: 103, about 35.0 s left",  # at the speed of the last half of the work done
        "progress: 110",
    ]


@pytest.mark.parametrize(
    "command",
    [["adapt", "--out", "w"], ["bench", "ttft", "--rounds", "1"], ["eval", "-h"]],
    ids=lambda typed: typed[0],
)
def test_without_the_lab_its_commands_say_how_to_install_it(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = typer.Typer()
    app.command()(lambda: None)
    monkeypatch.setattr(extras, "entry_points", lambda **group: ())
    extras.add_commands(app)
    monkeypatch.setattr("cli.commands.app", app)
    result = invoke(*command)
    assert result.exit_code == 2
    assert said(result).endswith("; pip install 'blendrag[lab]', or from a checkout ./lab")


@pytest.mark.parametrize("command", ["ingest", "serve"])
def test_ray_without_blendrag_ray_says_how_to_install_it(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "entry_points", lambda **group: ())
    paths = [str(tmp_path)] if command == "ingest" else []
    (tmp_path / "d.txt").write_text("A document.")
    result = invoke(command, *paths, "--ray", "--model", "demo", "--store", str(tmp_path / "s"))
    assert result.exit_code == 2
    assert said(result).endswith("'blendrag[ray]', or from a checkout ./integrations/blendrag-ray")
    assert not (tmp_path / "s").exists()


def test_a_verbose_server_writes_no_escape_sequences_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", Guarded(terminal))
    loggers = [logging.getLogger(name) for name in LOGGING_CONFIG["loggers"]]
    before = [(each, each.handlers, each.level, each.propagate) for each in loggers]
    try:
        server_of(FastAPI(), verbose=True)
        logging.getLogger("uvicorn").info("Started")
    finally:
        for each, handlers, level, propagate in before:
            each.handlers, each.propagate = handlers, propagate
            each.setLevel(level)
    assert terminal.getvalue() == "INFO:     Started\n"
