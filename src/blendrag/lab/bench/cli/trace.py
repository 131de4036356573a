"""``blendrag bench trace``: one request's timeline, and how far loading hides behind computing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from blendrag.cli.plots import require_place, require_plot, write_png
from blendrag.lab.bench.cli import options, output
from blendrag.lab.bench.cli.spread import spread

if TYPE_CHECKING:
    from blendrag.lab.bench.trace import TraceResult


@dataclass(frozen=True)
class Layered(options.Work):
    """By default of a policy whose layers overlap one by one."""

    policy: options.Policy = "random"


@spread
def trace(
    context: typer.Context,
    timed: options.Timed,
    work: Layered,
    out: Annotated[
        Path | None,
        typer.Option(help="Write a Chrome/Perfetto trace (JSON) here.", show_default=False),
    ] = None,
    plot: options.Plot = None,
    ratio: options.Ratio = 0.15,
    rounds: options.Count = 5,
    tier: Annotated[
        str,
        typer.Option(
            help="memory, disk, cold, a throughput, or balanced: loading takes as long as computing."
        ),
    ] = "balanced",
    as_json: options.Json = False,
) -> None:
    """One request per layer: load, re-position, select, compute; and how much of them overlaps."""
    from blendrag.lab.bench.tiers import parse_tier
    from blendrag.lab.bench.trace import BALANCED, run_trace, write_trace

    if tier != BALANCED:
        parse_tier(tier)  # fail before anything is loaded
    if out is not None:
        require_place("--out", out, ".json")
    require_plot(plot)
    adapter = timed.adapter()
    with options.status("loading") as status:
        result = run_trace(adapter, work.at(ratio, rounds), tier, status.update)
    if out is not None:
        write_trace(out, result)
    if plot is not None:
        from blendrag.lab.plots import trace_figure

        write_png(trace_figure(result), plot)
    if as_json:
        output.print_json(result.as_dict(), context, adapter)
    else:
        _print(result)


def _print(result: TraceResult) -> None:
    table = Table(
        title=f"{result.model}, {result.prompt_tokens} tokens, {result.policy} at r = {result.ratio:g}, "
        f"{result.encoding} KV from {result.tier}"
    )
    for column in ("what", "ms", "lowest", "highest"):
        table.add_column(column, justify="left" if column == "what" else "right")
    names = {"wall": "the request", "load": "loading alone", "compute": "computing alone"}
    times = {"wall": result.wall_ms, "load": result.load_ms, "compute": result.compute_ms}
    for key, name in names.items():
        table.add_row(name, *(f"{ms:.1f}" for ms in (times[key], *result.spread_ms[key])))
    table.add_row("bound: the longer of the two", f"{result.bound_ms:.1f}", "", "")
    Console().print(table)
    hint = "" if result.comparable else "; one of the two is more than twice the other"
    Console().print(
        f"overlap {result.overlap:.2f}{hint}; bound over request {result.bound_share:.2f}"
    )
