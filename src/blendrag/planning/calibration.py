"""What ``blendrag calibrate`` found for a model: the policy closest to full prefill, kept in the store."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from blendrag.fusor.selection import make_policy
from blendrag.store.records import Records

#: A gain counts if it is more than this many standard errors.
MIN_STANDARD_ERRORS = 2


@dataclass(frozen=True)
class Calibration:
    """The policy for a model's requests that name none. KL is in nats per answer token."""

    policy: str
    """The candidate that gained, else the default."""
    candidate: str
    """The policy that was closest to full prefill on the first prompts, and was checked on the others."""
    ratio: Annotated[float, Field(gt=0, lt=1)]
    prompts: int
    """Prompts of the check. The following are means over them."""
    candidate_kl: float
    default_kl: float
    reuse_kl: float
    """With nothing recomputed."""
    gain: float
    """How much closer the candidate is than the default."""
    gain_error: float
    """Standard error of ``gain``, paired by prompt."""

    def __post_init__(self) -> None:
        make_policy(self.policy)  # raises for a policy that no request could use

    @property
    def gains(self) -> bool:
        return self.gain > MIN_STANDARD_ERRORS * self.gain_error

    @classmethod
    def of(
        cls,
        default: str,
        candidate: str,
        ratio: float,
        candidate_kl: Sequence[float],
        default_kl: Sequence[float],
        reuse_kl: Sequence[float],
    ) -> Calibration:
        """From the KL on each prompt of the check, of which there are two or more."""
        gains = [other - own for other, own in zip(default_kl, candidate_kl, strict=True)]
        gain, error = statistics.fmean(gains), statistics.stdev(gains) / math.sqrt(len(gains))
        return cls(
            candidate if gain > MIN_STANDARD_ERRORS * error else default,
            candidate,
            ratio,
            len(gains),
            statistics.fmean(candidate_kl),
            statistics.fmean(default_kl),
            statistics.fmean(reuse_kl),
            gain,
            error,
        )


def calibrations(root: Path, namespace: str) -> Records[Calibration]:
    """What was found for ``namespace``: one entry, which the next calibration replaces."""
    return Records(root, f"{namespace}.schedules", "calibrations", Calibration, ())
