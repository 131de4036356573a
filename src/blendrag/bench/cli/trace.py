"""``blendrag bench trace``: one request's timeline, and how far loading hides behind computing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from blendrag.bench.cli import options
from blendrag.config import UNCALIBRATED_SCHEDULE
from blendrag.errors import InvalidInputError

if TYPE_CHECKING:
    from blendrag.bench.trace import TraceResult


def trace(
    geometry: options.Geometry = None,
    model: options.Model = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write a Chrome/Perfetto trace (JSON) here.", show_default=False),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the timeline into this PNG.", show_default=False)
    ] = None,
    chunks: options.Count = 6,
    chunk_tokens: options.Count = 512,
    question_tokens: options.Count = 32,
    ratio: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Recompute ratio r in [0, 1].")
    ] = 0.15,
    policy: options.Policy = "random",
    schedule: options.Schedule = UNCALIBRATED_SCHEDULE,
    rounds: options.Count = 5,
    tier: Annotated[
        str,
        typer.Option(
            help="memory, disk, cold, a throughput, or balanced: loading takes as long as computing."
        ),
    ] = "balanced",
    encoding: options.Encoding = "native",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """One request per layer: load, re-position, select, compute; and how much of them overlaps."""
    from blendrag.bench.geometry import bench_adapter
    from blendrag.bench.tiers import parse_tier
    from blendrag.bench.trace import BALANCED, run_trace, write_trace
    from blendrag.bench.workload import Workload

    if tier != BALANCED:
        parse_tier(tier)  # fail before anything is loaded
    if out is not None:
        _require_directory("--out", out, ".json")
    draw = _plotter(plot)
    workload = Workload(
        chunks, chunk_tokens, question_tokens, ratio, policy, schedule, rounds, encoding
    )
    adapter = bench_adapter(geometry, model, dtype, device)
    with options.status("loading") as status:
        result = run_trace(adapter, workload, tier, lambda text: status.update(text))
    if out is not None:
        write_trace(out, result)
    if plot is not None and draw is not None:
        draw(plot, result)
    if as_json:
        options.print_json(asdict(result))
    else:
        _print(result)


def _plotter(path: Path | None) -> Callable[[Path, TraceResult], None] | None:
    """What draws; looked for before anything is measured."""
    if path is None:
        return None
    _require_directory("--plot", path, ".png")
    try:
        from blendrag.bench.trace_plot import write_plot
    except ImportError as exc:
        raise InvalidInputError(
            f"--plot {path} needs matplotlib, which is not installed; pip install 'blendrag[plots]'"
        ) from exc
    return write_plot


def _require_directory(option: str, path: Path, suffix: str) -> None:
    if path.suffix.lower() != suffix or not path.absolute().parent.is_dir():
        raise InvalidInputError(
            f"{option} {path} cannot be written, expected a file that ends in {suffix} in a directory that "
            "exists"
        )


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
    Console().print(table)
    hint = "" if result.comparable else "; one of the two is more than twice the other"
    Console().print(f"overlap {result.overlap:.2f}{hint}")
