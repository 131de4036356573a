"""Calibrates the schedule of an engine's model on its own corpus (``blendrag calibrate``).

The search runs in the caller's thread, so that Ctrl-C ends it at once; every prefill runs on the worker.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from blendrag.engine.planner import UNTRUSTED
from blendrag.engine.rendering import prompt_over
from blendrag.engine.resources import Resources
from blendrag.engine.worker import Worker
from blendrag.errors import (
    ContextOverflowError,
    CorpusError,
    CorruptKVError,
    IdentityChangedError,
    InvalidInputError,
    StoreUnavailableError,
)
from blendrag.fusor.loader import SpanCorruptError
from blendrag.fusor.selection import Schedule, SelectionPolicy, make_policy
from blendrag.planning.calibrate import (
    ANSWER_TOKENS,
    MeanDeviation,
    Reference,
    SampledQuestion,
    Step,
    Tried,
    deviation,
    reference,
    sample_corpus,
    sample_questions,
    search,
)
from blendrag.planning.calibration import (
    Calibration,
    Questions,
    calibrations,
    calibrations_of,
    nearest,
)
from blendrag.planning.controller import Controller
from blendrag.store.durable import named_errors
from blendrag.text.prompt import PromptPlan

if TYPE_CHECKING:
    from blendrag.engine.engine import BlendEngine

T = TypeVar("T")
Watch = Callable[[Step], None]
#: A gain counts if it is this many standard errors.
SURE = 2


@dataclass(frozen=True)
class CalibrationOptions:
    """How to calibrate; the same options on the same store find the same schedule, time permitting.

    The search continues from an earlier result for the policy, at the nearest ratio.
    """

    policy: str
    ratio: float
    samples: int = 16
    """Prompts to measure every schedule on."""
    seed: int = 0
    minutes: float = 10.0
    top_k: int = 6
    questions: tuple[str, ...] = ()
    """Asked in place of the first sentences of chunks."""

    def __post_init__(self) -> None:
        if not 0.0 < self.ratio < 1.0:
            raise InvalidInputError(
                f"ratio {self.ratio} leaves nothing to spread over the layers; expected above 0 and "
                "below 1"
            )
        if self.samples < 1:
            raise InvalidInputError(f"samples is {self.samples}, expected 1 or more prompts")
        if not self.minutes > 0:
            raise InvalidInputError(f"minutes is {self.minutes}, expected more than 0")
        if self.top_k < 1:
            raise InvalidInputError(f"top_k is {self.top_k}, expected 1 or more chunks")
        if not make_policy(self.policy).follows_schedule:
            raise InvalidInputError(
                f"policy {self.policy!r} follows no schedule; expected one that does, such as query, "
                "hkvd or blend"
            )


@dataclass(frozen=True)
class CalibrationReport:
    """What was found, and what it was chosen from."""

    calibration: Calibration
    families: tuple[Tried, ...]
    tried: int
    seconds: float
    interrupted: bool
    out_of_time: bool
    gain: float
    """How much closer the schedule is to full prefill than recomputing nothing: mean difference in KL over
    the prompts, in nats per token."""
    gain_error: float | None
    """Its standard error; ``None`` for a single prompt."""

    @property
    def note(self) -> str:
        """A sentence if recomputing nothing scores as well within noise; else empty."""
        if self.gain_error is not None and self.gain > SURE * self.gain_error:
            return ""
        found = self.calibration
        noise = "" if self.gain_error is None else f" ± {SURE * self.gain_error:.2g}"
        return (
            f"recomputing nothing scores as well on these {found.prompts} prompts: KL "
            f"{found.reuse_deviation:.3g} nats per token, {found.deviation:.3g} with the best schedule "
            f"(difference {self.gain:.2g}{noise}); calibrate on more (--samples), or answer with --mode reuse"
        )

    def as_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        return {
            **fields.pop("calibration"),
            **fields,
            "families": {str(each.schedule): each.deviation for each in self.families},
            "note": self.note,
        }


def calibrate(
    engine: BlendEngine,
    worker: Worker,
    options: CalibrationOptions,
    watch: Watch = lambda step: None,
) -> CalibrationReport:
    """See :meth:`BlendEngine.calibrate`."""
    began = time.monotonic()
    resources = engine.resources
    resources.require_corpus()  # before a store is made where there is none
    if not resources.is_writable:
        raise StoreUnavailableError(
            f"store {resources.root} cannot be written, so nothing found could be kept; calibrate on a "
            "copy of it"
        )
    policy = make_policy(options.policy)
    plans = [_plan(engine, asked) for asked in _asked(resources, options)]
    controller = worker.run(lambda: _controller(engine))
    deviations = PromptDeviations(resources, worker, controller, policy, options.ratio)
    deviations.prefill(plans)
    deadline = began + 60 * options.minutes
    layers = len(resources.adapter.layout.layers)
    found = search(
        MeanDeviation(deviations, deviations.prompts),
        layers,
        options.ratio,
        options.seed,
        lambda: time.monotonic() < deadline,
        watch,
        _known(resources, controller.namespace, options),
    )
    best, family = found.best, found.family
    assert best is not None
    calibration = Calibration(
        policy=str(policy),
        ratio=options.ratio,
        weights=tuple(best.schedule.shares(options.ratio, layers)),
        deviation=best.deviation,
        family=str(family.schedule),
        family_deviation=family.deviation,
        reuse_deviation=deviations.reuse_deviation,
        prompts=deviations.prompts,
        seed=options.seed,
        questions=Questions.GIVEN if options.questions else Questions.PSEUDO,
    )
    with named_errors(f"writing the schedule below {resources.root}"):
        calibrations(resources.root, controller.namespace).keep(calibration)
    gains = deviations.gains(best.schedule)
    error = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else None
    return CalibrationReport(
        calibration, tuple(found.families), found.tried, time.monotonic() - began,
        found.interrupted, found.out_of_time, statistics.fmean(gains), error,
    )  # fmt: skip


def _known(resources: Resources, namespace: str, options: CalibrationOptions) -> Schedule | None:
    """An earlier result to continue from."""
    found = nearest(calibrations_of(resources.root, namespace, options.policy), options.ratio)
    if found is None or len(found.weights) != len(resources.adapter.layout.layers) - 1:
        return None
    return Schedule("vector", found.weights)


def _asked(resources: Resources, options: CalibrationOptions) -> list[SampledQuestion]:
    corpus = resources.require_corpus()
    if not options.questions:
        return list(sample_corpus(corpus, options.samples, options.top_k, options.seed))
    retriever = resources.retriever()
    return [
        SampledQuestion(
            question, tuple(c.text for c in retriever.retrieve(question, options.top_k))
        )
        for question in sample_questions(options.questions, options.samples, options.seed)
    ]


def _plan(engine: BlendEngine, asked: SampledQuestion) -> PromptPlan:
    """As :meth:`BlendEngine.ask` would make it. Raises :class:`ContextOverflowError`."""
    plan, adapter = engine.plan(prompt_over(asked.question, asked.chunks)), engine.adapter
    limit = min(adapter.context_tokens, adapter.blend_limit_tokens or adapter.context_tokens)
    if len(plan.ids) + ANSWER_TOKENS > limit:
        raise ContextOverflowError(len(plan.ids), ANSWER_TOKENS, limit)
    return plan


def _controller(engine: BlendEngine) -> Controller:
    """On the worker. Raises :class:`CorpusError` if stored KV must not be used."""
    resources, adapter = engine.resources, engine.adapter
    adapter.require_blendable()
    with adapter.lock:
        namespace = resources.kv_validity.namespace
        if not resources.kv_validity.is_valid(namespace):
            raise CorpusError(UNTRUSTED.text)
        return engine.controller(namespace)


class PromptDeviations:
    """Deviation of any schedule on each prompt, one prefill at a time on the worker.

    Between two prefills somebody may change the model, so each checks that it is still the one whose KV the
    controller reads.
    """

    def __init__(
        self,
        resources: Resources,
        worker: Worker,
        controller: Controller,
        policy: SelectionPolicy,
        ratio: float,
    ) -> None:
        self._resources = resources
        self._worker = worker
        self._controller = controller
        self._policy = policy
        self._ratio = ratio
        self._references: list[Reference] = []
        self._reused: list[float] = []
        self._known: dict[tuple[int, Schedule], float] = {}

    @property
    def prompts(self) -> int:
        return len(self._references)

    @property
    def reuse_deviation(self) -> float:
        """Mean over the prompts, with nothing recomputed."""
        return statistics.fmean(self._reused)

    def prefill(self, plans: Sequence[PromptPlan]) -> None:
        """Prefill ``plans`` in full; those that hold nothing to blend are left out."""
        adapter = self._resources.adapter
        for plan in plans:
            expected = self._run(partial(reference, adapter, plan))
            reused = self._deviation(expected, make_policy("reuse"), Schedule("constant"))
            if reused is not None:
                self._references.append(expected)
                self._reused.append(reused)
        if not self._references:
            raise InvalidInputError(
                f"store {self._resources.root} holds no KV of {adapter.model_id} that could be blended; "
                "expected an ingested corpus, ingest it with this model first"
            )

    def gains(self, schedule: Schedule) -> list[float]:
        """Per prompt, how much closer ``schedule`` is to full prefill than recomputing nothing."""
        return [reused - self(i, schedule) for i, reused in enumerate(self._reused)]

    def __call__(self, index: int, schedule: Schedule) -> float:
        known = self._known.get((index, schedule))
        if known is not None:
            return known
        measured = self._deviation(self._references[index], self._policy, schedule)
        if measured is None:
            raise CorruptKVError("chunks were removed during the calibration; start it again")
        self._known[index, schedule] = measured
        return measured

    def _deviation(
        self, expected: Reference, policy: SelectionPolicy, schedule: Schedule
    ) -> float | None:
        def measure() -> float | None:
            fusor = self._resources.fusor
            return deviation(fusor, self._controller, expected, policy, schedule, self._ratio)

        try:
            return self._run(measure)
        except SpanCorruptError as exc:
            raise CorruptKVError(
                "stored KV failed verification and was set aside; ingest again, then calibrate"
            ) from exc

    def _run(self, call: Callable[[], T]) -> T:
        """On the worker, under the model's lock. Raises :class:`IdentityChangedError`."""
        adapter = self._resources.adapter

        def run() -> T:
            with adapter.lock:
                if self._resources.kv_validity.namespace != self._controller.namespace:
                    raise IdentityChangedError(
                        f"the weights or adapters of {adapter.model_id} changed during the "
                        "calibration; nothing was kept, start it again"
                    )
                return call()

        return self._worker.run(run)
