"""How a prompt is blended: one value from the settings over the plan to the metrics."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

from blendrag.config import AUTO, CALIBRATED, DEFAULT_RATIO, Ratio
from blendrag.fusor.selection.base import SelectionPolicy
from blendrag.fusor.selection.controls import ReusePolicy
from blendrag.fusor.selection.named import make_policy
from blendrag.fusor.selection.schedule import Schedule


@dataclass(frozen=True)
class Blending:
    """Which tokens of loaded chunks are recomputed, and how many."""

    policy: SelectionPolicy
    schedule: Schedule
    ratio: Ratio = 1.0
    """Mean share of the tokens, in [0, 1], or ``auto``: the loading controller chooses it. At 0 the policy is
    ``reuse``, whichever was named: nothing is recomputed, and nothing is done to choose tokens."""
    min_ratio: float = 0.0
    """The smallest that ``auto`` may choose."""
    is_calibrated: bool = False
    """Whether what was calibrated for the model, if anything was, takes the place of the policy."""
    takes_calibrated_ratio: bool = False
    """The same for the ratio."""

    def __post_init__(self) -> None:
        if self.ratio == 0:
            object.__setattr__(self, "policy", ReusePolicy())

    @classmethod
    def of(
        cls,
        policy: str | SelectionPolicy,
        schedule: str | Schedule = "constant",
        ratio: Ratio | None = 1.0,
        min_ratio: float = 0.0,
    ) -> Blending:
        """From names; no ratio is the calibrated one if the policy is calibrated, too, or else the default.

        Raises :class:`InvalidOptionError`."""
        parsed = schedule if isinstance(schedule, Schedule) else Schedule.parse(schedule)
        calibrated, given = policy == CALIBRATED, DEFAULT_RATIO if ratio is None else ratio
        takes_ratio = calibrated and ratio is None
        return cls(make_policy(policy), parsed, given, min_ratio, calibrated, takes_ratio)

    @property
    def is_auto(self) -> bool:
        return self.ratio == AUTO

    @property
    def fixed_ratio(self) -> float:
        """``ratio``, or ``min_ratio`` if it is ``auto``."""
        return self.min_ratio if self.is_auto else cast(float, self.ratio)

    def at(self, ratio: float) -> Blending:
        """The same with that ratio."""
        return replace(self, ratio=ratio)

    def layer_counts(self, candidates: int, layers: int, chunks: int) -> list[int]:
        """Tokens recomputed in layers 1…``layers``-1, of ``candidates`` tokens in ``chunks`` chunks."""
        ratio = self.fixed_ratio
        return self.at(ratio).policy.layer_counts(self.schedule, ratio, candidates, layers, chunks)
