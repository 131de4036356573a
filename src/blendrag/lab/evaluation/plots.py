"""CacheBlend's figures from the arena's rows and the report on deviations, one function each.

Owns which numbers stand on which axis. Rows are those of ``blendrag eval --json``, deviations those of
:mod:`blendrag.lab.evaluation.deviation_report`, both as plain mappings, so that kept files can be drawn
again. Quality is PGR (0: no context, 1: full prefill) with its bootstrap interval; rows whose PGR is
undefined are left out. Does not know how figures look (:mod:`blendrag.cli.plots`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from blendrag.cli.plots import (
    BANDS,
    COLOURS,
    DASHES,
    GREY,
    Line,
    Style,
    draw,
    from_zero,
    legend,
    panels,
    styles,
    title,
)

Row = Mapping[str, Any]

ALL = "all"
QUALITY = "PGR (0: no context, 1: full prefill)"
#: What tells two series of one policy apart, where it varies.
DIMENSIONS = ("schedule", "encode_prefix", "dataset", "seed")
#: Ways without a recompute ratio.
COMPUTING = ("full", "none", "prefix", "map-reduce", "map-rerank")
#: Share of tokens that the paper calls high-deviation (§4.3).
HIGH_SHARE = 0.15


# -- deviations ---------------------------------------------------------------------------------


def deviation_against_ratio(report: Row) -> Figure:
    """Figure 6: mean Δ_attn over layers against the recompute ratio, with 95% intervals."""
    figure, (axes,) = panels(1)
    points = report["points"]
    draw(axes, lines(points, "ratio", "attention", "attention_low", "attention_high"))
    axes.set(xlabel="recompute ratio r", ylabel="attention deviation, relative", ylim=(0, None))
    legend(figure, [axes])
    return figure


def deviation_distribution(report: Row) -> Figure:
    """Figure 7: share of tokens whose Δ_kv stays below a value, in a low, a middle and a high layer."""
    figure, (axes,) = panels(1)
    layers = report["distribution"]
    picked = sorted({0, len(layers) // 2, len(layers) - 1})
    found = []
    for number, index in enumerate(picked):
        quantiles = layers[index]["quantiles"]
        shares = [i / (len(quantiles) - 1) for i in range(len(quantiles))]
        look = Style(COLOURS[number], "none", ("-", "--", ":")[number])
        found.append(Line(f"layer {layers[index]['layer']}", look, quantiles, shares))
    draw(axes, found)
    _level(axes, 1 - HIGH_SHARE, f"{1 - HIGH_SHARE:.0%} of the tokens")
    axes.set(xlabel="KV deviation, relative", ylabel="share of tokens below", ylim=(0, 1.02))
    from_zero(axes)
    legend(figure, [axes])
    return figure


def layer_correlation(report: Row) -> Figure:
    """Figure 8: Spearman's correlation of Δ_kv between neighbouring layers, with 95% intervals."""
    figure, (axes,) = panels(1, legend=False)
    pairs = report["correlation"]
    at, rho = list(range(len(pairs))), [pair["rho"] for pair in pairs]
    reach = [
        [pair["rho"] - pair["low"] for pair in pairs],
        [pair["high"] - pair["rho"] for pair in pairs],
    ]
    axes.bar(at, rho, color=COLOURS[0], width=0.6)
    axes.errorbar(at, rho, yerr=reach, fmt="none", color="#000000", capsize=2, linewidth=1)
    names = [f"{pair['layer']}–{pair['layer'] + 1}" for pair in pairs]
    axes.set_xticks(at, names, rotation=0 if len(names) < 10 else 90)
    axes.set(xlabel="neighbouring layers", ylabel="Spearman's ρ of KV deviation")
    axes.set_ylim(min(0.0, *rho), 1.02)
    axes.grid(visible=False, axis="x")
    return figure


# -- the arena ----------------------------------------------------------------------------------


def quality_against_ttft(rows: Sequence[Row], kind: str = ALL) -> Figure:
    """Figures 12 and 13: quality against TTFT, a point for each way, ratios of a policy joined."""
    figure, (axes,) = panels(1)
    of = [row for row in rows if row["kind"] == kind and row["policy"] != "none"]
    draw(axes, lines(of, "ttft_ms", "pgr", "pgr_low", "pgr_high", by="charged_ratio"))
    _level(axes, 1.0)
    axes.set(xlabel="time to first token, ms", ylabel=QUALITY)
    from_zero(axes)
    legend(figure, [axes])
    return figure


