"""Pretrained models: the commands that measure how near answers are to full prefill's, and their tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from blendrag.config import DEFAULT_POLICY
from blendrag.errors import InvalidInputError
from blendrag_lab.evaluation.rows import ALL, ArenaRow, kept_by
from blendrag_lab.evaluation.scoring import Kept
from blendrag_lab.evaluation.tasks import TASKS
from blendrag_lab.evaluation.ways import FULL, NONE, REUSE
from blendrag_lab.tables import Column, number, table

#: The folder of all models in commands, which are kept and compared.
MODELS = "MODELS"
#: Policies, ratios and size of every run.
_OPTIONS = (
    "--dtype bfloat16 --policies reuse,cacheblend,query,query+shift "
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
    answers: Kept | None = None
    right_agreement: float | None = None


#: The ways of a model, by task.
ByTask = dict[str, list[Fidelity]]


def fidelities(rows: Sequence[ArenaRow]) -> list[Fidelity]:
    """A point for each row of one run over all kinds of question."""
    whole = {row.way: row for row in rows if row.kind == ALL and row.policy != NONE}
    by_policy = {row.policy: row for row in whole.values()}
    full, reuse = by_policy[FULL], by_policy[REUSE]
    return [
        Fidelity(
            row.policy, row.schedule, row.ratio, row.charged_ratio, row.n, row.token_kl or 0.0,
            reuse.token_kl or 0.0, row.agreement or 0.0, row.ttft_ms / full.ttft_ms, row.recovered,
            row.recovered_low, row.recovered_high, kept_by(row, rows),
            row.right_agreement,
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
        answers=None,
        right_agreement=None,
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
    """The default policy at each ratio: the mean over the tasks of each model, over the models of each task,
    and over all. Raises :class:`InvalidInputError` for results without it."""
    if not models:
        return "Not measured yet; `make arena-real` does."
    cells: dict[tuple[str, str], dict[float, Fidelity]] = {}
    for model, tasks in models.items():
        for task, points in tasks.items():
            of = {point.ratio: point for point in points if point.policy == DEFAULT_POLICY}
            if not of:
                raise InvalidInputError(
                    f"the results of {model} on {task} have no policy {DEFAULT_POLICY}, the default; measure "
                    "them again with make arena-real"
                )
            cells[model, task] = of
    names = sorted({task for _, task in cells})
    names.sort(key=lambda name: name in TASKS)  # files of questions first
    whole = {model: tasks for model, tasks in models.items() if len(tasks) == len(names)}
    groups = {  # means over other tasks cannot be compared
        **{model: [cells[model, task] for task in tasks] for model, tasks in whole.items()},
        **{name: [of for (_, task), of in cells.items() if task == name] for name in names},
        "all": [*cells.values()],
    }
    ratios = sorted({ratio for of in cells.values() for ratio in of})
    lines = [
        (name, {ratio: mean_of([of[ratio] for of in group if ratio in of]) for ratio in ratios})
        for name, group in groups.items()
    ]
    columns: list[Column] = [
        ("mean of", lambda line: line[0]),
        ("n", lambda line: str(line[1][ratios[0]].n)),
    ]
    for ratio in ratios:
        columns += _columns(ratio)
    parts = [table(columns, lines).markdown(), _answers_text(models), _PICTURE]
    return "\n\n".join(filter(None, parts))


def _answers_text(models: Mapping[str, ByTask]) -> str:
    """A sentence on the answers of all models and tasks together: what reuse and the default policy keep of
    those that full prefill gives right, and what they gain."""
    ways: dict[tuple[str, float], list[tuple[int, Kept]]] = {}
    for point in (point for tasks in models.values() for task in tasks.values() for point in task):
        if point.policy in (REUSE, DEFAULT_POLICY) and point.answers is not None:
            ways.setdefault((point.policy, point.ratio), []).append((point.n, point.answers))

    counts = next(iter(ways.values()), [])
    right = sum(each.right for _, each in counts)
    if not right:
        return ""
    wrong = sum(n for n, _ in counts) - right
    shares = []
    for (policy, ratio), found in ways.items():
        kept = sum(each.right * (each.kept or 0.0) for _, each in found)
        gained = sum((n - each.right) * (each.gained or 0.0) for n, each in found)
        at = "" if policy == REUSE else f" at r = {ratio:.2f}"
        shares.append(f"{kept:.0f} and {gained:.0f} by `{policy}`{at}")
    return (
        f"Full prefill answers {right} of these questions right and {wrong} wrong (summaries are neither). "
        f"Of the {right} are kept, and of the {wrong} are gained: {', '.join(shares)}."
    )


def _columns(ratio: float) -> list[Column]:
    return [
        (
            f"r = {ratio:.2f}: KL",
            lambda line: f"{line[1][ratio].reuse_kl:.2g} → {line[1][ratio].token_kl:.2g}",
        ),
        ("recovered", lambda line: number(line[1][ratio].recovered, ".2f")),
        ("agreement", lambda line: f"{line[1][ratio].agreement:.2f}"),
    ]
