"""What calibrations found, kept beside the store where the gate's verdict is kept.

One file per namespace: another model, other weights or another dtype is another namespace, and has
found nothing yet. Holds one entry per policy and ratio.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blendrag.config import UNCALIBRATED_SCHEDULE
from blendrag.fusor.selection import Schedule, make_policy
from blendrag.fusor.selection.schedule import CALIBRATED
from blendrag.store import regular_files

#: Size limit of a namespace's file.
MAX_BYTES = 16 * regular_files.MIB

GIVEN = "questions given"
PSEUDO = "first sentences of chunks, in place of questions"


@dataclass(frozen=True)
class Calibration:
    """A schedule found for one policy at one ratio. Deviations are KL in nats per token."""

    policy: str
    ratio: float
    weights: tuple[float, ...]
    """Shares of layers 1…L-1 at that ratio."""
    deviation: float
    family: str
    """The best of the fixed families, and its deviation on the same prompts."""
    family_deviation: float
    reuse_deviation: float
    prompts: int
    seed: int
    questions: str
    """Where the questions of the sample came from, in words."""

    @property
    def schedule(self) -> Schedule:
        return Schedule(CALIBRATED, self.weights)

    @property
    def is_of_questions(self) -> bool:
        """Whether it was found on questions, and not on sentences in their place."""
        return self.questions == GIVEN

    def note(self, ratio: float) -> str:
        """What a user of it at ``ratio`` should know; empty where it was found at that very one."""
        if math.isclose(ratio, self.ratio):
            return ""
        return (
            f"the calibrated schedule of {self.policy} was found at ratio {self.ratio:g}, the nearest to "
            f"{ratio:g}; find one for it with blendrag calibrate --policy '{self.policy}' --ratio {ratio:g}"
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def recall(root: Path, namespace: str) -> tuple[Calibration, ...]:
    """All that was found for ``namespace``; nothing where the file is missing or damaged."""
    try:
        data = regular_files.read_bytes(_file(root, namespace), MAX_BYTES)
        return tuple(_calibration(entry) for entry in json.loads(data)["calibrations"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return ()


def _calibration(entry: dict[str, Any]) -> Calibration:
    """Raises :class:`ValueError` or :class:`TypeError` for what no request could run with."""
    made = Calibration(**{**entry, "weights": tuple(entry["weights"])})
    if made.weights:  # a model of one layer has none
        Schedule.parse(made.weights)
    numbers = (made.deviation, made.family_deviation, made.reuse_deviation, made.prompts, made.seed)
    texts = (made.policy, made.family, made.questions)
    if not all(isinstance(each, int | float) for each in numbers):
        raise TypeError(f"numbers {numbers}")
    if not all(isinstance(each, str) for each in texts):
        raise TypeError(f"texts {texts}")
    if not 0.0 < made.ratio < 1.0:
        raise ValueError(f"ratio {made.ratio}")
    return made


def remember(root: Path, namespace: str, found: Calibration) -> None:
    """Keep ``found`` in place of an earlier one of the same policy and ratio, found on the same:
    what was found on sentences never replaces what was found on questions.

    Raises :class:`OSError`.
    """
    others = [
        known
        for known in recall(root, namespace)
        if (known.policy, known.ratio, known.is_of_questions)
        != (found.policy, found.ratio, found.is_of_questions)
    ]
    target = _file(root, namespace)
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    entries = [known.as_dict() for known in (*others, found)]
    regular_files.replace(target, json.dumps({"calibrations": entries}).encode())


def resolve(
    root: Path,
    namespace: str,
    schedule: Schedule,
    policy: str,
    ratio: float,
    of_questions: bool = False,
) -> Schedule:
    """``schedule``, or what ``calibrated`` means: the vector found for this policy at the nearest ratio,
    else the family that is taken where nothing was found.

    ``of_questions`` leaves out what was found on stand-ins for questions: nobody asked for it, and
    what suits them may suit questions less than any family."""
    if not schedule.is_open:
        return schedule
    found = nearest(fitting(root, namespace, policy, of_questions), ratio)
    return Schedule.parse(UNCALIBRATED_SCHEDULE) if found is None else found.schedule


def fitting(
    root: Path, namespace: str, policy: str, of_questions: bool = False
) -> tuple[Calibration, ...]:
    """What was found for this policy; ``of_questions`` as :func:`resolve` has it."""
    policy = str(make_policy(policy))
    return tuple(
        each
        for each in recall(root, namespace)
        if each.policy == policy and (each.is_of_questions or not of_questions)
    )


def nearest(found: Iterable[Calibration], ratio: float) -> Calibration | None:
    """The one at the nearest ratio, on questions rather than on sentences."""
    return min(
        found, key=lambda each: (abs(each.ratio - ratio), not each.is_of_questions), default=None
    )


def _file(root: Path, namespace: str) -> Path:
    return Path(root) / "verified" / f"{namespace}.schedules.json"
