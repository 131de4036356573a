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

from blendrag.errors import BlendragError, InvalidInputError

#: Nothing was trained, calibrated or chosen on this one.
SEED = "2027"
#: Ratios of the sweep; the default must hold at the second.
SWEEP = ("0.02", "0.05", "0.10", "0.15")
TARGET_RATIO = "0.05"
POLICIES = "prefix,reuse,random,boundary(4),hkvd-once,hkvd,offset,query,offset+query,blend"
#: Of the prompts that cost most.
LONG_POLICIES = "prefix,reuse,random,boundary(16),hkvd-once,hkvd,offset+query,query,blend"
SCHEDULES = "constant,linear,geometric:0.8,geometric:0.5,first:2,first:4"
DEVIATION_RATIOS = ("0", "0.02", "0.05", "0.1", "0.15", "0.3", "0.5", "0.75", "1")

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


def evaluation(*arguments: str) -> tuple[str, ...]:
    """``blendrag eval`` on generated questions."""
    return ("blendrag", "eval", "--dataset", "synthetic", "--seed", SEED, *arguments, "--json")


def _ratios(ratios: Sequence[str]) -> tuple[str, ...]:
    return tuple(part for ratio in ratios for part in ("--ratio", ratio))


def _chunks(chunks: int, tokens: int, contexts: int) -> tuple[str, ...]:
    sizes = {"--chunks": chunks, "--chunk-tokens": tokens, "--contexts": contexts}
    return tuple(part for name, value in sizes.items() for part in (name, str(value)))


RUNS = (
    Run(
        "policies",
        "Policies, chunks of at most 64 tokens",
        "Every policy at equal r. What a policy computes in order to choose is in the charged ratio "
        "and in the time.",
        (
            evaluation(
                *_chunks(6, 64, 24), "--questions", "10", "--policies", POLICIES, *_ratios(SWEEP)
            ),
        ),
    ),
    Run(
        "long",
        "Policies, chunks of at most 512 tokens",
        "The same over prompts of the length that people use.",
        (
            evaluation(
                *_chunks(6, 512, 8), "--questions", "10", "--policies", LONG_POLICIES,
                *_ratios(SWEEP[:2]),
            ),
        ),
    ),
    Run(
        "schedules",
        "Schedules",
        "How r is spread over the layers, for the policies that use it best. A schedule of numbers is "
        "a vector over layers 1…L-1.",
        (
            evaluation(
                *_chunks(6, 64, 24), "--questions", "10", "--policies", "hkvd,query,blend",
                "--schedules", SCHEDULES, *_ratios([TARGET_RATIO]),
            ),
        ),
    ),
    Run(
        "prefix",
        "Chunks encoded behind the prefix, or behind nothing",
        "The corpus's prefix, here <|bos|>, stands before each chunk while it is encoded, or does not.",
        (
            evaluation(
                *_chunks(6, 64, 24), "--questions", "10", "--policies", "reuse,hkvd,query,blend",
                "--encode-prefix", "on,off", *_ratios([TARGET_RATIO]),
            ),
        ),
    ),
    Run(
        "chunks",
        "Number and length of chunks",
        "One of the two is varied while the other stays.",
        tuple(
            evaluation(
                *_chunks(chunks, tokens, 8), "--questions", "5", "--policies",
                "reuse,hkvd,query,blend", *_ratios([TARGET_RATIO]),
            )
            for chunks, tokens in ((2, 64), (6, 64), (12, 64), (24, 64), (6, 128), (6, 256))
        ),
    ),
)  # fmt: skip

DEVIATIONS = Run(
    "deviations",
    "Deviation from a full prefill",
    "What CacheBlend reasons with (§4.1), measured: how far KV and forward attention are from those of "
    "a full prefill, relative to their own size. The oracle has exact KV for the tokens of each layer "
    "that deviate most there, which takes a full prefill to know.",
    (
        (
            "python", "-m", "blendrag.evaluation.deviations", "--seed", SEED, *_chunks(6, 64, 12),
            "--policies", "random,hkvd,query,blend", "--schedules", "constant",
            *_ratios(DEVIATION_RATIOS),
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
        """Of all its commands, where they printed lists of rows."""
        return [row for rows in self.printed for row in rows]


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
