"""A picture of a training run: losses, and KL and agreement on held-out prompts."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from blendrag_lab.distillation.report import AdaptReport
from blendrag_lab.plots import COLOURS, LineStyle, Series, draw, panels, title, write_png

#: Steps whose losses are averaged: a line of single steps is mostly noise.
SMOOTHED = 8
LOSS, AGREEMENT = LineStyle(COLOURS[0], " "), LineStyle(COLOURS[2], "o")
MEAN, TYPICAL = LineStyle(COLOURS[1], "o"), LineStyle(COLOURS[4], "s", "--")


def write_plot(report: AdaptReport, path: Path) -> None:
    figure, (loss, kl, agreement) = panels(3, legend=False)
    found = [(n, each) for n, each in enumerate(report.progress.losses, 1) if each is not None]
    steps = [n for n, _ in found]
    losses = [each for _, each in found]
    smooth = [fmean(losses[max(0, n - SMOOTHED) : n]) for n in range(1, len(losses) + 1)]
    draw(loss, [Series("loss", LOSS, steps, smooth)])
    title(loss, f"loss, mean of {SMOOTHED} steps")
    scores = [(0, report.before), *((n, s) for n, s in report.progress.scores if s is not None)]
    measured = [step for step, _ in scores]
    lines = [
        Series("mean", MEAN, measured, [score.mean_kl for _, score in scores]),
        Series("typical", TYPICAL, measured, [score.typical_kl for _, score in scores]),
    ]
    draw(kl, lines)
    title(kl, "held-out KL, nats per token")
    kl.legend(frameon=False)
    agrees = [score.agreement for _, score in scores]
    draw(agreement, [Series("agreement", AGREEMENT, measured, agrees)])
    title(agreement, "held-out agreement")
    for axes in (loss, kl, agreement):
        axes.set_xlabel("step")
    write_png(figure, path)
