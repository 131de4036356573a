"""The section on calibration of the quality page: which schedule was found, and among what.

Owns what is shown of ``blendrag calibrate --json``, a plain mapping here.
"""

from __future__ import annotations

from blendrag.lab.evaluation.page import head
from blendrag.lab.evaluation.runs import Result, Run
from blendrag.lab.evaluation.tables import Row, markdown, number


def calibration_section(run: Run, result: Result) -> str:
    """A line for each policy that was calibrated."""
    found = [printed for printed in result.printed if "weights" in printed]
    prompts = sorted({one["prompts"] for one in found})
    table = markdown(
        [
            ("policy", lambda one: str(one["policy"])),
            ("r", lambda one: number(one["ratio"], ".3g")),
            ("nothing recomputed", lambda one: number(one["reuse_deviation"], ".3g")),
            ("best family", _best_family),
            ("calibrated", lambda one: number(one["deviation"], ".3g")),
            ("tried", lambda one: str(one["tried"])),
            ("shares of layers 1…L−1", _shares),
        ],
        found,
    )
    counted = " or ".join(map(str, prompts))
    return (
        f"{head(run, result)}\n\nMean KL over {counted} prompts, of that very sample:\n\n{table}\n"
    )


def _best_family(one: Row) -> str:
    name, deviation = min(one["families"].items(), key=lambda family: family[1])
    return f"{name} {deviation:.3g}"


def _shares(one: Row) -> str:
    return " ".join(f"{share:.2f}" for share in one["weights"])
