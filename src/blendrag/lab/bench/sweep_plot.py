"""A sweep as a picture: TTFT of full prefill, reuse and blend by the factor's value. Needs matplotlib.

Of a factor whose values are limits, by the tokens that the prompts have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from blendrag.cli.figures import BASELINES, Line, draw, legend, log_scale, looks, panels, title
from blendrag.lab.bench.sweep import LIMITS, SweepResult, SweepRow

#: Factors whose values are numbers; the values of others stand side by side.
NUMBERS = ("ratio", "chunks", "chunk-tokens", "context")
#: Of these, the ones whose values double.
DOUBLING = ("chunk-tokens", "context")


def by_value(result: SweepResult) -> Figure:
    """Medians with the lowest and highest time; the title says what else was as it was."""
    figure, (axes,) = panels(1)
    factor, rows = result.factor, result.rows
    values = [str(row.prompt_tokens) if factor in LIMITS else row.value for row in rows]
    x = [float(value) if factor in NUMBERS else i for i, value in enumerate(values)]
    draw(axes, _lines(rows, x, joined=factor in NUMBERS))
    if factor in DOUBLING:
        axes.set_xscale("log", base=2)
    if factor != "ratio":  # of which there may be too many, too close to one another
        axes.set_xticks(x, values)
        axes.set_xticks([], minor=True)
    axes.set(
        xlabel="tokens of the prompt" if factor in LIMITS else factor,
        ylabel="milliseconds to the first token",
    )
    log_scale(axes)
    title(axes, "\n".join(result.about))
    legend(figure, [axes])
    return figure


def _lines(rows: Sequence[SweepRow], x: Sequence[float], joined: bool) -> list[Line]:
    found = [
        ("full prefill", BASELINES["full"], [(row.full_ms, row.full_spread_ms) for row in rows]),
        ("reuse", BASELINES["reuse"], [(row.reuse_ms, row.reuse_spread_ms) for row in rows]),
        ("blend", looks(["blend"])["blend"], [(row.ms, row.spread_ms) for row in rows]),
    ]
    return [
        Line(
            label,
            look if joined else replace(look, dash="none"),
            x,
            [ms for ms, _ in times],
            [low for _, (low, _) in times],
            [high for _, (_, high) in times],
        )
        for label, look, times in found
    ]
