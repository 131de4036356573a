"""``blendrag bench sweep``: time to first token over one factor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from blendrag.cli.plots import require_plot, write_png
from blendrag.errors import InvalidInputError
from blendrag.lab.bench.cli import options, output
from blendrag.lab.bench.cli.spread import spread

if TYPE_CHECKING:
    from blendrag.lab.bench.sweep import SweepRow
    from blendrag.model import ModelAdapter

FactorOption = Annotated[
    str,
    typer.Option(help="ratio, chunks, chunk-tokens, context, geometry, tier or encoding."),
]
#: In place of what differs from row to row.
OPEN = "…"


@spread
def sweep(
    context: typer.Context,
    timed: options.Timed,
    work: options.Work,
    factor: FactorOption = "ratio",
    values: Annotated[
        str | None, typer.Option(help="Of the factor, comma-separated.", show_default=False)
    ] = None,
    ratios: Annotated[
        str | None, typer.Option(help="Values of the factor ratio.", show_default=False)
    ] = None,
    ratio: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Where it is not the factor.")
    ] = 0.15,
    tier: options.Tier = "disk",
    rounds: options.Count = 3,
    plot: options.Plot = None,
    as_json: options.Json = False,
) -> None:
    """Time to first token over one factor, all its values in one run."""
    from blendrag.lab.bench.geometry import bench_adapter
    from blendrag.lab.bench.sweep import Case, SweepResult, make_cases, run_sweep
    from blendrag.lab.bench.tiers import parse_tier

    _check(timed, factor, values, ratios)
    require_plot(plot)
    base = Case("", work.at(ratio, rounds), parse_tier(tier), timed.geometry)
    cases = make_cases(factor, values if ratios is None else ratios, base)
    loaded: list[ModelAdapter] = []

    def adapter_of(name: str | None) -> ModelAdapter:
        loaded.append(bench_adapter(name, timed.model, timed.dtype, timed.device))
        return loaded[-1]

    with options.status("loading") as status:
        rows = run_sweep(adapter_of, factor, cases, status.update)
    result = SweepResult(
        factor, _about(timed, work, factor, f"{ratio:g}", tier), rounds, tuple(rows)
    )
    if as_json:
        output.print_json(asdict(result), context, loaded[0])
    else:
        _print(rows, ", ".join(result.about))
    if plot is not None:
        from blendrag.lab.plots import sweep_figure

        write_png(sweep_figure(result), plot)


def _check(timed: options.Timed, factor: str, values: str | None, ratios: str | None) -> None:
    if ratios is not None and (factor != "ratio" or values is not None):
        raise InvalidInputError(
            f"--ratios {ratios!r} beside --factor {factor} and --values; name the values of one factor"
        )
    if factor == "geometry" and (timed.geometry, timed.model) != (None, None):
        raise InvalidInputError(
            "--factor geometry beside --geometry or --model; name geometries by --values"
        )


def _about(
    timed: options.Timed, work: options.Work, factor: str, ratio: str, tier: str
) -> tuple[str, str]:
    """What was as it is for all values; the factor's own is left open."""
    chunks, chunk_tokens, encoding = str(work.chunks), str(work.chunk_tokens), work.encoding
    chunks = OPEN if factor in ("chunks", "context") else chunks
    chunk_tokens = OPEN if factor == "chunk-tokens" else chunk_tokens
    ratio = OPEN if factor == "ratio" else ratio
    encoding = OPEN if factor == "encoding" else encoding
    tier = OPEN if factor == "tier" else tier
    return (
        f"{timed.model or timed.geometry or OPEN}, {chunks} × {chunk_tokens} + {work.question_tokens} tokens",
        f"{work.policy} at r = {ratio}, {encoding} KV from {tier}",
    )


def _print(rows: Sequence[SweepRow], title: str) -> None:
    table = Table(title=title)
    for column in (
        rows[0].factor, "tokens", "charged", "TTFT ms", "lowest", "highest", "speedup", "floor", "of floor",
        "reuse",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.label, str(row.prompt_tokens), f"{row.charged_ratio:.3f}", f"{row.ms:.0f}",
            *(f"{ms:.0f}" for ms in row.spread_ms), f"{row.speedup:.2f}×",
            f"{row.floor_speedup:.2f}×", f"{row.speedup / row.floor_speedup:.2f}",
            f"{row.reuse_speedup:.2f}×",
        )  # fmt: skip
    Console().print(table)
