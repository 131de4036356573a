"""The command line of benches: shared options, rounds, what is printed, and bad input."""

from __future__ import annotations

import inspect
import json
import shlex
import sys
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import pytest
import torch
import typer
from typer.testing import CliRunner

from blendrag.config import DEFAULT_POLICY
from blendrag.fusor.selection import POLICIES
from blendrag_lab.bench import load_bench, options
from blendrag_lab.bench.options import OMIT, bench
from blendrag_lab.bench.rounds import (
    Tick,
    Timing,
    measure_part,
    peak_bytes,
    silent,
)
from blendrag_lab.tables import ResultTable
from cli.commands import invoke, refused


@dataclass(frozen=True)
class Size:
    rows: Annotated[int, typer.Option(min=1, help="How many.")] = 3
    wide: bool = False


@dataclass(frozen=True)
class Measured:
    size: str
    name: str


def test_a_function_that_measures_becomes_a_command(monkeypatch):
    monkeypatch.setattr(options, "BENCHES", {})

    def shown(result: Measured) -> ResultTable:
        return ResultTable(("size", "name"), [(result.size, result.name)])

    def run(*args: str, of: str = "one") -> tuple[int, str]:
        app = typer.Typer()
        app.command()(options.BENCHES[of].command)
        result = CliRunner().invoke(app, args)
        return result.exit_code, result.output

    @bench(shown)
    def one(size: Size, name: str = "a", tick: Tick = silent) -> Measured:
        return Measured(str(size), name)

    @bench(shown, rows=30, wide=OMIT)
    def other(size: Size, tick: Tick = silent) -> Measured:
        return Measured(str(size), "")

    assert json.loads(run("--json")[1])["size"] == str(Size())
    given = ("--rows", "7", "--wide", "--name", "b(4)")
    assert str(Size(7, True)) in run(*given)[1]
    command = json.loads(run(*given, "--json")[1])["command"]
    assert shlex.split(command)[3:] == list(given)
    status, text = run("--rows", "0")
    assert status == 2
    assert "--rows" in text
    helped = run("--help")[1]
    assert "How many." in helped
    for absent in ("--size", "--tick", "--plot"):
        assert absent not in helped
    assert json.loads(run("--json", of="other")[1])["size"] == str(Size(30))
    assert run("--wide", of="other")[0] == 2
    assert one(Size(1)) == Measured(str(Size(1)), "a")


def test_the_help_of_policy_names_every_policy():
    helped = invoke("bench", "ttft", "--help").stdout
    listed = " ".join(helped.split()).partition("--policy")[2].partition("--schedule")[0]
    for name in POLICIES:
        counted = POLICIES[name].k is not None
        assert f"{name}(k)" in listed if counted else f"{name}," in listed, name


def test_benches_share_their_options():
    parameters = inspect.signature(load_bench("ttft").command).parameters
    shared = {"geometry", "model", "dtype", "device", "chunks", "chunk_tokens", "question_tokens",
              "policy", "schedule", "encoding", "as_json"}  # fmt: skip
    assert shared <= set(parameters)
    assert parameters["policy"].default == DEFAULT_POLICY
    assert "plot" not in parameters


def test_each_round_starts_with_another_way_and_the_first_does_not_count():
    calls: list[str] = []
    seconds = {"slow": iter([9.0, 4, 8, 6]), "fast": iter([9.0, 2, 1, 3])}

    def once(name: str) -> float:
        calls.append(name)
        return next(seconds[name])

    rows = measure_part("part", {name: partial(once, name) for name in seconds}, 3, silent, "slow")
    assert calls == ["slow", "fast", "fast", "slow", "slow", "fast", "fast", "slow"]
    assert [row.ms for row in rows] == [Timing(6000, 4000, 8000), Timing(2000, 1000, 3000)]
    assert [row.speed for row in rows] == [1.0, 2.0]  # of 2, 8 and 2


def test_peak_memory_is_measured_from_the_start_of_the_work():
    peak = peak_bytes(lambda: torch.ones(16 << 20, dtype=torch.uint8).sum(), torch.device("cpu"))
    assert peak is None or peak >= 15 << 20


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [("ttft", "--rounds", "0"), ("ttft", "--ratio", "1.5"), ("ttft", "--ratio", "nan"),
     ("ingest", "--chunk-tokens", "5000")],
)  # fmt: skip
def test_a_number_out_of_range_names_its_option(command, option, value):
    result = invoke("bench", command, "--geometry", "tiny", option, value, "--json")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith(f"Error: Invalid value for '{option}'")
    assert result.stdout == ""


TTFT = ("ttft", "--chunk-tokens", "16", "--geometry", "tiny")


@pytest.mark.parametrize(
    ("command", "sentence"),
    [(("ttft",), "give either --geometry or --model"),
     ((*TTFT, "--model", "demo"), "give either --geometry or --model"),
     (("ttft", "--geometry", "huge"), "geometry 'huge' is not one of"),
     ((*TTFT, "--chunks", "5000"), "exceeds the context of 32768"),
     ((*TTFT, "--policy", "magic"), "magic"),
     ((*TTFT, "--kv-encoding", "int3"), "kv_encoding 'int3' is not one of"),
     ((*TTFT, "--device", "abacus"), "device 'abacus'"),
     ((*TTFT, "--dtype", "int8"), "dtype 'int8' is not one of auto, float32"),
     (("ttft", "--model", "demo", "--dtype", "int8"), "dtype 'int8' is not one of auto, float32"),
     *((("attention", "--geometry", "tiny", "--shared", x), f"ratio {x!r}") for x in ("", "2", "nan")),
     *((("overhead", "--chunks", x), f"numbers of chunks {x!r}: expected") for x in ("", "6,x")),
     (("overhead", "--chunks", "1", "--policies", "magic"), "magic"),
     (("store", "--geometry", "huge"), "geometry 'huge' is not one of"),
     (("store", "--geometry", "tiny-hybrid"), "which this bench does not measure"),
     (("attention", "--geometry", "tiny-hybrid"), "which this bench does not measure"),
     (("store", "--dir", "/proc/version"), "--dir /proc/version is not a writable directory")],
)  # fmt: skip
def test_bad_input_is_refused_in_one_sentence(command, sentence):
    assert sentence in refused("bench", *command, "--json")


def test_a_plot_is_refused_before_measuring_if_it_cannot_be_written(monkeypatch):
    def said(plot: str) -> str:
        return refused("bench", "answer", "--geometry", "none such", "--plot", plot)

    assert "--plot no/such/place/p.png cannot be written" in said("no/such/place/p.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "blendrag[plots]" in said("p.png")


def test_a_bad_tier_is_refused_before_anything_is_loaded():
    said = refused("bench", "ttft", "--tier", "1B/s", "--geometry", "none such")
    assert "tier '1B/s' is none of" in said
