"""The two latencies of a profile crossing: recompute by ratio, and loading from each tier (figure 10a).

Beside it both over the bytes of a prompt's chunks. Needs matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from blendrag.cli.figures import COLOURS, Line, Look, draw, legend, panels, title, write_png
from blendrag.engine.profiling import counts_for, usual_prompt
from blendrag.planning.forecast import Estimator
from blendrag.planning.parts import Part
from blendrag.planning.profile import Profile

RATIOS = tuple(i / 20 for i in range(21))
USUAL_RATIO = 0.15


def write_plot(path: Path, found: Profile, policy: str, chunks: int) -> None:
    """Draw into ``path``, a PNG."""
    write_png(latencies(found, policy, chunks), path)


def latencies(found: Profile, policy: str, chunks: int) -> Figure:
    figure, (by_ratio, by_size) = panels(2)
    prompt = usual_prompt(found, policy, chunks)
    recompute = [1e3 * _compute_s(found, policy, chunks, ratio) for ratio in RATIOS]
    lines = [Line("recompute", Look("#000000", "*"), RATIOS, recompute)]
    for look, tier in zip(_looks(len(found.tiers)), found.tiers, strict=True):
        load = 1e3 * sum(tier.seconds(sum(p.layer_bytes), found.layers) for p in prompt.parts)
        lines.append(Line(f"load, {_short(tier.name)}", look, (0.0, 1.0), (load, load)))
    draw(by_ratio, lines)
    by_ratio.set(xlabel="recompute ratio r", ylabel="milliseconds", ylim=(0, None))
    title(by_ratio, f"{chunks} chunks of {found.chunk_tokens} tokens")

    counts = sorted({1, 2, 4, chunks, 2 * chunks})
    sizes = [n * sum(found.layer_bytes) / 1e6 for n in counts]
    again = [1e3 * _compute_s(found, policy, n, USUAL_RATIO) for n in counts]
    lines = [
        Line("recompute", Look("#000000", "*"), sizes, again),
        Line("full prefill", Look("#7a7a7a", "D", "--"), sizes,
             [1e3 * found.prefill_s(usual_prompt(found, policy, n).tokens) for n in counts]),
    ]  # fmt: skip
    for look, tier in zip(_looks(len(found.tiers)), found.tiers, strict=True):
        loads = [1e3 * n * tier.seconds(sum(found.layer_bytes), found.layers) for n in counts]
        lines.append(Line(f"load, {_short(tier.name)}", look, sizes, loads))
    draw(by_size, lines)
    by_size.set(xlabel="stored KV of the prompt's chunks, MB", xscale="log", yscale="log")
    by_size.set_xticks(sizes, [f"{size:.3g}" for size in sizes])
    by_size.set_xticks([], minor=True)
    title(by_size, f"recompute at r = {USUAL_RATIO}")
    legend(figure, [by_ratio, by_size])
    return figure


def _compute_s(found: Profile, policy: str, chunks: int, ratio: float) -> float:
    """Of a prompt whose KV is there from the start."""
    prompt = usual_prompt(found, policy, chunks)
    parts: Sequence[Part] = prompt.parts
    estimator = Estimator(found, prompt, parts)
    return estimator.at(counts_for(found, policy, ratio, chunks)(estimator.candidates)).compute_s


def _looks(count: int) -> list[Look]:
    return [
        Look(COLOURS[i % len(COLOURS)], "o", ("-", "--", ":")[i // len(COLOURS) % 3])
        for i in range(count)
    ]


def _short(name: str) -> str:
    return name if len(name) <= 24 else f"…{name[-23:]}"
