"""A request with nothing left to default, and the same once its loads are open."""

from __future__ import annotations

from dataclasses import dataclass

from blendrag.config import Mode
from blendrag.engine.options import Options
from blendrag.errors import ContextOverflowError
from blendrag.fusor import BlendRequest
from blendrag.fusor.selection import Schedule, SelectionPolicy, make_policy
from blendrag.model.adapter import ModelAdapter
from blendrag.planning.calibration import Calibration, nearest
from blendrag.planning.controller import LoadPlan
from blendrag.planning.decide import Decided
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

    why_computed: str = "mode full computes every token"
    """What a chunk's report says when nothing may be loaded."""
    sequences: int = 1
    """Rows ``generate`` runs with: beams or returned sequences."""
    is_auto: bool = False
    """Whether ``ratio`` is only the least, and the loading controller decides."""
    follows_load: bool = False
    """Whether it may bring a schedule, too."""
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
    """A task with its loads open and everything about it decided. Whoever has it closes ``load``."""

    task: Task
    load: LoadPlan
    decided: Decided

    def request(self, prompt_tokens: int) -> BlendRequest:
        """What the fusor is asked, of the prompt's first ``prompt_tokens``."""
        task = self.task
        # one that is open means something only where there is something to blend
        schedule = Schedule("constant") if task.schedule.is_open else task.schedule
        return BlendRequest(
            prompt_tokens,
            self.load.spans,
            task.new_policy(),
            schedule,
            task.ratio,
            self.load.chunks_end,
        )


def check_fits(plan: PromptPlan, max_new_tokens: int, adapter: ModelAdapter) -> None:
    """Raise :class:`ContextOverflowError` for a prompt without room for its answer."""
    tokens = len(plan.ids)
    if tokens + max_new_tokens > adapter.context_tokens:
        raise ContextOverflowError(tokens, max_new_tokens, adapter.context_tokens)
