"""``blendrag bench sweep``: time to first token over one factor."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from blendrag.bench.cli import options
from blendrag.config import DEFAULT_POLICY, UNCALIBRATED_SCHEDULE

FactorOption = Annotated[
    str,
    typer.Option(help="ratio, chunks, chunk-tokens, context, geometry, tier or encoding."),
]


def sweep(
    factor: FactorOption = "ratio",
    values: Annotated[
        str | None, typer.Option(help="Of the factor, comma-separated.", show_default=False)
    ] = None,
    geometry: options.Geometry = None,
    model: options.Model = None,
    ratios: Annotated[
        str | None, typer.Option(help="Values of the factor ratio.", show_default=False)
    ] = None,
    ratio: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Where it is not the factor.")
    ] = 0.15,
    chunks: options.Count = 6,
    chunk_tokens: options.Count = 512,
    question_tokens: options.Count = 32,
    policy: options.Policy = DEFAULT_POLICY,
    schedule: options.Schedule = UNCALIBRATED_SCHEDULE,
    rounds: options.Count = 3,
    tier: options.Tier = "disk",
    encoding: options.Encoding = "native",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """Time to first token over one factor, all its values in one run."""
    from blendrag.bench.geometry import bench_adapter
    from blendrag.bench.sweep import Case, make_cases, run_sweep
    from blendrag.bench.tiers import parse_tier
    from blendrag.bench.workload import Workload
    from blendrag.errors import InvalidInputError

    if ratios is not None and (factor != "ratio" or values is not None):
        raise InvalidInputError(
            f"--ratios {ratios!r} beside --factor {factor} and --values; name the values of one factor"
        )
    if factor == "geometry" and (geometry, model) != (None, None):
        raise InvalidInputError(
            "--factor geometry beside --geometry or --model; name geometries by --values"
        )
    workload = Workload(
        chunks, chunk_tokens, question_tokens, ratio, policy, schedule, rounds, encoding
    )
    base = Case("", workload, parse_tier(tier), geometry)
    cases = make_cases(factor, values if ratios is None else ratios, base)
    with options.status("loading") as status:
        rows = run_sweep(
            lambda name: bench_adapter(name, model, dtype, device),
            factor,
            cases,
            lambda text: status.update(text),
        )
    if as_json:
        options.print_json({"rows": [asdict(row) for row in rows]})
        return
    table = Table(
        title=f"{model or geometry or 'by geometry'}, {chunks} × {chunk_tokens} + {question_tokens} tokens, "
        f"{policy}, {encoding} KV from {tier}, but for the factor"
    )
    for column in (
        factor, "tokens", "charged", "TTFT ms", "lowest", "highest", "speedup", "floor", "of floor", "reuse",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.value, str(row.prompt_tokens), f"{row.charged_ratio:.3f}", f"{row.ms:.0f}",
            *(f"{ms:.0f}" for ms in row.spread_ms), f"{row.speedup:.2f}×",
            f"{row.floor_speedup:.2f}×", f"{row.speedup / row.floor_speedup:.2f}",
            f"{row.reuse_speedup:.2f}×",
        )  # fmt: skip
    Console().print(table)
