"""``blendrag bench``: parse, measure, print a table or JSON; a file for each command.

Imports torch only inside commands.
"""

from __future__ import annotations

import typer

from blendrag.lab.bench.cli.auto import auto
from blendrag.lab.bench.cli.command import BenchCommand
from blendrag.lab.bench.cli.ingest import ingest
from blendrag.lab.bench.cli.load import load
from blendrag.lab.bench.cli.overhead import overhead
from blendrag.lab.bench.cli.recognise import recognise
from blendrag.lab.bench.cli.store import store
from blendrag.lab.bench.cli.sweep import sweep
from blendrag.lab.bench.cli.throughput import throughput
from blendrag.lab.bench.cli.trace import trace
from blendrag.lab.bench.cli.ttft import ttft

app = typer.Typer(no_args_is_help=True, help="Measure speed: interleaved modes, medians, ratios.")


@app.callback()
def bench() -> None:
    """Measure speed: interleaved modes, medians, ratios."""


for command in (ttft, sweep, throughput, trace, load, auto, overhead, ingest, store, recognise):
    app.command(cls=BenchCommand)(command)
