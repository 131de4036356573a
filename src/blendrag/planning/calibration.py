"""Calibrated schedules: the vector found for a model, policy and ratio, and its record in the store."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import Field

from blendrag.fusor.selection import Schedule, make_policy
from blendrag.fusor.selection.schedule import CALIBRATED
from blendrag.store.records import Records


class Questions(StrEnum):
    """What was asked of the sampled prompts. The values are stored."""

    GIVEN = "questions given"
    PSEUDO = "first sentences of chunks, in place of questions"


@dataclass(frozen=True)
class Calibration:
    """A schedule found for one policy at one ratio. Deviations are KL in nats per token."""

    policy: str
    ratio: Annotated[float, Field(gt=0, lt=1)]
    weights: tuple[float, ...]
    """Shares of layers 1…L-1 at that ratio; none for a model of one layer."""
    deviation: float
    family: str
    """The best of the fixed families, and its deviation on the same prompts."""
    family_deviation: float
    reuse_deviation: float
    prompts: int
    seed: int
    questions: Questions

    def __post_init__(self) -> None:
        if self.weights:
            Schedule.parse(self.weights)  # raises for weights that no request could use

    @property
    def schedule(self) -> Schedule:
        return Schedule(CALIBRATED, self.weights)

    @property
    def is_of_questions(self) -> bool:
        return self.questions is Questions.GIVEN

    def note(self, ratio: float) -> str:
        """A sentence for a user of it at another ratio; else empty."""
        if math.isclose(ratio, self.ratio):
            return ""
        return (
            f"the calibrated schedule of {self.policy} was found at ratio {self.ratio:g}, the nearest to "
            f"{ratio:g}; find one for it with blendrag calibrate --policy '{self.policy}' --ratio {ratio:g}"
        )


def calibrations(root: Path, namespace: str) -> Records[Calibration]:
    """Everything found for ``namespace``; a policy and ratio have one for each kind of questions."""
    same = ("policy", "ratio", "questions")
    return Records(root, f"{namespace}.schedules", "calibrations", Calibration, same)


def calibrations_of(
    root: Path, namespace: str, policy: str, of_questions: bool = False
) -> tuple[Calibration, ...]:
    """What was found for this policy. ``of_questions``: only on real questions, as a default should be."""
    policy = str(make_policy(policy))
    return tuple(
        each
        for each in calibrations(root, namespace).entries()
        if each.policy == policy and (each.is_of_questions or not of_questions)
    )


def nearest(found: Iterable[Calibration], ratio: float) -> Calibration | None:
    """The one at the nearest ratio, preferably on real questions."""
    return min(
        found, key=lambda each: (abs(each.ratio - ratio), not each.is_of_questions), default=None
    )
