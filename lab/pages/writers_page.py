"""Writers: the commands that compare the default policy with and without one, and their tables."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from blendrag.config import DEFAULT_POLICY, DEFAULT_SCHEDULE
from blendrag_lab.evaluation.pretrained import MODELS, ByTask, Fidelity, mean_of
from blendrag_lab.evaluation.tasks import TASKS
from blendrag_lab.evaluation.ways import REUSE
from blendrag_lab.tables import NOTHING, Column, interval, number, table

#: The folder of all writers in commands; one is named as its model.
WRITERS = "WRITERS"
#: The run that times the ways of a model, and its questions.
TIMES, TIMED_QUESTIONS = "ttft", 6
_COMMAND = (
    f"blendrag eval --model {MODELS}/{{0}} --writer {WRITERS}/{{0}} --dataset {{1}} --dtype bfloat16 "
    f"--policies {REUSE},{DEFAULT_POLICY} --ratio 0.05 --ratio 0.15 --ratio 0.3 "
    f"--schedules {DEFAULT_SCHEDULE} --chunks 6 --chunk-tokens 512 --contexts {{2}} "
    "--max-new-tokens {3} --fidelity --json"
)
_SUFFIX = "+writer"
_PICTURE = (
    "![Agreement with full prefill and KL recovered against time to first token, with a writer and without]"
    "(quality/writers-frontier.png)"
)


def writer_runs(
    models: Sequence[Path], questions: Sequence[Path], contexts: int
) -> dict[str, tuple[str, ...]]:
    """Commands by the name of their run: each model with its writer on each file of questions and each task,
    and one that is there for the times."""
    sources = [*(path.name for path in questions), *TASKS]
    runs: dict[str, tuple[str, ...]] = {}
    for name in (path.name for path in models):
        for source in sources:
            made = _COMMAND.format(name, source, contexts, 32)
            runs[f"{name}-{Path(source).stem}"] = (made,)
        runs[f"{name}-{TIMES}"] = (_COMMAND.format(name, sources[0], TIMED_QUESTIONS, 1),)
    return runs


def writer_of(command: str) -> str:
    words = shlex.split(command)
    return Path(words[words.index("--writer") + 1]).name


def timed_by(points: Sequence[Fidelity], times: Sequence[Fidelity]) -> list[Fidelity]:
    """``points`` with the TTFT of the run ``times``, where it has their way."""
    known = {(each.policy, each.ratio): each.relative_ttft for each in times}
    return [
        replace(each, relative_ttft=known.get((each.policy, each.ratio), each.relative_ttft))
        for each in points
    ]


def frontiers(measured: Mapping[str, ByTask]) -> dict[str, list[Fidelity]]:
    """By writer, the mean over the files of questions: the default policy with the writer and without, from
    r = 0, which is reuse, up."""
    found = {}
    for name, tasks in measured.items():
        ways: dict[tuple[str, float], list[Fidelity]] = {}
        for points in _files_of(tasks).values():
            for each in points:
                policy = each.policy.replace(REUSE, DEFAULT_POLICY)
                way = replace(each, policy=policy, schedule=DEFAULT_SCHEDULE)
                ways.setdefault((policy, each.ratio), []).append(way)
        if ways:
            found[name] = [
                points[0] if len(points) == 1 else mean_of(points) for points in ways.values()
            ]
    return found


def _files_of(tasks: ByTask) -> ByTask:
    return {name: points for name, points in tasks.items() if name not in TASKS}


def writers_text(measured: Mapping[str, ByTask]) -> str:
    """The frontier, a table by ratio for the files of questions, and one by task where nothing is
    recomputed."""
    if not measured:
        return "Not measured yet; `make arena-real` with `WRITERS` does."
    pairs = [
        (name, each, _with_writer(each, points))
        for name, tasks in measured.items()
        for points in _files_of(tasks).values()
        for each in points
        if each.policy in (REUSE, DEFAULT_POLICY)
    ]
    columns: list[Column] = [
        ("writer", lambda pair: pair[0]),
        ("n", lambda pair: str(pair[1].n)),
        ("r", lambda pair: f"{pair[1].ratio:.2f}"),
        ("KL per token", lambda pair: _change(pair, "token_kl", ".2g")),
        ("recovered", lambda pair: f"{_recovered(pair[1])} → **{_recovered(pair[2])}**"),
        ("agreement", lambda pair: _change(pair, "agreement", ".3f")),
        ("TTFT", lambda pair: f"{1 / pair[2].relative_ttft:.1f}× faster"),
    ]
    parts = [_PICTURE, table(columns, pairs).markdown()]
    tasks = [task for task in TASKS if any(task in of for of in measured.values())]
    return "\n\n".join([*parts, *([_by_task(measured, tasks)] if tasks else [])])


def _by_task(measured: Mapping[str, ByTask], tasks: Sequence[str]) -> str:

    def cell(task: str) -> Column:
        return task, lambda line: _task_cell(line[1].get(task))

    return table([("r = 0", lambda line: line[0]), *map(cell, tasks)], measured.items()).markdown()


def _task_cell(points: Sequence[Fidelity] | None) -> str:
    if points is None:
        return NOTHING
    reuse = next(each for each in points if each.policy == REUSE)
    pair = ("", reuse, _with_writer(reuse, points))
    return (
        f"{_change(pair, 'token_kl', '.2g')}<br>**{_recovered(pair[2])}**<br>"
        f"{_change(pair, 'agreement', '.3f')}; n = {reuse.n}"
    )


def _with_writer(point: Fidelity, points: Sequence[Fidelity]) -> Fidelity:
    way = (point.policy + _SUFFIX, point.ratio)
    return next(each for each in points if (each.policy, each.ratio) == way)


def _change(pair: tuple[str, Fidelity, Fidelity], name: str, form: str) -> str:
    return " → ".join(number(getattr(each, name), form) for each in pair[1:])


def _recovered(point: Fidelity) -> str:
    if point.policy == REUSE:
        return "0"
    return interval(point.recovered, point.recovered_low, point.recovered_high)
