"""What ``make arena`` runs: the settings of every run in one place, and the running of them.

Owns the command lines. Each is one that anybody can repeat in a shell; what it printed is kept beside
the page as JSON, with the commands. Does not know what is made of the numbers.
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
from blendrag.lab.evaluation.tables import way_of

#: Nothing was trained, calibrated or chosen on this one.
SEED = "2027"
#: Ratios of the sweep; the default must hold at the second.
SWEEP = ("0.02", "0.05", "0.10", "0.15")
TARGET_RATIO = "0.05"
POLICIES = "prefix,reuse,random,boundary(4),hkvd-once,hkvd,query,blend"
#: Over long chunks, where four tokens are next to nothing.
LONG_POLICIES = "prefix,reuse,random,boundary(16),hkvd-once,hkvd,query,blend"
#: The policies that schedules are compared with and calibrated for.
CALIBRATED_POLICIES = ("hkvd", "query", "blend")
#: The schedule at which policies meet.
FAMILY = UNCALIBRATED_SCHEDULE if DEFAULT_SCHEDULE == CALIBRATED else DEFAULT_SCHEDULE
SCHEDULES = "constant,linear,geometric:0.8,geometric:0.5,first:2,first:4,first:6"
DEVIATION_RATIOS = ("0", "0.02", "0.05", "0.1", "0.15", "0.3", "0.5", "0.75", "1")
#: Calibration's corpus and its store; names in it are in no test question.
CORPUS, STORE = "src/blendrag/demo/corpus", "build/arena-store"
QUESTIONS = "src/blendrag/demo/calibration.txt"
#: Contexts and questions of each: of short prompts, of long ones, and of either while their size is varied.
SHORT, LONG, SIZED = (20, 10), (12, 8), (8, 8)

#: ``blendrag`` and the module it is, so that a run needs no script on the path.
PROGRAMS = {
    "blendrag": ("-m", "blendrag.cli.main"),
    "python": (),
}


@dataclass(frozen=True)
class Run:
    """One section of the page: the commands whose rows it shows."""

    name: str
    title: str
    text: str
    """What is asked, for a reader."""
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


CALIBRATION = Run(
    "calibration",
    "Calibration",
    "The schedule of each of these policies, found for this model on a corpus of its own by what the "
    "first answer tokens lose: their mean KL from full prefill. It is what `calibrated` means on this "
    "page.",
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

_TUNED = ",".join(CALIBRATED_POLICIES)

RUNS = (
    Run(
        "policies",
        "Policies, chunks of at most 64 tokens",
        "Every policy at equal r. Of what a policy computes in order to choose, chunk tokens of the "
        "entry layer are in the charged ratio; a question's own pass over stored KV and the projections "
        "that deviations are read from show in the time alone. MapReduce and MapRerank take part by "
        "name, for models that follow instructions, which the embedded one does not.",
        (
            evaluation(POLICIES, ratios=SWEEP),
            evaluation(_TUNED, ratios=SWEEP[:2], schedules=CALIBRATED),
        ),
    ),
    Run(
        "long",
        "Policies, chunks of at most 512 tokens",
        "The same over prompts of the length that people use.",
        (
            evaluation(LONG_POLICIES, 6, 512, LONG, SWEEP[:2]),
            evaluation(_TUNED, 6, 512, LONG, SWEEP[:2], CALIBRATED),
        ),
    ),
    Run(
        "schedules",
        "Schedules",
        "How r is spread over the layers, at equal r.",
        (evaluation(_TUNED, schedules=f"{SCHEDULES},{CALIBRATED}"),),
    ),
    Run(
        "prefix",
        "Chunks encoded behind the prefix, or behind nothing",
        "The corpus's prefix, here <|bos|>, stands before each chunk while it is encoded, or does not.",
        (evaluation("reuse,hkvd,query,blend", encode_prefix="on,off"),),
    ),
    Run(
        "chunks",
        "Number and length of chunks",
        "One of the two is varied while the other stays.",
        tuple(
            evaluation("reuse,hkvd,query,blend", chunks, tokens, SIZED)
            for chunks, tokens in ((2, 64), (6, 64), (12, 64), (24, 64), (6, 128), (6, 256))
        ),
    ),
)

DEVIATIONS = Run(
    "deviations",
    "Deviation from a full prefill",
    "What CacheBlend reasons with (§4.1), measured: how far KV and forward attention are from those of "
    "a full prefill, relative to their own size. The oracle has exact KV for the tokens of each layer "
    "that deviate most there, which takes a full prefill to know.",
    (
        (
            "python", "-m", "blendrag.lab.evaluation.deviations", "--seed", SEED, "--chunks", "6",
            "--chunk-tokens", "64", "--contexts", "12", "--policies", "random,hkvd,query,blend",
            "--schedules", "constant", *_ratios(DEVIATION_RATIOS),
        ),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """What the commands of a run printed, in order."""

    commands: tuple[str, ...]
    printed: tuple[Any, ...]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Of all its commands, where they printed lists of rows; what several asked, once."""
        found: dict[Any, dict[str, Any]] = {}
        for row in (row for rows in self.printed for row in rows):
            found.setdefault((way_of(row), *map(row.get, ("kind", "dataset", "seed"))), row)
        return list(found.values())


class RunFailedError(BlendragError):
    """A command of the arena did not end well; what it said is above."""


def shell(command: Sequence[str]) -> str:
    """The line to type."""
    return shlex.join(command)


def execute(run: Run, say: Callable[[str], None] = lambda text: None) -> Result:
    """Run its commands one after another; their progress goes to stderr.

    Raises :class:`RunFailedError`.
    """
    printed = []
    for command in run.commands:
        say(shell(command))
        arguments = [sys.executable, *PROGRAMS[command[0]], *command[1:]]
        done = subprocess.run(arguments, stdout=subprocess.PIPE, check=False)
        if done.returncode:
            raise RunFailedError(
                f"{shell(command)} ended with status {done.returncode}, expected 0; see what it said, "
                "then repeat with --keep, which goes on where this one stopped"
            )
        printed.append(json.loads(done.stdout))
    return Result(tuple(shell(command) for command in run.commands), tuple(printed))


def save_result(result: Result, path: Path) -> None:
    """Numbers to six significant digits: what is beyond them differs between two machines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {"commands": result.commands, "printed": _rounded(result.printed)}
    path.write_text(json.dumps(kept, separators=(",", ":")) + "\n", encoding="utf-8")


def load_result(path: Path) -> Result:
    """Raises :class:`InvalidInputError` for a file that is no result."""
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
