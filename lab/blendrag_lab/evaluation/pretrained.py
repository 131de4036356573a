"""Pretrained models: the commands that measure how near answers are to full prefill's, and their tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from blendrag.config import DEFAULT_POLICY
from blendrag_lab.evaluation.rows import ALL, ArenaRow
from blendrag_lab.evaluation.tasks import TASKS
from blendrag_lab.evaluation.ways import FULL, NONE, REUSE
from blendrag_lab.tables import NOTHING, Column, interval, table

#: The folder of all models in commands, which are kept and compared.
MODELS = "MODELS"
#: Policies, ratios and size of every run.
_OPTIONS = (
    "--dtype bfloat16 --policies reuse,cacheblend,hkvd,query,query+shift,query+hkvd,blend "
    "--ratio 0.15 --ratio 0.3 --schedules constant --chunks 6 --chunk-tokens 512 --contexts {} "
    "--max-new-tokens 32 --json"
)
_PICTURE = (
    "![KL per token recovered against time to first token, by model, mean of the tasks]"
    "(quality/pretrained-ttft.png)"
)


def pretrained_runs(
    models: Sequence[Path], questions: Sequence[Path], contexts: int
) -> dict[str, tuple[str, ...]]:
    """Commands by the name of their run: each model on each file of questions and on each task."""
    sources = [*(path.name for path in questions), *TASKS]
    options = _OPTIONS.format(contexts)
    return {
        f"{model.name}-{Path(source).stem}": (
            f"blendrag eval --model {MODELS}/{model.name} --dataset {source} {options}",
        )
        for model in models
        for source in sources
    }


def stand_ins(models: Sequence[Path], questions: Sequence[Path]) -> dict[str, Path]:
    """What the arguments of those commands stand for."""
    named = {f"{MODELS}/{path.name}": path for path in models}
    return named | {path.name: path for path in questions}


@dataclass(frozen=True)
class Fidelity:
    """One way on one task, or the mean of several; fields as in :class:`ArenaRow`."""

    policy: str
    schedule: str
    ratio: float
    charged_ratio: float
    n: int
    token_kl: float
    reuse_kl: float
    agreement: float
    relative_ttft: float
    """Median TTFT over that of full prefill in the same run."""
    recovered: float | None
    recovered_low: float | None = None
    recovered_high: float | None = None
    f1: float | None = None
    full_f1: float | None = None


#: The ways of a model, by task.
ByTask = dict[str, list[Fidelity]]


def fidelities(rows: Sequence[ArenaRow]) -> list[Fidelity]:
    """A point for each row of one run over all kinds of question; summaries have no F1."""
    whole = {row.way: row for row in rows if row.kind == ALL and row.policy != NONE}
    by_policy = {row.policy: row for row in whole.values()}
    full, reuse = by_policy[FULL], by_policy[REUSE]
    is_f1 = full.metric == "f1"
    return [
        Fidelity(
            row.policy, row.schedule, row.ratio, row.charged_ratio, row.n, row.token_kl or 0.0,
            reuse.token_kl or 0.0, row.agreement or 0.0, row.ttft_ms / full.ttft_ms, row.recovered,
            row.recovered_low, row.recovered_high, row.f1 if is_f1 else None,
            full.f1 if is_f1 else None,
        )
        for row in whole.values()
    ]  # fmt: skip


def mean_of(points: Sequence[Fidelity]) -> Fidelity:
    """The mean of one way over several tasks or models. Recovered: of the mean KL, no interval."""

    def mean(name: str) -> float:
        return fmean(getattr(point, name) for point in points)

    kl, reuse_kl = mean("token_kl"), mean("reuse_kl")
    return replace(
        points[0],
        charged_ratio=mean("charged_ratio"),
        n=sum(point.n for point in points),
        token_kl=kl,
        reuse_kl=reuse_kl,
        agreement=mean("agreement"),
        relative_ttft=mean("relative_ttft"),
        recovered=1 - kl / reuse_kl if reuse_kl else None,
        recovered_low=None,
        recovered_high=None,
        f1=None,
        full_f1=None,
    )


def means_of_models(models: Mapping[str, ByTask]) -> dict[str, list[Fidelity]]:
    """The mean over the tasks of a model, of every way that was measured on all of them."""
    found = {}
    for model, tasks in models.items():
        ways: dict[tuple[str, float], list[Fidelity]] = {}
        for point in (point for task in tasks.values() for point in task):
            ways.setdefault((point.policy, point.ratio), []).append(point)
        found[model] = [mean_of(points) for points in ways.values() if len(points) == len(tasks)]
    return found


def pretrained_text(models: Mapping[str, ByTask]) -> str:
    """The default policy: a table for each ratio, a line for each model, a cell for each task."""
    if not models:
        return "Not measured yet; `make arena-real` does."
    grids: dict[float, dict[str, dict[str, Fidelity]]] = {}
    for model, tasks in models.items():
        for task, points in tasks.items():
            for point in points:
                if point.policy == DEFAULT_POLICY:
                    grids.setdefault(point.ratio, {}).setdefault(model, {})[task] = point
    titled = (
        f"**`{DEFAULT_POLICY}`, r = {ratio:.2f}**\n\n{_grid(grids[ratio])}"
        for ratio in sorted(grids)
    )
    return "\n\n".join((*titled, _PICTURE))


def _grid(models: Mapping[str, Mapping[str, Fidelity]]) -> str:
    names = sorted({task for tasks in models.values() for task in tasks})
    names.sort(key=lambda name: name in TASKS)  # files of questions first
    lines = [(model, dict(tasks)) for model, tasks in models.items()]
    for _, line in lines:
        if len(line) == len(names):  # means over other tasks cannot be compared
            line[""] = mean_of([*line.values()])
    if len(lines) > 1:
        of = {name: [line[name] for _, line in lines if name in line] for name in (*names, "")}
        lines.append(("mean", {name: mean_of(points) for name, points in of.items() if points}))

    def cell(name: str) -> Column:
        return name or "mean", lambda line: _cell(line[1].get(name))

    columns = [("model", lambda line: line[0]), *map(cell, (*names, ""))]
    return table(columns, lines).markdown()


def _cell(point: Fidelity | None) -> str:
    if point is None:
        return NOTHING
    recovered, *bounds = interval(
        point.recovered, point.recovered_low, point.recovered_high
    ).partition(" ")
    parts = [
        f"{point.reuse_kl:.2g} → {point.token_kl:.2g}",
        f"**{recovered}**{''.join(bounds)}",
        f"{point.agreement:.2f}; n = {point.n}",
    ]
    if point.f1 is not None:
        parts.append(f"F1 {point.full_f1:.2f} → {point.f1:.2f}")
    return "<br>".join(parts)
