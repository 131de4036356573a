"""The command line of benches: shared options, rounds, what is printed, and bad input."""

from __future__ import annotations

import inspect
import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import torch
import typer
from typer.testing import CliRunner

from blendrag.config import DEFAULT_POLICY
from blendrag.fusor.selection import POLICIES
from blendrag.lab.bench import load_bench, options
from blendrag.lab.bench.options import OMIT, bench
from blendrag.lab.bench.rounds import CheckedWay, Tick, measure_part, peak_bytes, run_rounds, silent
from blendrag.lab.tables import ResultTable
from cli.commands import invoke, said
from lab.bench.small import SMALL, measured


@dataclass(frozen=True)
class Size:
    rows: Annotated[int, typer.Option(min=1, help="How many.")] = 3
    wide: bool = False


@dataclass(frozen=True)
class Measured:
    size: str
    name: str


def run(measure: Callable[..., Measured], *args: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(options.BENCHES[measure.__name__].command)
    result = CliRunner().invoke(app, args)
    return result.exit_code, result.output


def shown(result: Measured) -> ResultTable:
    return ResultTable(("size", "name"), [(result.size, result.name)])


# -- options --------------------------------------------------------------------------------------


def test_a_function_that_measures_becomes_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "BENCHES", {})

    @bench(shown)
    def one(
        size: Size, name: Annotated[str, typer.Option()] = "a", tick: Tick = silent
    ) -> Measured:
        return Measured(str(size), name)

    @bench(shown, rows=30, wide=OMIT)
    def other(size: Size, tick: Tick = silent) -> Measured:
        return Measured(str(size), "")

    assert json.loads(run(one, "--json")[1])["size"] == str(Size())
    printed = run(one, "--wide", "--rows", "7", "--name", "b")[1]
    assert str(Size(7, True)) in printed
    status, text = run(one, "--rows", "0")
    assert status == 2
    assert "--rows" in text
    helped = run(one, "--help")[1]
    assert "How many." in helped
    for absent in ("--size", "--tick", "--plot"):
        assert absent not in helped
    assert json.loads(run(other, "--json")[1])["size"] == str(Size(30))
    assert run(other, "--wide")[0] == 2
    assert one(Size(1)) == Measured(str(Size(1)), "a")


@pytest.mark.parametrize("command", ["ttft", "trace"])
def test_the_help_of_policy_names_every_policy(command: str) -> None:
    helped = invoke("bench", command, "--help").stdout.replace("│", " ")
    listed = " ".join(helped.split()).partition("--policy")[2].partition("--schedule")[0]
    for name in POLICIES:
        counted = POLICIES[name].k is not None
        assert f"{name}(k)" in listed if counted else f"{name}," in listed, name


@pytest.mark.parametrize("name", ["ttft", "sweep", "throughput", "trace", "load", "auto"])
def test_benches_share_their_options(name: str) -> None:
    parameters = inspect.signature(load_bench(name).command).parameters
    shared = {"geometry", "model", "dtype", "device", "chunks", "chunk_tokens", "question_tokens",
              "policy", "schedule", "encoding", "as_json"}  # fmt: skip
    assert shared <= set(parameters)
    assert parameters["policy"].default == ("random" if name == "trace" else DEFAULT_POLICY)
    assert ("rounds" in parameters) == (name != "load")
    assert ("ratio" in parameters) == (name != "auto")
    assert ("plot" in parameters) == (name in ("sweep", "trace", "load"))


def test_the_json_repeats_the_command_without_its_destinations(tmp_path: Path) -> None:
    out = tmp_path / "t.json"
    fields = measured(
        "trace", *SMALL, "--out", str(out), "--tier", "disk", "--policy", "boundary(4)"
    )
    words = shlex.split(fields["command"])
    assert words[:3] == ["blendrag", "bench", "trace"]
    given = [*SMALL, "--tier", "disk", "--policy", "boundary(4)"]
    assert sorted(words[3:]) == sorted(given)
    assert invoke(*words[1:], "--json").exit_code == 0


# -- rounds ---------------------------------------------------------------------------------------


def way_of(name: str, calls: list[str], seconds: list[float]) -> CheckedWay:
    left = iter(seconds)

    @contextmanager
    def opened() -> Iterator[Callable[[], float]]:
        calls.append(name)
        yield lambda: next(left)

    return CheckedWay(name, opened)


