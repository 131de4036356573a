"""Ways to answer one prompt: the arena's columns before anything was asked.

Owns the names of the ways and which dimensions each of them has: a selection policy has a ratio, a
schedule and chunks encoded behind the prefix or not; ``reuse`` only the last; full prefill none.
Policies come by name from :mod:`blendrag.fusor.selection` and are not listed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from blendrag.config import Mode
from blendrag.engine import Options
from blendrag.errors import InvalidInputError
from blendrag.fusor.selection import POLICIES, Schedule, make_policy
from blendrag.planning.calibration import resolve_schedule

FULL, NONE, PREFIX, REUSE = "full", "none", "prefix", "reuse"
CHAINS = ("map-reduce", "map-rerank")
#: What is no selection policy: the two ends of PGR, the controls and the chains.
BASELINES = (FULL, NONE, PREFIX, REUSE, *CHAINS)


@dataclass(frozen=True)
class Way:
    """One way to answer; ``None`` or empty where a dimension does not apply."""

    policy: str
    """A baseline or a selection policy, as written."""
    schedule: str = ""
    ratio: float | None = None
    encode_prefix: bool | None = None
    meaning: str = ""
    """What schedule ``calibrated`` means for this policy and ratio, once that was looked up."""

    @property
    def mode(self) -> Mode:
        """The engine's."""
        if self.policy in (FULL, NONE, *CHAINS):
            return "full"
        return self.policy if self.policy in (PREFIX, REUSE) else "blend"  # type: ignore[return-value]

    @property
    def key(self) -> str:
        """One line that no other way has."""
        ratio = "" if self.ratio is None else repr(self.ratio)
        prefix = {None: "", True: "on", False: "off"}[self.encode_prefix]
        return "|".join((self.policy, self.meaning or self.schedule, ratio, prefix))

    def options(self, max_new_tokens: int) -> Options:
        """Of the engine's request; greedy."""
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
    """No context and full prefill, which every other way is measured by, then all combinations.

    Raises :class:`InvalidInputError` for a policy, schedule or ratio that does not exist.
    """
    for schedule in schedules:
        Schedule.parse(schedule)
    for ratio in ratios:
        if not 0.0 <= ratio <= 1.0:
            raise InvalidInputError(f"ratio {ratio} is outside [0, 1]")
    made = [Way(NONE), Way(FULL)]
    for policy in policies:
        _require(policy)
        if policy in (FULL, NONE, PREFIX, *CHAINS):
            made.append(Way(policy))
        elif policy == REUSE:
            made += [Way(policy, encode_prefix=prefix) for prefix in encode_prefix]
        else:
            made += [
                Way(policy, schedule, ratio, prefix)
                for prefix in encode_prefix
                for ratio, schedule in _costs(policy, schedules, ratios)
            ]
    return tuple(dict.fromkeys(made))


def _require(policy: str) -> None:
    if policy in BASELINES:
        return
    try:
        make_policy(policy)
    except InvalidInputError as exc:
        raise InvalidInputError(
            f"{exc}; beside the policies there are {', '.join(BASELINES)}"
        ) from exc


def _costs(
    policy: str, schedules: Sequence[str], ratios: Sequence[float]
) -> list[tuple[float | None, str]]:
    """Ratio and schedule, as far as the policy knows either."""
    known = make_policy(policy)
    if not known.budgeted:
        return [(None, "")]
    own = known.schedule
    return [(ratio, s) for ratio in ratios for s in ([str(own)] if own else schedules)]


def look_up(ways: Sequence[Way], root: Path, namespace: str) -> tuple[Way, ...]:
    """``ways`` with what ``calibrated`` means in the store at ``root`` for the model of ``namespace``.

    Raises :class:`InvalidInputError` where nothing was found for a policy.
    """
    return tuple(
        replace(way, meaning=_meaning(way, root, namespace))
        if way.schedule and Schedule.parse(way.schedule).is_open
        else way
        for way in ways
    )


def _meaning(way: Way, root: Path, namespace: str) -> str:
    asked = Schedule.parse(way.schedule)
    found = resolve_schedule(root, namespace, asked, way.policy, way.ratio or 0.0)
    if found.name != asked.name:
        raise InvalidInputError(
            f"no schedule of policy {way.policy} is calibrated for this model in store {root}; find one "
            f"with blendrag calibrate --policy '{way.policy}' --store {root}, or name other --schedules"
        )
    return str(found)
