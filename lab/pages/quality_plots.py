"""The figures of the arena, for docs/quality.md. Needs matplotlib."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from blendrag_lab.evaluation.rows import ALL
from blendrag_lab.evaluation.ways import FULL, NONE, PREFIX
from blendrag_lab.figure_styles import DASHES, log_scale, styles
from blendrag_lab.plots import BANDS, COLOURS, GREY, LineStyle, Series, draw, legend, panels, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from blendrag_lab.evaluation.deviation import DeviationReport
    from blendrag_lab.evaluation.pretrained import Fidelity
    from blendrag_lab.evaluation.rows import ArenaRow

QUALITY = "PGR (0: no context, 1: full prefill)"
#: Share of tokens that the paper calls high-deviation (§4.3).
HIGH_SHARE = 0.15


def quality_against_ttft(rows: Sequence[ArenaRow]) -> Figure:
    """Figures 12 and 13 of CacheBlend: PGR against TTFT, a point for each way, ratios of a policy joined."""
    figure, (axes,) = panels(1)
    shown = [row for row in rows if row.kind == ALL and row.policy != NONE]
    _draw_rows(axes, shown, "ttft_ms")
    _level(axes, 1.0)
    axes.set(xlabel="time to first token, ms", ylabel=QUALITY)
    _from_zero(axes)
    legend(figure, [axes])
    return figure


def quality_against_ratio(rows: Sequence[ArenaRow], kinds: Sequence[str]) -> Figure:
    """Figure 16, a panel for each kind of question: PGR against the recompute ratio."""

    def one(panel: Axes, kind: str) -> None:
        _draw_rows(panel, _reusing(rows, kind), "ratio")
        _level(panel, 1.0)
        panel.set_xlabel("recompute ratio r")
        _from_zero(panel)

    return _grid(kinds, 3, "PGR", one)


def fidelity_against_ttft(models: Mapping[str, Sequence[Fidelity]]) -> Figure:
    """Recovered KL against relative TTFT, a panel for each model."""

    def one(panel: Axes, model: str) -> None:
        _draw_rows(panel, models[model], "relative_ttft", "recovered")
        for level in (0.0, 1.0):
            _level(panel, level)
        panel.set_xlabel("TTFT, full prefill's = 1")

    return _grid(list(models), 2, "recovered (0: reuse, 1: full prefill)", one)


def agreement_against_ttft(models: Mapping[str, Sequence[Fidelity]]) -> Figure:
    """Agreement, and recovered KL, against relative TTFT, a row of panels for each writer: the policies with
    and without it."""
    figure, axes = panels(2, len(models))
    for row, (model, points) in enumerate(models.items()):
        for column, y in enumerate(("agreement", "recovered")):
            panel = axes[2 * row + column]
            _draw_rows(panel, points, "relative_ttft", y)
            _level(panel, 1.0)
            log_scale(panel, "x")
            panel.set(xlabel="TTFT, full prefill's = 1", ylabel=y)
            title(panel, model)
    legend(figure, axes)
    return figure


def _grid(
    names: Sequence[str], widest: int, ylabel: str, draw_one: Callable[[Axes, str], None]
) -> Figure:
    """A panel for each of ``names``, at most ``widest`` in a row, with one y axis."""
    columns = min(len(names), widest)
    figure, axes = panels(columns, -(-len(names) // columns), share_y="all")
    for panel, name in zip(axes, names, strict=False):
        draw_one(panel, name)
        title(panel, name)
    for panel in axes[len(names) :]:
        panel.remove()
    for panel in axes[::columns]:
        panel.set_ylabel(ylabel)
    legend(figure, axes[: len(names)])
    return figure


def quality_against_chunks(rows: Sequence[ArenaRow]) -> Figure:
    """Figure 15: PGR and TTFT over the number of chunks and over their length."""
    figure, axes = panels(2, 2, share_y="none")
    axes[1].sharey(axes[0])
    shown = [row for row in rows if row.kind == ALL and row.policy != NONE]
    n_chunks = _usual([row.n_chunks for row in shown])
    chunk_tokens = _usual([row.chunk_tokens for row in shown])
    columns = (
        ("n_chunks", f"chunks of {chunk_tokens} tokens",
         [row for row in shown if row.chunk_tokens == chunk_tokens]),
        ("chunk_tokens", f"tokens of a chunk, {n_chunks} chunks",
         [row for row in shown if row.n_chunks == n_chunks]),
    )  # fmt: skip
    for column, (x, label, there) in enumerate(columns):
        _draw_rows(axes[column], there, x)
        _draw_rows(axes[2 + column], there, x, y="ttft_ms")
        axes[2 + column].set(xlabel=label, ylim=(0, None))
        for panel in (axes[column], axes[2 + column]):
            panel.set_xticks(sorted({getattr(row, x) for row in there}))
    axes[0].set_ylabel("PGR")
    axes[2].set_ylabel("TTFT, ms")
    legend(figure, axes)
    return figure


def quality_by_schedule(rows: Sequence[ArenaRow]) -> Figure:
    """PGR at one ratio for each schedule, the policies side by side."""
    figure, (axes,) = panels(1)
    shown = [row for row in _reusing(rows, ALL) if row.has_budget and row.pgr is not None]
    schedules = list(dict.fromkeys(row.schedule for row in shown))
    known = styles(row.policy for row in shown)
    lines = []
    for policy in known:
        of = [row for row in shown if row.policy == policy]
        at = [schedules.index(row.schedule) for row in of]
        style = replace(known[policy], dash="none")
        lines.append(Series(policy, style, at, *_bounds(of, "pgr")))
    draw(axes, lines, spread=True)
    _level(axes, 1.0)
    axes.set_xticks(range(len(schedules)), schedules, rotation=45, ha="right")
    axes.set(xlabel="schedule", ylabel="PGR")
    legend(figure, [axes])
    return figure


def _reusing(rows: Sequence[ArenaRow], kind: str) -> list[ArenaRow]:
    """Rows of ``kind`` of the ways that reuse chunks out of their place."""
    others = (FULL, NONE, PREFIX)
    return [row for row in rows if row.kind == kind and row.policy not in others]


def _draw_rows(axes: Axes, rows: Sequence[Any], x: str, y: str = "pgr") -> None:
    """A line for each policy and schedule; rows without a value are left out.

    The interval of field ``y`` is in the fields ``y_low`` and ``y_high``.
    """
    there = [row for row in rows if getattr(row, y) is not None]
    known = styles(row.policy for row in there)
    several = len({row.schedule for row in there} - {""}) > 1
    groups: dict[tuple[str, str], list[Any]] = {}
    for row in there:
        groups.setdefault((row.policy, row.schedule), []).append(row)
    lines, drawn = [], Counter[str]()
    for (policy, schedule), group in groups.items():
        group.sort(key=lambda row: row.charged_ratio if "ttft" in x else getattr(row, x))
        label = f"{policy}, {schedule}" if several and schedule else policy
        style = known[policy]
        if drawn[policy]:  # further schedules of a policy are hollow and dashed
            style = replace(style, dash=DASHES[(drawn[policy] - 1) % 3 + 1], filled=False)
        drawn[policy] += 1
        lines.append(Series(label, style, [getattr(row, x) for row in group], *_bounds(group, y)))
    draw(axes, lines, spread=x == "ratio" and len(lines) > BANDS)


def _bounds(rows: Sequence[Any], y: str) -> Iterator[list[Any]]:
    """Values of field ``y``, and the bounds of their intervals."""
    return ([getattr(row, name, None) for row in rows] for name in (y, f"{y}_low", f"{y}_high"))


def _usual(values: Sequence[int]) -> int:
    """The most frequent value; the smallest of several."""
    return Counter(sorted(values)).most_common(1)[0][0]


def _from_zero(axes: Axes) -> None:
    """Start the x axis at 0, with room for a marker at 0."""
    axes.set_xlim(-0.06 * axes.get_xlim()[1], None)


def _level(axes: Axes, y: float, text: str = "") -> None:
    axes.axhline(y, color=GREY, linewidth=0.8, linestyle="--", zorder=1)
    if text:
        axes.annotate(
            text, (1.0, y), xycoords=("axes fraction", "data"), xytext=(0, -3), ha="right",
            va="top", textcoords="offset points", color=GREY, fontsize=7.5,
        )  # fmt: skip


def deviation_against_ratio(report: DeviationReport) -> Figure:
    """Figure 6: mean Δ_attn over layers against the recompute ratio, with 95% intervals."""
    figure, (axes,) = panels(1)
    _draw_rows(axes, report.points, "ratio", "attention")
    axes.set(xlabel="recompute ratio r", ylabel="attention deviation, relative", ylim=(0, None))
    legend(figure, [axes])
    return figure


def deviation_distribution(report: DeviationReport) -> Figure:
    """Figure 7: share of tokens whose Δ_kv is below a value, in a low, a middle and a high layer."""
    figure, (axes,) = panels(1)
    layers = report.distribution
    lines = []
    for number, index in enumerate(sorted({0, len(layers) // 2, len(layers) - 1})):
        quantiles = layers[index].quantiles
        shares = [i / (len(quantiles) - 1) for i in range(len(quantiles))]
        style = LineStyle(COLOURS[number], "none", ("-", "--", ":")[number])
        lines.append(Series(f"layer {layers[index].layer}", style, quantiles, shares))
    draw(axes, lines)
    _level(axes, 1 - HIGH_SHARE, f"{1 - HIGH_SHARE:.0%} of the tokens")
    axes.set(xlabel="KV deviation, relative", ylabel="share of tokens below", ylim=(0, 1.02))
    _from_zero(axes)
    legend(figure, [axes])
    return figure


def layer_correlation(report: DeviationReport) -> Figure:
    """Figure 8: Spearman's correlation of Δ_kv between neighbouring layers, with 95% intervals."""
    figure, (axes,) = panels(1, legend=False)
    pairs = report.correlation
    at, rho = list(range(len(pairs))), [pair.rho for pair in pairs]
    reach = [[pair.rho - pair.low for pair in pairs], [pair.high - pair.rho for pair in pairs]]
    axes.bar(at, rho, color=COLOURS[0], width=0.6)
    axes.errorbar(at, rho, yerr=reach, fmt="none", color="#000000", capsize=2, linewidth=1)
    names = [f"{pair.layer}–{pair.layer + 1}" for pair in pairs]
    axes.set_xticks(at, names, rotation=0 if len(names) < 10 else 90)
    axes.set(xlabel="neighbouring layers", ylabel="Spearman's ρ of KV deviation")
    axes.set_ylim(min(0.0, *rho), 1.02)
    axes.grid(visible=False, axis="x")
    return figure