def test_each_round_starts_with_another_way_and_the_first_does_not_count() -> None:
    calls: list[str] = []
    slow, fast = way_of("slow", calls, [9, 4, 8, 6]), way_of("fast", calls, [9, 2, 1, 3])
    rows = measure_part("part", [slow, fast], 3, lambda text: None, "slow")
    assert calls == ["slow", "fast", "fast", "slow", "slow", "fast", "fast", "slow"]
    assert [(row.ms, row.low_ms, row.high_ms) for row in rows] == [
        (6000, 4000, 8000), (2000, 1000, 3000),
    ]  # fmt: skip
    assert [row.speed for row in rows] == [1.0, 2.0]  # of 2, 8 and 2


def test_rounds_prepare_each_call_and_settle_after_the_warm_up() -> None:
    calls: list[str] = []
    ways = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    run_rounds(ways, 1, prepare=lambda n: calls.append(f"({n})"), settle=lambda: calls.append("|"))
    assert "".join(calls) == "(a)a(b)b|(b)b(a)a"


def test_peak_memory_is_measured_from_the_start_of_the_work() -> None:
    peak = peak_bytes(lambda: torch.ones(16 << 20, dtype=torch.uint8).sum(), torch.device("cpu"))
    assert peak is None or peak >= 15 << 20


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [("ttft", "--rounds", "0"), ("ttft", "--chunks", "0"), ("ttft", "--chunk-tokens", "0"),
     ("ttft", "--question-tokens", "-1"), ("ttft", "--ratio", "1.5"), ("sweep", "--rounds", "0"),
     ("trace", "--ratio", "-0.1"), ("load", "--requests", "0"), ("load", "--skew", "-1"),
     ("load", "--skew", "nan"), ("load", "--warm-requests", "-1"), ("auto", "--min-ratio", "nan"),
     ("auto", "--min-ratio", "1.1"), ("ingest", "--chunks", "0"), ("ingest", "--chunk-tokens", "-1"),
     ("ingest", "--reingest-chunks", "-1"), ("ingest", "--reingest-chunk-tokens", "5000")],
)  # fmt: skip
def test_a_number_out_of_range_names_its_option(command: str, option: str, value: str) -> None:
    result = invoke("bench", command, "--geometry", "tiny", option, value, "--json")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith(f"Error: Invalid value for '{option}'")
    assert result.stdout == ""


@pytest.mark.parametrize("model", [("--geometry", "tiny"), ("--model", "demo")])
@pytest.mark.parametrize("command", ["ttft", "sweep", "ingest"])
def test_an_unknown_dtype_is_refused(command: str, model: tuple[str, str]) -> None:
    result = invoke("bench", command, *model, "--dtype", "int8", "--json")
    assert result.exit_code == 2
    expected = "error: dtype 'int8' is not one of auto, float32, float16, bfloat16"
    assert said(result) == expected


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [((), "give either --geometry or --model"),
     (("--geometry", "tiny", "--model", "demo"), "give either --geometry or --model"),
     (("--geometry", "huge"), "geometry 'huge' is not one of"),
     (("--geometry", "tiny", "--chunks", "5000"), "exceeds the context of 32768"),
     (("--geometry", "tiny", "--policy", "magic"), "magic"),
     (("--geometry", "tiny", "--encoding", "int3"), "encoding 'int3' is not one of"),
     (("--geometry", "tiny", "--device", "abacus"), "device 'abacus'")],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused_in_one_sentence(
    wrong: tuple[str, ...], sentence: str
) -> None:
    result = invoke("bench", "ttft", "--chunk-tokens", "16", *wrong)
    assert result.exit_code == 2
    assert sentence in said(result)
    assert result.stdout == ""


@pytest.mark.parametrize("command", ["ttft", "sweep", "throughput", "trace", "load"])
def test_a_bad_tier_is_refused_before_anything_is_loaded(command: str) -> None:
    result = invoke("bench", command, "--geometry", "none such", "--tier", "1e-300B/s")
    assert result.exit_code == 2
    assert said(result).startswith("error: tier '1e-300B/s' is slower than any disk")
