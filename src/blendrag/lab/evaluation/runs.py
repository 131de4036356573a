"""What ``make arena`` measures: the commands of every run, executing them, and the kept results.

Every command can be repeated in a shell. What it printed is kept as JSON with the commands.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blendrag.config import DEFAULT_SCHEDULE, UNCALIBRATED_SCHEDULE
from blendrag.errors import BlendragError, InvalidInputError
from blendrag.fusor.selection.schedule import CALIBRATED
from blendrag.lab.evaluation.rows import Row

#: Nothing was trained, calibrated or chosen on this seed.
SEED = 2027
#: The ratio at which policies are compared.
RATIO = "0.05"
#: The schedule at which policies are compared.
FAMILY = UNCALIBRATED_SCHEDULE if DEFAULT_SCHEDULE == CALIBRATED else DEFAULT_SCHEDULE
#: The policies that are calibrated, and compared in every schedule.
TUNED = ("hkvd", "query", "blend")
SCHEDULES = f"constant,linear,geometric:0.8,geometric:0.5,first:2,first:4,first:6,{CALIBRATED}"
STORE = "build/arena-store"
#: Contexts and questions of each: short prompts, long prompts, prompts of varying size.
SHORT, LONG, SIZED = (20, 10), (12, 8), (8, 8)

#: Arguments of the Python interpreter, so that a run needs no script on the path.
PROGRAMS = {"blendrag": ("-m", "blendrag.cli.main"), "python": ()}


def _evaluation(
    policies: Sequence[str],
    chunks: int = 6,
    chunk_tokens: int = 64,
    size: tuple[int, int] = SHORT,
    ratios: Sequence[str] = (RATIO,),
    schedules: str = FAMILY,
    more: str = "",
) -> str:
    """``blendrag eval`` on generated questions."""
    if CALIBRATED in schedules:
        more += f" --store {STORE}"
    return (
        f"blendrag eval --dataset synthetic --seed {SEED} --chunks {chunks} --chunk-tokens {chunk_tokens} "
        f"--contexts {size[0]} --questions {size[1]} --policies {shlex.quote(','.join(policies))} "
        f"--schedules {schedules}{''.join(f' --ratio {ratio}' for ratio in ratios)}{more} --json"
    )


def _policies(boundary: int) -> tuple[str, ...]:
    """``boundary``: tokens that this policy recomputes of a chunk."""
    ranking = ("hkvd-once", "hkvd", "query", "query+hkvd", "blend")
    return ("prefix", "reuse", "random", f"boundary({boundary})", *ranking)


_COMPARED = ("reuse", *TUNED)
_LOW, _SWEEP = ("0.02", RATIO), ("0.02", RATIO, "0.10", "0.15")
#: Commands by the name of their run.
RUNS: dict[str, tuple[str, ...]] = {
    "calibration": (
        f"blendrag ingest src/blendrag/demo/corpus --store {STORE} --chunk-tokens 64 "
        "--embedder minilm-offline --json",
        *(
            f"blendrag calibrate --store {STORE} --policy {policy} --ratio {RATIO} "
            "--questions src/blendrag/demo/calibration.txt --samples 33 --minutes 3 --json"
            for policy in TUNED
        ),
    ),
    "policies": (
        _evaluation(_policies(4), ratios=_SWEEP),
        _evaluation(TUNED, ratios=_LOW, schedules=CALIBRATED),
    ),
    "long": (
        _evaluation(_policies(16), 6, 512, LONG, _LOW),
        _evaluation(TUNED, 6, 512, LONG, _LOW, CALIBRATED),
    ),
    "schedules": (_evaluation(TUNED, schedules=SCHEDULES),),
    "prefix": (_evaluation(_COMPARED, more=" --encode-prefix on,off"),),
    "chunks": tuple(
        _evaluation(_COMPARED, chunks, tokens, SIZED)
        for chunks, tokens in ((2, 64), (6, 64), (12, 64), (24, 64), (6, 128), (6, 256))
    ),
    "deviations": (
        f"python -m blendrag.lab.evaluation.deviation --seed {SEED} --chunks 6 --chunk-tokens 64 "
        "--contexts 12 --policies random,hkvd,query,blend --schedules constant --ratio 0 --ratio 0.02 "
        "--ratio 0.05 --ratio 0.1 --ratio 0.15 --ratio 0.3 --ratio 0.5 --ratio 0.75 --ratio 1",
    ),
}


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


def execute(commands: Sequence[str], say: Callable[[str], None] = lambda text: None) -> Result:
    """Run ``commands`` one after another; their progress goes to stderr.

    Raises :class:`RunFailedError`.
    """
    printed = []
    for command in commands:
        say(command)
        program, *arguments = shlex.split(command)
        line = [sys.executable, *PROGRAMS[program], *arguments]
        done = subprocess.run(line, stdout=subprocess.PIPE, check=False)
        if done.returncode:
            raise RunFailedError(
                f"{command} ended with status {done.returncode}, expected 0; read its message, then repeat "
                "with --keep, which continues after the finished runs"
            )
        printed.append(json.loads(done.stdout))
    return Result(tuple(commands), tuple(printed))


def collect(
    folder: Path, runs: Mapping[str, Sequence[str]], keep: bool, say: Callable[[str], None]
) -> dict[str, Result]:
    """Execute ``runs`` and keep each result in ``folder``. With ``keep``, a kept result of the same
    commands is used instead."""
    found = {}
    for name, commands in runs.items():
        path = folder / f"{name}.json"
        if not (keep and path.is_file() and load_result(path).commands == tuple(commands)):
            save_result(execute(commands, say), path)
        found[name] = load_result(path)
    return found


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
