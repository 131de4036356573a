"""Whether stored KV may be used for a request, with what, and what was loaded of it ahead of its turn.

Owns what a task takes over from the store's side: trust in it, the calibrated schedule, the profile of the
machine. Does not know how tokens are made.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from blendrag.config import UNCALIBRATED_SCHEDULE, Settings
from blendrag.engine.kv_writer import BackgroundWriter
from blendrag.engine.packing_rule import PackingRule
from blendrag.engine.resources import Resources
from blendrag.engine.task import Task
from blendrag.engine.together import PrefillTogether
from blendrag.errors import UnsupportedModelError
from blendrag.fusor.selection import Schedule, make_policy
from blendrag.planning.calibration import fitting, nearest
from blendrag.planning.controller import Controller
from blendrag.planning.plan import Reason, ReasonCode
from blendrag.planning.profile import Profile
from blendrag.planning.profile_record import UNREADABLE

UNTRUSTED = (
    "stored KV is not used: the probe stored beside it is damaged, or this machine computes other KV "
    "for it than when the corpus was ingested; ingest again to renew it"
)

UNTRUSTED_KV = Reason(ReasonCode.UNTRUSTED, UNTRUSTED)

UNCALIBRATED = (
    f"no schedule is calibrated for this model and policy, so {UNCALIBRATED_SCHEDULE} was taken; find one "
    "with blendrag calibrate --questions FILE"
)

ENCODED_FIRST = "chunks encoded before the answer instead of after it, as other requests waited: {}"

NO_PROFILE = "ratio auto needs to know what this machine takes for what, and nobody measured that"
OTHER_PROFILE = "the profile kept for ratio auto was measured elsewhere ({})"
UNREADABLE_PROFILE = f"the profile kept for ratio auto is of {UNREADABLE}"
PROFILE_COMMAND = "blendrag profile --model {} --store {}"


class Stored:
    """The KV store as requests see it. Caller holds the model's lock."""

    def __init__(
        self, resources: Resources, settings: Settings, background: BackgroundWriter
    ) -> None:
        self._resources = resources
        self._settings = settings
        self._background = background
        self._told: set[tuple[str, str]] = set()
        """Namespaces and policies of which it was said that no schedule is calibrated for them."""

    def resolve(
        self, task: Task, check: Callable[[], None] | None
    ) -> tuple[Task, Controller | None]:
        """With schedule, profile and controller where stored KV may be used, else with the reason.

        Where requests wait, chunks without KV are encoded before they are needed instead of afterwards;
        ``check`` raises once this one is over. ``None``: its KV is open already, and nothing is encoded.
        """
        resources = self._resources
        if not task.plan.chunks or task.mode == "full":
            return task, None
        namespace = resources.kv_validity.namespace
        if resources.kv_validity.is_valid(namespace):
            task = self._with_profile(self._with_schedule(task, namespace), namespace)
            controller = self.controller(namespace, task.profile)
            if check is not None:
                task = self._with_missing(task, controller, check)
            return task, controller
        resources.forget_signature()
        return replace(task, notes=(*task.notes, UNTRUSTED), why_computed=UNTRUSTED_KV), None

    def together(self) -> PrefillTogether | None:
        """How prompts over stored KV are prefilled together; ``None`` for a model that cannot."""
        resources = self._resources
        with suppress(UnsupportedModelError):
            if resources.adapter.refusal is None and resources.fusor.packs:
                device, limit_bytes = resources.adapter.device, self._settings.batch_bytes
                return PrefillTogether(
                    resources.adapter,
                    resources.fusor,
                    resources.kv_validity.namespace,
                    self.resolve,
                    PackingRule(device, limit_bytes),
                )
        return None

    def controller(self, namespace: str, profile: Profile | None = None) -> Controller:
        """Plans loads of what is stored under ``namespace``."""
        resources = self._resources
        return Controller(
            resources.adapter,
            resources.store,
            namespace,
            resources.prefix_ids,
            self._settings.prefix_min_tokens,
            resources.encoding,
            profile,
        )

    def _with_missing(self, task: Task, controller: Controller, check: Callable[[], None]) -> Task:
        """With what it misses encoded and stored now, if others wait."""
        if task.mode == "prefix" or not self._background.goes_first:
            return task
        encoded = self._background.encode_first(controller.missing(task.plan), check)
        if not encoded:
            return task
        return replace(task, notes=(*task.notes, ENCODED_FIRST.format(encoded)))

    def _with_schedule(self, task: Task, namespace: str) -> Task:
        """What ``calibrated`` means for this model, policy and ratio, and may mean at another one; a note
        if it means nothing, where it decides anything.

        Left to the settings, it is only what was found on questions, and the note is given once.
        """
        if not task.schedule.is_open:
            return task
        root, is_asked = self._resources.root, task.options.schedule is not None
        known = fitting(root, namespace, task.policy, of_questions=not is_asked)
        found = nearest(known, task.ratio)
        decides = task.mode == "blend" and make_policy(task.policy).follows_schedule
        if found is not None:
            return replace(task, schedule=found.schedule, calibrated=known if decides else ())
        tells = decides and (is_asked or self._is_news(namespace, task))
        return replace(
            task,
            schedule=Schedule.parse(UNCALIBRATED_SCHEDULE),
            notes=(*task.notes, UNCALIBRATED) if tells else task.notes,
        )

    def _is_news(self, namespace: str, task: Task) -> bool:
        """Whether nobody was told yet that this model and policy are not calibrated."""
        about = (namespace, task.policy)
        if about in self._told:
            return False
        self._told.add(about)
        return True

    def _with_profile(self, task: Task, namespace: str) -> Task:
        """What this machine takes for what; a note where a ratio was to be found by it and cannot."""
        profile, differences = self._resources.profile_of(namespace)
        if profile is not None or not task.is_auto or task.mode != "blend":
            return replace(task, profile=profile)
        whys = {"": NO_PROFILE, UNREADABLE: UNREADABLE_PROFILE}
        why = whys.get(differences, OTHER_PROFILE.format(differences))
        command = PROFILE_COMMAND.format(self._resources.model_name, self._resources.root)
        note = f"{why}, so ratio {task.ratio:g} was taken; measure with {command}"
        return replace(task, notes=(*task.notes, note))
