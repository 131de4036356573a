"""How chunks are encoded: the commands that compare chunks encoded alone, with a writer, and after similar
ones, by the default policy, and their tables."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from blendrag.config import DEFAULT_POLICY, DEFAULT_SCHEDULE
from blendrag_lab.evaluation.pretrained import MODELS, ByTask, Fidelity, mean_of
from blendrag_lab.evaluation.tasks import TASKS
from blendrag_lab.evaluation.ways import REUSE
from blendrag_lab.tables import NOTHING, Column, interval, number, table

#: The folder of all writers in commands; one is named as its model.
WRITERS = "WRITERS"
_COMMAND = (
    f"blendrag eval --model {MODELS}/{{0}}{{4}} --encode-after 2 --dataset {{1}} "
    "--dtype bfloat16 --policies {3} --chunks 6 --chunk-tokens 512 --contexts {2} --max-new-tokens 32 "
    "--fidelity --json"
)
_FRONTIER = (
    f"{REUSE},{DEFAULT_POLICY} --ratio 0.05 --ratio 0.15 --ratio 0.3 --schedules {DEFAULT_SCHEDULE}"
)
#: What follows the name of a policy, by how its chunks are encoded.
_SUFFIXES = {
    "alone": "",
    "with a writer": "+writer",
    "after 2 similar ones": "+after2",
    "with both": "+writer+after2",
}
_PICTURE = (
    "![Agreement with full prefill and KL recovered against time to first token: chunks encoded alone, with "
    "a writer, after similar ones, with both](quality/writers-frontier.png)"
)


def writer_runs(
    models: Sequence[Path], questions: Sequence[Path], contexts: int, writers: Path
) -> dict[str, tuple[str, ...]]:
    """Commands by the name of their run: each model, with its writer if there is one, on each file of
    questions, and on each task where nothing is recomputed."""
    files = [path.name for path in questions]
    asked = {**dict.fromkeys(files, _FRONTIER), **dict.fromkeys(TASKS, REUSE)}
    runs: dict[str, tuple[str, ...]] = {}
    for name in (path.name for path in models):
        writer = f" --writer {WRITERS}/{name}" if (writers / name).is_dir() else ""
        for source, ways in asked.items():
            made = _COMMAND.format(name, source, contexts, ways, writer)
            runs[f"{name}-{Path(source).stem}"] = (made,)
    return runs


def model_of(command: str) -> str:
    words = shlex.split(command)
    return Path(words[words.index("--model") + 1]).name


def frontiers(measured: Mapping[str, ByTask]) -> dict[str, list[Fidelity]]:
    """By writer, the mean over the files of questions: the default policy over chunks encoded in each way,
    from r = 0, which is reuse, up."""
    found = {}
    shown = {each + suffix for each in (REUSE, DEFAULT_POLICY) for suffix in _SUFFIXES.values()}
    for name, tasks in measured.items():
        ways: dict[tuple[str, float], list[Fidelity]] = {}
        for points in _files_of(tasks).values():
            for each in (point for point in points if point.policy in shown):
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
    recomputed: KL per token, recovered, agreement, and how many times sooner the first token is there."""
    if not measured:
        return "Not measured yet; `make arena-real` with `WRITERS` does."
    lines = [
        (name, each, points)
        for name, tasks in measured.items()
        for points in _files_of(tasks).values()
        for each in points
        if each.policy in (REUSE, DEFAULT_POLICY)
    ]
    columns: list[Column] = [
        ("model", lambda line: line[0]),
        ("n", lambda line: str(line[1].n)),
        ("r", lambda line: f"{line[1].ratio:.2f}"),
        *(_encoded(how, lambda line: line[1:], timed=True) for how in _measured(lines)),
    ]
    parts = [_PICTURE, table(columns, lines).markdown()]
    tasks = [task for task in TASKS if any(task in of for of in measured.values())]
    return "\n\n".join([*parts, *([_by_task(measured, tasks)] if tasks else [])])


def _by_task(measured: Mapping[str, ByTask], tasks: Sequence[str]) -> str:
    lines = [
        (name, task, next(each for each in of[task] if each.policy == REUSE), of[task])
        for name, of in measured.items()
        for task in tasks
        if task in of
    ]
    columns: list[Column] = [
        ("r = 0", lambda line: line[0]),
        ("task", lambda line: line[1]),
        ("n", lambda line: str(line[2].n)),
        *(_encoded(how, lambda line: line[2:]) for how in _measured(lines)),
        ("full prefill right: agreement", lambda line: _where_right(line[2], line[3])),
    ]
    return table(columns, lines).markdown()


def _measured(lines: Sequence[tuple[Any, ...]]) -> list[str]:
    """How the chunks of ``lines``, which end with all ways of each, were encoded."""
    policies = {each.policy for line in lines for each in line[-1]}
    return [how for how, suffix in _SUFFIXES.items() if f"{REUSE}{suffix}" in policies]


def _where_right(alone: Fidelity, points: Sequence[Fidelity]) -> str:
    """How many questions full prefill answers right, and the agreement on them without and with a writer."""
    written = next((each for each in points if each.policy == f"{REUSE}+writer"), None)
    if alone.answers is None or alone.right_agreement is None or written is None:
        return NOTHING
    change = " → ".join(number(each.right_agreement, ".3f") for each in (alone, written))
    return f"n = {alone.answers.right}: {change}"


def _encoded(
    how: str, of: Callable[[Any], tuple[Fidelity, Sequence[Fidelity]]], timed: bool = False
) -> Column:
    """A column for chunks that are encoded so; ``of``: a line's way over chunks encoded alone, and all."""

    def cell(line: Any) -> str:
        alone, points = of(line)
        wanted = (alone.policy + _SUFFIXES[how], alone.ratio)
        point = next((each for each in points if (each.policy, each.ratio) == wanted), None)
        if point is None:
            return NOTHING
        times = f"; {1 / point.relative_ttft:.1f}×" if timed else ""
        parts = [number(point.token_kl, ".2g"), number(point.agreement, ".3f") + times]
        if point.policy != REUSE:
            near = interval(point.recovered, point.recovered_low, point.recovered_high)
            parts.insert(1, f"**{near}**")
        return "<br>".join(parts)

    return how, cell
