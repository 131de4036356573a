"""What ``make arena`` measures: the commands of every run, executing them, and the kept results.

Every command can be repeated in a shell. What it printed is kept as JSON with the commands.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blendrag.config import DEFAULT_SCHEDULE, UNCALIBRATED_SCHEDULE
from blendrag.errors import BlendragError, InvalidInputError
from blendrag.fusor.selection.schedule import CALIBRATED
from blendrag.lab.evaluation.rows import Row

#: Nothing was trained, calibrated or chosen on this seed.
SEED = "2027"
RATIOS = ("0.02", "0.05", "0.10", "0.15")
#: The ratio at which policies are compared.
TARGET_RATIO = "0.05"
POLICIES = "prefix,reuse,random,boundary(4),hkvd-once,hkvd,query,query+hkvd,blend"
#: For long chunks, of which four tokens are a smaller share.
LONG_POLICIES = POLICIES.replace("boundary(4)", "boundary(16)")
#: The policies that are calibrated, and compared in every schedule.
CALIBRATED_POLICIES = ("hkvd", "query", "blend")
#: The schedule at which policies are compared.
FAMILY = UNCALIBRATED_SCHEDULE if DEFAULT_SCHEDULE == CALIBRATED else DEFAULT_SCHEDULE
SCHEDULES = "constant,linear,geometric:0.8,geometric:0.5,first:2,first:4,first:6"
DEVIATION_RATIOS = ("0", "0.02", "0.05", "0.1", "0.15", "0.3", "0.5", "0.75", "1")
#: Corpus and store of the calibration; its names are in no test question.
CORPUS, STORE = "src/blendrag/demo/corpus", "build/arena-store"
QUESTIONS = "src/blendrag/demo/calibration.txt"
#: Contexts and questions of each: short prompts, long prompts, prompts of varying size.
SHORT, LONG, SIZED = (20, 10), (12, 8), (8, 8)
SIZES = ((2, 64), (6, 64), (12, 64), (24, 64), (6, 128), (6, 256))

#: Arguments of the Python interpreter, so that a run needs no script on the path.
PROGRAMS = {"blendrag": ("-m", "blendrag.cli.main"), "python": ()}


@dataclass(frozen=True)
class Run:
    """Commands whose results belong together."""

    name: str
    commands: tuple[tuple[str, ...], ...]


def evaluation(
    policies: str,
    chunks: int = 6,
    chunk_tokens: int = 64,
    size: tuple[int, int] = SHORT,
    ratios: Sequence[str] = (TARGET_RATIO,),
    schedules: str = FAMILY,
    encode_prefix: str = "on",
) -> tuple[str, ...]:
    """``blendrag eval`` on generated questions."""
    contexts, questions = size
    more: tuple[str, ...] = ("--encode-prefix", encode_prefix) if encode_prefix != "on" else ()
    if CALIBRATED in schedules:
        more += ("--store", STORE)
    return (
        "blendrag", "eval", "--dataset", "synthetic", "--seed", SEED,
        "--chunks", str(chunks), "--chunk-tokens", str(chunk_tokens),
        "--contexts", str(contexts), "--questions", str(questions),
        "--policies", policies, "--schedules", schedules, *_ratios(ratios), *more, "--json",
    )  # fmt: skip


def _ratios(ratios: Sequence[str]) -> tuple[str, ...]:
    return tuple(part for ratio in ratios for part in ("--ratio", ratio))


_TUNED = ",".join(CALIBRATED_POLICIES)
_COMPARED = "reuse,hkvd,query,blend"
CALIBRATION = Run(
    "calibration",
    (
        ("blendrag", "ingest", CORPUS, "--store", STORE, "--chunk-tokens", "64",
         "--embedder", "minilm-offline", "--json"),
        *(
            ("blendrag", "calibrate", "--store", STORE, "--policy", policy,
             "--ratio", TARGET_RATIO, "--questions", QUESTIONS, "--samples", "33",
             "--minutes", "3", "--json")
            for policy in CALIBRATED_POLICIES
        ),
    ),
)  # fmt: skip
ARENA = (
    Run(
        "policies",
        (
            evaluation(POLICIES, ratios=RATIOS),
            evaluation(_TUNED, ratios=RATIOS[:2], schedules=CALIBRATED),
        ),
    ),
    Run(
        "long",
        (
            evaluation(LONG_POLICIES, 6, 512, LONG, RATIOS[:2]),
            evaluation(_TUNED, 6, 512, LONG, RATIOS[:2], CALIBRATED),
        ),
    ),
    Run("schedules", (evaluation(_TUNED, schedules=f"{SCHEDULES},{CALIBRATED}"),)),
    Run("prefix", (evaluation(_COMPARED, encode_prefix="on,off"),)),
    Run("chunks", tuple(evaluation(_COMPARED, n, tokens, SIZED) for n, tokens in SIZES)),
)
DEVIATIONS = Run(
    "deviations",
    (
        (
            "python", "-m", "blendrag.lab.evaluation.deviation", "--seed", SEED, "--chunks", "6",
            "--chunk-tokens", "64", "--contexts", "12", "--policies", "random,hkvd,query,blend",
            "--schedules", "constant", *_ratios(DEVIATION_RATIOS),
        ),
    ),
)  # fmt: skip
RUNS = (CALIBRATION, *ARENA, DEVIATIONS)


@dataclass(frozen=True)
class Result:
    """What the commands of a run printed, in order."""

    commands: tuple[str, ...]
    printed: tuple[Any, ...]

    @property
    def rows(self) -> list[Row]:
        """Of all commands of the arena; a row that several of them printed is taken once."""
        found: dict[Any, Row] = {}
        for row in (Row(**fields) for rows in self.printed for fields in rows):
            found.setdefault((*row.way, row.kind), row)
        return list(found.values())


class RunFailedError(BlendragError):
    """A command of the arena failed; its own message is above."""


def execute(run: Run, say: Callable[[str], None] = lambda text: None) -> Result:
    """Run its commands one after another; their progress goes to stderr.

    Raises :class:`RunFailedError`.
    """
    printed = []
    for command in run.commands:
        say(shlex.join(command))
        arguments = [sys.executable, *PROGRAMS[command[0]], *command[1:]]
        done = subprocess.run(arguments, stdout=subprocess.PIPE, check=False)
        if done.returncode:
            raise RunFailedError(
                f"{shlex.join(command)} ended with status {done.returncode}, expected 0; read its message, "
                "then repeat with --keep, which continues after the finished runs"
            )
        printed.append(json.loads(done.stdout))
    return Result(tuple(map(shlex.join, run.commands)), tuple(printed))


def collect(
    folder: Path, runs: Sequence[Run], keep: bool, say: Callable[[str], None]
) -> dict[str, Result]:
    """Execute ``runs`` and keep each result in ``folder``. With ``keep``, a kept result of the same
    commands is used instead."""
    found = {}
    for run in runs:
        path = folder / f"{run.name}.json"
        is_kept = keep and path.is_file() and _commands(run) == load_result(path).commands
        if not is_kept:
            save_result(execute(run, say), path)
        found[run.name] = load_result(path)
    return found


def _commands(run: Run) -> tuple[str, ...]:
    return tuple(map(shlex.join, run.commands))


def save_result(result: Result, path: Path) -> None:
    """Six significant digits: further ones differ between machines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {"commands": result.commands, "printed": _rounded(result.printed)}
    path.write_text(json.dumps(kept, separators=(",", ":")) + "\n", encoding="utf-8")


def load_result(path: Path) -> Result:
    """Raises :class:`InvalidInputError` for a file that is not a result."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return Result(tuple(kept["commands"]), tuple(kept["printed"]))
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise InvalidInputError(
            f"{path} holds no results of the arena; make them with make arena"
        ) from exc


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list | tuple) else value
