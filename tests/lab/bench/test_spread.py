"""Options that are fields of a dataclass: each is an option of the command, which gets them as one value."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from blendrag.config import DEFAULT_POLICY
from blendrag.fusor.selection import POLICIES
from blendrag.lab.bench.cli.load import load
from blendrag.lab.bench.cli.spread import spread
from blendrag.lab.bench.cli.sweep import sweep
from blendrag.lab.bench.cli.trace import trace
from blendrag.lab.bench.cli.ttft import ttft
from cli.commands import invoke


@dataclass(frozen=True)
class Size:
    rows: Annotated[int, typer.Option(min=1, help="How many.")] = 3
    wide: bool = False


@dataclass(frozen=True)
class Larger(Size):
    rows: Annotated[int, typer.Option(min=1, help="How many.")] = 30


@spread
def one(size: Size, name: Annotated[str, typer.Option()] = "a") -> None:
    """Says what it got."""
    typer.echo(f"{name} {size}")


@spread
def other(size: Larger) -> None:
    typer.echo(size)


def run(command: object, *args: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(command)  # type: ignore[arg-type, type-var]
    result = CliRunner().invoke(app, args)
    return result.exit_code, result.output


def test_a_command_gets_the_options_as_one_value() -> None:
    assert run(one) == (0, f"a {Size()}\n")
    assert run(one, "--wide", "--rows", "7", "--name", "b") == (0, f"b {Size(7, True)}\n")


def test_what_an_option_allows_and_its_help_stay() -> None:
    status, text = run(one, "--rows", "0")
    assert status == 2
    assert "--rows" in text
    helped = run(one, "--help")[1]
    assert "How many." in helped
    assert "Says what it got." in helped
    assert "--size" not in helped


def test_a_default_may_differ_from_command_to_command() -> None:
    assert run(other) == (0, f"{Larger(30)}\n")


@pytest.mark.parametrize("command", ["ttft", "trace"])
def test_the_help_of_policy_names_every_policy(command: str) -> None:
    helped = invoke("bench", command, "--help").stdout.replace("│", " ")
    listed = " ".join(helped.split()).partition("--policy")[2].partition("--schedule")[0]
    for name in POLICIES:
        assert f"{name}(k)" in listed if POLICIES[name].k is not None else f"{name}," in listed, (
            name
        )


@pytest.mark.parametrize("command", [ttft, sweep, trace, load])
def test_the_benches_share_their_options(command: object) -> None:
    parameters = inspect.signature(command).parameters  # type: ignore[arg-type]
    shared = {"geometry", "model", "dtype", "device", "chunks", "chunk_tokens", "question_tokens",
              "policy", "schedule", "encoding", "ratio", "tier", "as_json"}  # fmt: skip
    assert shared <= set(parameters)
    assert parameters["policy"].default == ("random" if command is trace else DEFAULT_POLICY)
