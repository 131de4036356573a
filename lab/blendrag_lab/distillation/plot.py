"""A picture of a training run: losses, and KL and agreement on held-out prompts."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blendrag_lab.distillation.report import AdaptReport

#: Steps whose losses are averaged: a line of single steps is mostly noise.
SMOOTHED = 8


def write_plot(report: AdaptReport, path: Path) -> None:
    from matplotlib.figure import Figure

    progress, before = report.progress, report.before
    figure = Figure(figsize=(9.6, 2.9), layout="constrained")
    loss, kl, agreement = figure.subplots(1, 3)
    found = [(n, each) for n, each in enumerate(progress.losses, 1) if each is not None]
    steps = [n for n, _ in found]
    losses = [each for _, each in found]
    smooth = [fmean(losses[max(0, n - SMOOTHED) : n]) for n in range(1, len(losses) + 1)]
    loss.plot(steps, smooth, color="#0072B2")
    loss.set_title(f"loss, mean of {SMOOTHED} steps")
    taken = [(0, before), *((step, s) for step, s in progress.scores if s is not None)]
    measured = [step for step, _ in taken]
    scores = [score for _, score in taken]
    kl.plot(measured, [s.mean_kl for s in scores], "o-", color="#D55E00", label="mean")
    kl.plot(measured, [s.typical_kl for s in scores], "s--", color="#E69F00", label="typical")
    kl.set_title("held-out KL, nats per token")
    kl.legend(frameon=False)
    agreement.plot(measured, [s.agreement for s in scores], "o-", color="#009E73")
    agreement.set_title("held-out agreement")
    for axes in (loss, kl, agreement):
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=144, metadata={"Software": None})
