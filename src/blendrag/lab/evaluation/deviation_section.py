"""The section on deviations of the quality page: figures 6 to 8 of CacheBlend and their numbers.

Owns what is shown of a report (:mod:`blendrag.lab.evaluation.deviation_report`), a plain mapping here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from blendrag.lab.evaluation.page import head, picture, plots_module
from blendrag.lab.evaluation.runs import Result, Run
from blendrag.lab.evaluation.tables import Row, markdown, number

#: Of the points, what is shown layer by layer.
SHOWN_RATIOS = (0.05, 0.15)
#: The oracle that mended nothing is KV as it was stored.
STORED = ("oracle", 0.0)


def deviation_section(run: Run, result: Result, folder: Path) -> str:
    """Pictures go into ``folder``. Raises :class:`InvalidInputError` where matplotlib is missing."""
    plots = plots_module()
    (report,) = result.printed
    figures = (
        ("ratio", "Attention deviation against the recompute ratio (figure 6).",
         plots.deviation_against_ratio),
        ("distribution", "KV deviation of stored KV over the tokens (figure 7).",
         plots.deviation_distribution),
        ("correlation", "Rank correlation of KV deviation between neighbouring layers (figure 8).",
         plots.layer_correlation),
    )  # fmt: skip
    shown = [point for point in report["points"] if _is_shown(point)]
    parts = [
        head(run, result),
        f"{report['prompts']} prompts, {report['tokens']} chunk tokens. Layer 0 is left out where KV is "
        "compared: its K and V do not depend on other chunks.",
        *(
            picture(folder, f"{run.name}-{name}", text, draw, report)
            for name, text, draw in figures
        ),
        "Attention deviation, mean over layers, by r:",
        _by_ratio(report["points"], "attention"),
        "KV deviation, mean over tokens and layers from 1 on, by r:",
        _by_ratio(report["points"], "kv"),
        "Attention deviation by layer:",
        _by_layer(shown, "attention_by_layer"),
        "KV deviation by layer:",
        _by_layer(shown, "kv_by_layer"),
        "Spearman's ρ of KV deviation between layers: "
        + ", ".join(f"{c['layer']}–{c['layer'] + 1} {c['rho']:.2f}" for c in report["correlation"])
        + ".",
    ]
    return "\n\n".join(parts) + "\n"


def _is_shown(point: Row) -> bool:
    return (point["policy"], point["ratio"]) == STORED or point["ratio"] in SHOWN_RATIOS


def _by_ratio(points: Sequence[Row], field: str) -> str:
    """Policies down, ratios across."""
    ratios = list(dict.fromkeys(point["ratio"] for point in points))
    found = {(p["policy"], p["schedule"], p["ratio"]): p[field] for p in points}

    def at(ratio: float) -> Callable[[Row], str]:
        return lambda row: number(found.get((row["policy"], row["schedule"], ratio)), ".3f")

    ways = {(point["policy"], point["schedule"]): point for point in points}
    columns = [("policy", _named), *((f"r = {ratio:.3g}", at(ratio)) for ratio in ratios)]
    return markdown(columns, list(ways.values()))


def _by_layer(points: Sequence[Row], field: str) -> str:
    """Policies and ratios down, layers across."""

    def at(layer: int) -> Callable[[Row], str]:
        return lambda row: f"{row[field][layer]:.2f}"

    layers = len(points[0][field]) if points else 0
    columns: list[tuple[str, Callable[[Row], str]]] = [
        ("policy", lambda row: "as stored" if row["ratio"] == STORED[1] else _named(row)),
        ("r", lambda row: number(row["ratio"], ".3g")),
        *((f"layer {layer}", at(layer)) for layer in range(layers)),
    ]
    return markdown(columns, points)


def _named(point: Row) -> str:
    return f"{point['policy']}, {point['schedule']}" if point["schedule"] else str(point["policy"])
