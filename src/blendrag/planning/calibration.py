"""Calibrated schedules: the vector found for a model, policy and ratio, and its record in the store."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blendrag.config import UNCALIBRATED_SCHEDULE
from blendrag.fusor.selection import Schedule, make_policy
from blendrag.fusor.selection.schedule import CALIBRATED
from blendrag.store import records

GIVEN = "questions given"
PSEUDO = "first sentences of chunks, in place of questions"


@dataclass(frozen=True)
class Calibration:
    """A schedule found for one policy at one ratio. Deviations are KL in nats per token."""

    policy: str
    ratio: float
    weights: tuple[float, ...]
    """Shares of layers 1…L-1 at that ratio; none for a model of one layer."""
    deviation: float
    family: str
    """The best of the fixed families, and its deviation on the same prompts."""
    family_deviation: float
    reuse_deviation: float
    prompts: int
    seed: int
    questions: str
    """:data:`GIVEN` or :data:`PSEUDO`."""

    @property
    def schedule(self) -> Schedule:
        return Schedule(CALIBRATED, self.weights)

    @property
    def is_of_questions(self) -> bool:
        return self.questions == GIVEN

    def note(self, ratio: float) -> str:
        """A sentence for a user of it at another ratio; else empty."""
        if math.isclose(ratio, self.ratio):
            return ""
        return (
            f"the calibrated schedule of {self.policy} was found at ratio {self.ratio:g}, the nearest to "
            f"{ratio:g}; find one for it with blendrag calibrate --policy '{self.policy}' --ratio {ratio:g}"
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def recall_calibrations(root: Path, namespace: str) -> tuple[Calibration, ...]:
    """Everything found for ``namespace``; damaged entries are left out."""
    found = []
    for entry in records.calibrations(root, namespace).entries():
        with suppress(*records.DAMAGE):
            found.append(_read(entry))
    return tuple(found)


def _read(entry: dict[str, Any]) -> Calibration:
    """Raises one of :data:`records.DAMAGE` for what no request could use."""
    made = Calibration(**{**entry, "weights": tuple(entry["weights"])})
    if made.weights:
        Schedule.parse(made.weights)
    numbers = (made.deviation, made.family_deviation, made.reuse_deviation, made.prompts, made.seed)
    texts = (made.policy, made.family, made.questions)
    is_typed = all(isinstance(each, int | float) for each in numbers)
    if not is_typed or not all(isinstance(each, str) for each in texts) or not 0 < made.ratio < 1:
        raise ValueError(f"calibration {entry}")
    return made


def remember_calibration(root: Path, namespace: str, found: Calibration) -> None:
    """Keep ``found`` in place of an earlier one of the same policy, ratio and kind of questions.

    Raises :class:`OSError`.
    """
    same = {name: getattr(found, name) for name in ("policy", "ratio", "questions")}

    def replaces(entry: Any) -> bool:
        return isinstance(entry, dict) and all(entry.get(k) == v for k, v in same.items())

    records.calibrations(root, namespace).keep(found.as_dict(), replaces)


def resolve_schedule(
    root: Path,
    namespace: str,
    schedule: Schedule,
    policy: str,
    ratio: float,
    of_questions: bool = False,
) -> Schedule:
    """``schedule``, or for ``calibrated`` the vector found for this policy at the nearest ratio, if any."""
    if not schedule.is_open:
        return schedule
    found = nearest(calibrations_of(root, namespace, policy, of_questions), ratio)
    return Schedule.parse(UNCALIBRATED_SCHEDULE) if found is None else found.schedule


def calibrations_of(
    root: Path, namespace: str, policy: str, of_questions: bool = False
) -> tuple[Calibration, ...]:
    """What was found for this policy. ``of_questions``: only on real questions, as a default should be."""
    policy = str(make_policy(policy))
    return tuple(
        each
        for each in recall_calibrations(root, namespace)
        if each.policy == policy and (each.is_of_questions or not of_questions)
    )


def nearest(found: Iterable[Calibration], ratio: float) -> Calibration | None:
    """The one at the nearest ratio, preferably on real questions."""
    return min(
        found, key=lambda each: (abs(each.ratio - ratio), not each.is_of_questions), default=None
    )