def quality_against_ratio(rows: Sequence[Row], kinds: Sequence[str] = (ALL,)) -> Figure:
    """Figure 16, a panel for each kind of question: quality against the recompute ratio."""
    columns = min(len(kinds), 3)
    figure, axes = panels(columns, -(-len(kinds) // 3), share_y="all")
    for panel, kind in zip(axes, kinds, strict=False):
        drawn = lines(_reusing(rows, kind), "ratio", "pgr", "pgr_low", "pgr_high")
        draw(panel, drawn, spread=len(drawn) > BANDS)
        _level(panel, 1.0)
        title(panel, kind)
        panel.set_xlabel("recompute ratio r")
        from_zero(panel)
    for panel in axes[len(kinds) :]:
        panel.remove()
    for panel in axes[::columns]:
        panel.set_ylabel("PGR")
    legend(figure, axes[: len(kinds)])
    return figure


def quality_against_cost(rows: Sequence[Row], kind: str = ALL) -> Figure:
    """Figure 16 with everything charged: what a policy computes in order to choose costs as well."""
    figure, (axes,) = panels(1)
    draw(axes, lines(_reusing(rows, kind), "charged_ratio", "pgr", "pgr_low", "pgr_high"))
    _level(axes, 1.0)
    axes.set(xlabel="charged ratio, layer 0 included", ylabel=QUALITY)
    from_zero(axes)
    legend(figure, [axes])
    return figure


def quality_against_chunks(rows: Sequence[Row], kind: str = ALL) -> Figure:
    """Figure 15: quality and TTFT over the number of chunks and over their length."""
    figure, axes = panels(2, 2, share_y="none")
    axes[1].sharey(axes[0])
    of = [row for row in rows if row["kind"] == kind and row["policy"] != "none"]
    usual = {name: _usual(of, name) for name in ("n_chunks", "chunk_tokens")}
    columns = (
        ("n_chunks", "chunk_tokens", "chunks of {} tokens"),
        ("chunk_tokens", "n_chunks", "tokens of a chunk, {} chunks"),
    )
    for column, (x, fixed, label) in enumerate(columns):
        there = [row for row in of if row[fixed] == usual[fixed]]
        draw(axes[column], lines(there, x, "pgr", "pgr_low", "pgr_high"))
        draw(axes[2 + column], lines(there, x, "ttft_ms"))
        axes[2 + column].set(xlabel=label.format(usual[fixed]), ylim=(0, None))
        for panel in (axes[column], axes[2 + column]):
            panel.set_xticks(sorted({row[x] for row in there}))
    axes[0].set_ylabel("PGR")
    axes[2].set_ylabel("TTFT, ms")
    legend(figure, axes)
    return figure


def quality_by_schedule(rows: Sequence[Row], kind: str = ALL) -> Figure:
    """Quality at one ratio for each schedule, the policies side by side."""
    figure, (axes,) = panels(1)
    of = [row for row in _reusing(rows, kind) if row["schedule"]]
    schedules = list(dict.fromkeys(row["schedule"] for row in of))
    placed = [{**row, "at": schedules.index(row["schedule"]), "schedule": ""} for row in of]
    drawn = lines(placed, "at", "pgr", "pgr_low", "pgr_high")
    draw(
        axes, [replace(line, style=replace(line.style, dash="none")) for line in drawn], spread=True
    )
    _level(axes, 1.0)
    axes.set_xticks(range(len(schedules)), schedules, rotation=45, ha="right")
    axes.set(xlabel="schedule", ylabel="PGR")
    legend(figure, [axes])
    return figure


# -- rows → lines -------------------------------------------------------------------------------


def lines(
    rows: Iterable[Row], x: str, y: str, low: str = "", high: str = "", by: str = ""
) -> list[Line]:
    """One line for each policy and whatever else varies, its points ascending by ``by`` or ``x``.

    Rows without ``x`` or ``y`` are left out.
    """
    there = [row for row in rows if row.get(x) is not None and row.get(y) is not None]
    name = _namer(there)
    groups: dict[str, list[Row]] = {}
    for row in there:
        groups.setdefault(name(row), []).append(row)
    look = styles(row["policy"] for row in there)
    found, variants = [], Counter[str]()
    for label, group in groups.items():
        policy = group[0]["policy"]
        group = sorted(group, key=lambda row: (row[by or x], row[x]))
        bounds = [[row.get(bound) for row in group] if bound else [] for bound in (low, high)]
        points = ([row[x] for row in group], [row[y] for row in group])
        found.append(Line(label, _variant(look[policy], variants[policy]), *points, *bounds))
        variants[policy] += 1
    return found


def _namer(rows: Sequence[Row]) -> Callable[[Row], str]:
    """Labels: the policy and, of what else varies where it applies, the value."""
    varying = [
        field
        for field in DIMENSIONS
        if len({row.get(field) for row in rows if row.get(field) not in (None, "")}) > 1
    ]

    def name(row: Row) -> str:
        values = [_said(field, row.get(field)) for field in varying]
        return ", ".join([row["policy"], *(value for value in values if value)])

    return name


def _said(field: str, value: Any) -> str:
    if value is None or value == "":
        return ""
    if field == "encode_prefix":
        return "behind the prefix" if value else "behind nothing"
    return f"seed {value}" if field == "seed" else str(value)


def _variant(look: Style, number: int) -> Style:
    """The same colour and marker, hollow and dashed, for the further series of a policy."""
    return replace(look, dash=DASHES[(number - 1) % 3 + 1], filled=False) if number else look


def _reusing(rows: Sequence[Row], kind: str) -> list[Row]:
    """Rows of ``kind`` of the ways that reuse chunks out of their place."""
    return [row for row in rows if row["kind"] == kind and row["policy"] not in COMPUTING]


def _usual(rows: Sequence[Row], field: str) -> Any:
    """The value most rows have; the smallest of several."""
    counted = Counter(row[field] for row in rows)
    return max(sorted(counted), key=lambda value: counted[value]) if counted else None


def _level(axes: Axes, y: float, text: str = "") -> None:
    axes.axhline(y, color=GREY, linewidth=0.8, linestyle="--", zorder=1)
    if text:
        axes.annotate(
            text, (1.0, y), xycoords=("axes fraction", "data"), xytext=(0, -3), ha="right",
            va="top", textcoords="offset points", color=GREY, fontsize=7.5,
        )  # fmt: skip
