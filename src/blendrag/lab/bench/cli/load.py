"""``blendrag bench load``: first tokens under Poisson arrivals."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from blendrag.cli.plots import require_plot, write_png
from blendrag.lab.bench.cli import options, output
from blendrag.lab.bench.cli.spread import spread

if TYPE_CHECKING:
    from blendrag.lab.bench.load import LoadResult


@spread
def load(
    context: typer.Context,
    timed: options.Timed,
    work: options.Work,
    requests: options.Count = 60,
    warm_requests: Annotated[
        int, typer.Option(min=0, help="Answered first, to fill what is kept; not counted.")
    ] = 20,
    corpus_chunks: options.Count = 100,
    store_chunks: Annotated[
        int, typer.Option(min=1, help="Room of the prefix cache and of the KV store, in chunks.")
    ] = 100,
    skew: Annotated[float, typer.Option(min=0.0, max=10.0, help="Exponent of Zipf's law.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the requests and of their arrivals.")] = 0,
    ratio: options.Ratio = 0.15,
    tier: options.Tier = "disk",
    plot: options.Plot = None,
    as_json: options.Json = False,
) -> None:
    """Poisson arrivals over a skewed corpus: TTFT and throughput of full, prefix and blend by rate."""
    from blendrag.lab.bench.load import LoadWorkload, run_load
    from blendrag.lab.bench.tiers import parse_tier

    wanted = parse_tier(tier)
    require_plot(plot)
    workload = LoadWorkload(
        work.at(ratio), corpus_chunks, store_chunks, skew, requests, warm_requests, seed
    )
    adapter = timed.adapter()
    with options.status("loading") as status:
        result = run_load(adapter, workload, wanted, status.update)
    if as_json:
        output.print_json(asdict(result), context, adapter)
    else:
        _print(result)
    if plot is not None:
        from blendrag.lab.plots import load_figure

        write_png(load_figure(result), plot)


def _print(result: LoadResult) -> None:
    names = [way.way for way in result.ways]
    table = Table(
        title=f"{result.model}, {result.requests} requests, mean TTFT ms (p95) and first tokens/s by rate"
    )
    table.add_column("requests/s", justify="right")
    for name in names:
        table.add_column(name, justify="right")
    by_rate = [result.rows[i : i + len(names)] for i in range(0, len(result.rows), len(names))]
    for rows in by_rate:
        cells = (
            f"{row.mean_ttft_ms:.0f} ({row.p95_ttft_ms:.0f}), {row.throughput_per_s:.3g}/s"
            for row in rows
        )
        table.add_row(f"{rows[0].requests_per_s:.3g}", *cells)
    Console().print(table)
    for way in result.ways:
        Console().print(
            f"{way.way}: {way.service_ms:.0f} ms without load, {way.reused:.0%} of the tokens reused, "
            f"{way.equal_ttft_per_s:.3g} requests/s at {result.doubled_ttft_ms:.0f} ms"
        )
    Console().print(
        f"where full prefill's TTFT has doubled, blend sustains {result.blend_rate_ratio:.2f}× its rate, "
        f"prefix {result.prefix_rate_ratio:.2f}×"
    )
