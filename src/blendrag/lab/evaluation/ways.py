"""Ways to answer a prompt: baselines, and selection policies with ratio, schedule and prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from blendrag.config import Mode
from blendrag.engine import Options
from blendrag.errors import InvalidInputError
from blendrag.fusor.selection import POLICIES, Schedule, make_policy
from blendrag.planning.calibration import calibrations_of, nearest

FULL, NONE, PREFIX, REUSE = "full", "none", "prefix", "reuse"
MAP_REDUCE, MAP_RERANK = CHAINS = ("map-reduce", "map-rerank")
#: Ways that are not selection policies: the two ends of PGR, the controls and the chains.
BASELINES = (FULL, NONE, PREFIX, REUSE, *CHAINS)
_MODES: dict[str, Mode] = {
    FULL: "full",
    NONE: "full",
    PREFIX: "prefix",
    REUSE: "reuse",
    **dict.fromkeys(CHAINS, "full"),
}


@dataclass(frozen=True)
class Way:
    """One way to answer; ``None`` or empty if a dimension does not apply."""

    policy: str
    """A baseline, or a selection policy as written."""
    schedule: str = ""
    ratio: float | None = None
    encode_prefix: bool | None = None
    """Chunks encoded after the corpus's prefix, or without one."""
    meaning: str = ""
    """The schedule that ``calibrated`` means for this policy and ratio."""

    @property
    def mode(self) -> Mode:
        """The engine's mode."""
        return _MODES.get(self.policy, "blend")

    @property
    def key(self) -> str:
        """Identifies the way in a journal."""
        ratio = "" if self.ratio is None else repr(self.ratio)
        prefix = {None: "", True: "on", False: "off"}[self.encode_prefix]
        return "|".join((self.policy, self.meaning or self.schedule, ratio, prefix))

    def options(self, max_new_tokens: int) -> Options:
        """The engine's options for a greedy answer."""
        if self.mode != "blend":
            return Options(mode=self.mode, max_new_tokens=max_new_tokens)
        return Options(
            mode="blend",
            policy=self.policy,
            schedule=self.meaning or self.schedule or None,
            ratio=self.ratio,
            max_new_tokens=max_new_tokens,
        )


def default_policies() -> tuple[str, ...]:
    """The baselines that any model can follow, and every registered policy."""
    return tuple(dict.fromkeys((FULL, PREFIX, REUSE, *POLICIES)))


def make_ways(
    policies: Sequence[str],
    schedules: Sequence[str],
    ratios: Sequence[float],
    encode_prefix: Sequence[bool],
) -> tuple[Way, ...]:
    """No context and full prefill, against which everything is measured, then all combinations.

    Raises :class:`InvalidInputError` for an unknown policy, schedule or ratio.
    """
    for schedule in schedules:
        Schedule.parse(schedule)
    for ratio in ratios:
        if not 0.0 <= ratio <= 1.0:
            raise InvalidInputError(f"ratio {ratio} must be a number in [0, 1]")
    made = [Way(NONE), Way(FULL)]
    for policy in policies:
        if policy == REUSE:
            made += [Way(policy, encode_prefix=prefix) for prefix in encode_prefix]
        elif policy in BASELINES:
            made.append(Way(policy))
        else:
            costs = _costs(policy, schedules, ratios)
            made += [Way(policy, s, r, prefix) for prefix in encode_prefix for r, s in costs]
    return tuple(dict.fromkeys(made))


def _costs(
    policy: str, schedules: Sequence[str], ratios: Sequence[float]
) -> list[tuple[float | None, str]]:
    """Ratios and schedules, as far as the policy has either."""
    try:
        made = make_policy(policy)
    except InvalidInputError as exc:
        raise InvalidInputError(f"{exc}; or a baseline: {', '.join(BASELINES)}") from exc
    if not made.budgeted:
        return [(None, "")]
    own = made.schedule
    return [(ratio, s) for ratio in ratios for s in ([str(own)] if own else schedules)]


def look_up(ways: Sequence[Way], root: Path, namespace: str) -> tuple[Way, ...]:
    """``ways`` with the meaning of ``calibrated`` in the store at ``root`` for the model of ``namespace``.

    Raises :class:`InvalidInputError` if a policy is not calibrated there.
    """
    return tuple(
        replace(way, meaning=_meaning(way, root, namespace))
        if way.schedule and Schedule.parse(way.schedule).is_open
        else way
        for way in ways
    )


def _meaning(way: Way, root: Path, namespace: str) -> str:
    found = nearest(calibrations_of(root, namespace, way.policy), way.ratio or 0.0)
    if found is None:
        raise InvalidInputError(
            f"no schedule of policy {way.policy} is calibrated for this model in store {root}; find one "
            f"with blendrag calibrate --policy '{way.policy}' --store {root}, or name other --schedules"
        )
    return str(found.schedule)
