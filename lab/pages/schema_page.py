"""Prompts of schemas: the commands that measure how near answers are to full prefill's, and their table."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from blendrag_lab.evaluation.pretrained import MODELS
from blendrag_lab.evaluation.rows import ALL, ArenaRow
from blendrag_lab.evaluation.ways import NONE
from blendrag_lab.tables import Column, interval, number, table
from lab.pages.regions import console

_EMBEDDED = (
    "blendrag eval --schema --seed 2027 --chunks 6 --chunk-tokens 64 --contexts 20 --questions 5 "
    "--ratio 0.3 --json"
)
_PRETRAINED = (
    "blendrag eval --schema --model {}/{} --dataset {} --chunks 4 --chunk-tokens 512 --contexts {} "
    "--ratio 0.3 --dtype bfloat16 --max-new-tokens 32 --json"
)


def schema_runs(
    models: Sequence[Path], questions: Sequence[Path], contexts: int
) -> dict[str, tuple[str, ...]]:
    """Commands by the name of their run: of the embedded model, or each model on each file of questions."""
    if not models:
        return {"embedded": (_EMBEDDED,)}
    return {
        f"{model.name}-{path.stem}": (_PRETRAINED.format(MODELS, model.name, path.name, contexts),)
        for model in models
        for path in questions
    }


def schemas_text(results: Mapping[tuple[str, ...], Sequence[ArenaRow]]) -> str:
    """The commands and what they printed over all kinds of question: a line for each way."""
    lines = [
        (_model_of(command), row)
        for (command,), rows in results.items()
        for row in rows
        if row.kind == ALL and row.policy != NONE
    ]
    columns: list[Column] = [
        ("model", lambda line: line[0]),
        ("questions", lambda line: f"{line[1].dataset}, n = {line[1].n}"),
        ("way", lambda line: _way(line[1])),
        ("KL per token ± standard error", lambda line: _with_error(line[1])),
        ("agreement", lambda line: number(line[1].agreement, ".2f")),
        ("recovered [95%]", lambda line: _recovered(line[1])),
        ("score", lambda line: f"{line[1].score:.2f} ({line[1].metric})"),
    ]
    return f"{console([command for (command,) in results])}\n\n{table(columns, lines).markdown()}"


def _model_of(command: str) -> str:
    words = shlex.split(command)
    return Path(words[words.index("--model") + 1]).name if "--model" in words else "embedded"


def _way(row: ArenaRow) -> str:
    return f"blend: `{row.policy}`, r = {row.ratio:.2g}" if row.has_budget else f"`{row.policy}`"


def _with_error(row: ArenaRow) -> str:
    return f"{number(row.token_kl, '.2g')} ± {number(row.token_kl_error, '.2g')}"


def _recovered(row: ArenaRow) -> str:
    return interval(row.recovered, row.recovered_low, row.recovered_high)
