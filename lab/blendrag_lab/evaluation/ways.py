"""Ways to answer a prompt: baselines, and selection policies with ratio, schedule and prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from blendrag.config import CALIBRATED, DEFAULT_POLICY, Mode
from blendrag.engine import Options
from blendrag.errors import InvalidInputError
from blendrag.fusor.selection import POLICIES, Schedule, make_policy
from blendrag.planning.calibrate import calibrations, policy_at
from blendrag.store.identity import ChunkRecipe

FULL, NONE, PREFIX, REUSE = "full", "none", "prefix", "reuse"
#: Chunks as modules at the positions of a schema, each encoded alone or all together.
SCHEMA, SCAFFOLD = PLACED = ("schema", "scaffold")
#: Ways that compute chunks instead of loading them, at least all but the first.
COMPUTING = (FULL, NONE, PREFIX)
#: Ways that are not selection policies: the two ends of PGR, and the controls.
BASELINES = (*COMPUTING, REUSE, *PLACED)
#: The baselines that any model can follow, and every registered policy.
DEFAULT_POLICIES = tuple(dict.fromkeys((FULL, PREFIX, REUSE, *POLICIES)))
#: With prompts of a schema. Reuse and the policies then blend its modules.
SCHEMA_POLICIES = (FULL, REUSE, *PLACED, DEFAULT_POLICY)
_MODES: dict[str, Mode] = {
    **dict.fromkeys(COMPUTING, "full"),
    PREFIX: "prefix",
    REUSE: "reuse",
    **dict.fromkeys(PLACED, "blend"),
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
    """The policy that ``calibrated`` means."""
    writer: str = ""
    """Fingerprint of the writer that encodes its chunks."""
    encode_after: int = 0
    """Similar chunks that each of its chunks is encoded after."""
    searched: str = ""
    """Digest of the chunks among which these are found, and of the embedder."""

    @property
    def name(self) -> str:
        """The policy, and how its chunks are encoded if not alone."""
        writer = "+writer" if self.writer else ""
        after = f"+after{self.encode_after}" if self.encode_after else ""
        return f"{self.policy}{writer}{after}"

    @property
    def key(self) -> str:
        """Identifies the way in a journal."""
        ratio = "" if self.ratio is None else repr(self.ratio)
        prefix = {None: "", True: "on", False: "off"}[self.encode_prefix]
        more = [self.writer] if self.writer else []
        more += [f"after {self.encode_after}", self.searched] if self.encode_after else []
        return "|".join((self.meaning or self.policy, self.schedule, ratio, prefix, *more))

    def options(self, max_new_tokens: int) -> Options:
        """The engine's options for a greedy answer."""
        if self.policy in BASELINES:
            return Options(mode=_MODES[self.policy], max_new_tokens=max_new_tokens)
        return Options(
            mode="blend",
            policy=self.meaning or self.policy,
            schedule=self.schedule or None,
            ratio=self.ratio,
            max_new_tokens=max_new_tokens,
        )


def make_ways(
    policies: Sequence[str],
    schedules: Sequence[str],
    ratios: Sequence[float],
    encode_prefix: Sequence[bool],
) -> tuple[Way, ...]:
    """No context and full prefill, against which everything is measured, then all combinations."""
    for schedule in schedules:
        Schedule.parse(schedule)
    for ratio in ratios:
        if not 0.0 <= ratio <= 1.0:
            raise InvalidInputError(f"ratio {ratio} must be a number in [0, 1]")
    made = [Way(NONE), Way(FULL)]
    for policy in policies:
        costs: list[tuple[str, float | None]] = [("", None)]
        if policy not in BASELINES:
            try:
                known = make_policy(policy)
            except InvalidInputError as exc:
                raise InvalidInputError(f"{exc}; or a baseline: {', '.join(BASELINES)}") from exc
            if known.budgeted:
                spread = [str(known.schedule)] if known.schedule else schedules
                costs = [(schedule, ratio) for ratio in ratios for schedule in spread]
        prefixes = [None] if policy in (*COMPUTING, *PLACED) else encode_prefix
        made += [Way(policy, *cost, prefix) for prefix in prefixes for cost in costs]
    return tuple(dict.fromkeys(made))


def with_recipe(ways: Sequence[Way], recipe: ChunkRecipe, searched: str) -> tuple[Way, ...]:
    """``ways``, and each that loads chunks also over chunks that the writer of ``recipe`` encodes, that are
    encoded after similar ones, and both, as far as it has them. ``searched``: as in :class:`Way`."""
    loading = [way for way in ways if way.policy not in (*COMPUTING, *PLACED)]
    recipes = dict.fromkeys(
        (writer, after) for after in (0, recipe.encode_after) for writer in ("", recipe.writer)
    )
    return tuple(ways) + tuple(
        replace(way, writer=writer, encode_after=after, searched=searched if after else "")
        for writer, after in list(recipes)[1:]
        for way in loading
    )


def look_up(ways: Sequence[Way], root: Path, namespace: str) -> tuple[Way, ...]:
    """``ways`` with the meaning of ``calibrated`` in the store at ``root`` for the model of ``namespace``."""
    if not any(way.policy == CALIBRATED for way in ways):
        return tuple(ways)
    found = calibrations(root, namespace).entries()
    if not found:
        raise InvalidInputError(
            f"nothing is calibrated for this model in store {root}; run blendrag calibrate --store {root}, "
            "or name other --policies"
        )
    return tuple(
        replace(way, meaning=policy_at(found, way.ratio or 0.0))
        if way.policy == CALIBRATED
        else way
        for way in ways
    )
