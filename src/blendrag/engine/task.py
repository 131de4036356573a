"""A request with nothing left to default, and the same once its loads are open."""

from __future__ import annotations

from dataclasses import dataclass

from blendrag.config import Mode
from blendrag.engine.options import Options
from blendrag.errors import ContextOverflowError
from blendrag.fusor.selection import Schedule, SelectionPolicy, make_policy
from blendrag.model.adapter import ModelAdapter
from blendrag.planning.calibration import Calibration, nearest
from blendrag.planning.plan import MODE_FULL, Plan, Reason
from blendrag.planning.profile import Profile
from blendrag.text.prompt import PromptPlan


@dataclass(frozen=True)
class Task:
    """A request with nothing left to default."""

    plan: PromptPlan
    mode: Mode
    policy: str
    schedule: Schedule
    ratio: float
    max_new_tokens: int
    options: Options
    started: float
    """``time.perf_counter()`` when the caller asked."""
    source_of: dict[str, str]
    notes: tuple[str, ...]

    why_computed: Reason = MODE_FULL
    """Why every chunk is computed, if nothing may be loaded."""
    sequences: int = 1
    """Rows ``generate`` runs with: beams or returned sequences."""
    is_auto: bool = False
    """Whether ``ratio`` is only the least, and the loading controller decides."""
    calibrated: tuple[Calibration, ...] = ()
    """What was found for its policy, where the schedule is left to that: the nearest to its ratio runs."""
    profile: Profile | None = None
    """What this machine takes for what, if that was measured."""

    def schedule_at(self, ratio: float) -> Schedule:
        """The one that runs if that ratio is taken."""
        found = nearest(self.calibrated, ratio)
        return self.schedule if found is None else found.schedule

    def calibration_notes(self, ratio: float) -> tuple[str, ...]:
        """What is to be said of a schedule that was found at another ratio than that."""
        found = nearest(self.calibrated, ratio)
        note = "" if found is None else found.note(ratio)
        return (note,) if note else ()

    def new_policy(self) -> SelectionPolicy:
        """The one that chooses what is recomputed, for one fusion."""
        if self.mode == "reuse":
            return make_policy("reuse")
        if self.mode == "prefix":  # every loaded span is exact: no candidates to choose among
            return make_policy("full")
        return make_policy(self.policy)


@dataclass(frozen=True)
class Prepared:
    """A task and its plan, whose readers are open: its holder closes the plan."""

    task: Task
    plan: Plan


def check_fits(plan: PromptPlan, max_new_tokens: int, adapter: ModelAdapter) -> None:
    """Raise :class:`ContextOverflowError` for a prompt without room for its answer."""
    tokens = len(plan.ids)
    if tokens + max_new_tokens > adapter.context_tokens:
        raise ContextOverflowError(tokens, max_new_tokens, adapter.context_tokens)
