"""Calibrates the schedule of an engine's model on its own corpus (``blendrag calibrate``).

The search runs in the caller's thread, so that Ctrl-C ends it at once; every prefill runs on the worker.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

from blendrag.engine.planner import UNTRUSTED, Planner, check_fits
from blendrag.engine.rendering import prompt_over
from blendrag.engine.request import RagPrompt
from blendrag.engine.resources import Resources
from blendrag.engine.worker import Worker
from blendrag.errors import (
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
    Found,
    Reference,
    SampledQuestion,
    deviation,
    mean_deviation,
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
from blendrag.text.prompt import SegmentedPrompt

T = TypeVar("T")
Watch = Callable[[Found], None]
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
        for name, what in (("samples", "prompts"), ("top_k", "chunks")):
            if getattr(self, name) < 1:
                raise InvalidInputError(
                    f"{name} is {getattr(self, name)}, expected 1 or more {what}"
                )
        if not self.minutes > 0:
            raise InvalidInputError(f"minutes is {self.minutes}, expected more than 0")
        if not make_policy(self.policy).follows_schedule:
            raise InvalidInputError(
                f"policy {self.policy!r} follows no schedule; expected one that does, such as query, "
                "hkvd or blend"
            )


@dataclass(frozen=True)
class CalibrationReport:
    """What was found, and what it was chosen from."""

    calibration: Calibration
    search: Found
    seconds: float
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
        return {
            **asdict(self.calibration),
            "families": {str(each.schedule): each.deviation for each in self.search.families},
            "tried": self.search.tried,
            "interrupted": self.search.interrupted,
            "out_of_time": self.search.out_of_time,
            **{name: getattr(self, name) for name in ("seconds", "gain", "gain_error", "note")},
        }


def calibrate(
    resources: Resources,
    planner: Planner,
    segments: Callable[[RagPrompt], SegmentedPrompt],
    worker: Worker,
    options: CalibrationOptions,
    watch: Watch = lambda found: None,
) -> CalibrationReport:
    """See :meth:`BlendEngine.calibrate`."""
    began = time.monotonic()
    resources.require_corpus()  # before a store is made where there is none
    if not resources.is_writable:
        raise StoreUnavailableError(
            f"store {resources.root} cannot be written, so nothing found could be kept; calibrate on a "
            "copy of it"
        )
    prompts = [
        segments(prompt_over(each.question, each.chunks)) for each in _asked(resources, options)
    ]
    adapter = resources.adapter
    limit = min(adapter.context_tokens, adapter.blend_limit_tokens or adapter.context_tokens)
    for prompt in prompts:
        check_fits(prompt, ANSWER_TOKENS, limit)
    controller = worker.run(lambda: _controller(resources, planner))
    policy, layers = make_policy(options.policy), len(adapter.layout.layers)
    deviations = PromptDeviations(resources, worker, controller, policy, options.ratio)
    deviations.prefill(prompts)
    earlier = calibrations_of(resources.root, controller.namespace, options.policy)
    known = nearest((each for each in earlier if len(each.weights) == layers - 1), options.ratio)
    deadline = began + 60 * options.minutes
    found = search(
        mean_deviation(deviations, len(deviations.references)),
        layers,
        options.ratio,
        options.seed,
        lambda: time.monotonic() < deadline,
        watch,
        None if known is None else Schedule("vector", known.weights),
    )
    best, family = found.best, found.family
    calibration = Calibration(
        policy=str(policy),
        ratio=options.ratio,
        weights=tuple(best.schedule.shares(options.ratio, layers)),
        deviation=best.deviation,
        family=str(family.schedule),
        family_deviation=family.deviation,
        reuse_deviation=statistics.fmean(deviations.reused),
        prompts=len(deviations.references),
        seed=options.seed,
        questions=Questions.GIVEN if options.questions else Questions.PSEUDO,
    )
    with named_errors(f"writing the schedule below {resources.root}"):
        calibrations(resources.root, controller.namespace).keep(calibration)
    gains = deviations.gains(best.schedule)
    error = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else None
    seconds = time.monotonic() - began
    return CalibrationReport(calibration, found, seconds, statistics.fmean(gains), error)


def _asked(resources: Resources, options: CalibrationOptions) -> list[SampledQuestion]:
    corpus = resources.require_corpus()
    if not options.questions:
        return list(sample_corpus(corpus, options.samples, options.top_k, options.seed))
    drawn = sample_questions(options.questions, options.samples, options.seed)
    retriever = resources.retriever()
    chunks = [[c.text for c in retriever.retrieve(each, options.top_k)] for each in drawn]
    return [SampledQuestion(each, tuple(texts)) for each, texts in zip(drawn, chunks, strict=True)]


def _controller(resources: Resources, planner: Planner) -> Controller:
    """On the worker. Raises :class:`CorpusError` if stored KV must not be used."""
    adapter = resources.adapter
    adapter.require_blendable()
    with adapter.lock:
        namespace = resources.kv_validity.namespace
        if not resources.kv_validity.is_valid(namespace):
            raise CorpusError(UNTRUSTED.text)
        return planner.controller(namespace)


@dataclass
class PromptDeviations:
    """Deviation of any schedule on each prompt, one prefill at a time on the worker.

    Between two prefills somebody may change the model, so each checks that it is still the one whose KV the
    controller reads.
    """

    resources: Resources
    worker: Worker
    controller: Controller
    policy: SelectionPolicy
    ratio: float
    references: list[Reference] = field(default_factory=list)
    reused: list[float] = field(default_factory=list)
    """Deviation of each prompt with nothing recomputed."""
    known: dict[tuple[int, Schedule], float] = field(default_factory=dict)

    def prefill(self, plans: Sequence[SegmentedPrompt]) -> None:
        """Prefill ``plans`` in full; those that hold nothing to blend are left out."""
        adapter = self.resources.adapter
        for plan in plans:
            expected = self._run(partial(reference, adapter, plan))
            reused = self._deviation(expected, make_policy("reuse"), Schedule("constant"))
            if reused is not None:
                self.references.append(expected)
                self.reused.append(reused)
        if not self.references:
            raise InvalidInputError(
                f"store {self.resources.root} holds no KV of {adapter.model_id} that could be blended; "
                "expected an ingested corpus, ingest it with this model first"
            )

    def gains(self, schedule: Schedule) -> list[float]:
        """Per prompt, how much closer ``schedule`` is to full prefill than recomputing nothing."""
        return [reused - self(i, schedule) for i, reused in enumerate(self.reused)]

    def __call__(self, index: int, schedule: Schedule) -> float:
        if (index, schedule) not in self.known:
            measured = self._deviation(self.references[index], self.policy, schedule)
            if measured is None:
                raise CorruptKVError("chunks were removed during the calibration; start it again")
            self.known[index, schedule] = measured
        return self.known[index, schedule]

    def _deviation(
        self, expected: Reference, policy: SelectionPolicy, schedule: Schedule
    ) -> float | None:
        try:
            return self._run(
                lambda: deviation(
                    self.resources.fusor, self.controller, expected, policy, schedule, self.ratio
                )
            )
        except SpanCorruptError as exc:
            raise CorruptKVError(
                "stored KV failed verification and was set aside; ingest again, then calibrate"
            ) from exc

    def _run(self, call: Callable[[], T]) -> T:
        """On the worker, under the model's lock. Raises :class:`IdentityChangedError`."""
        adapter = self.resources.adapter

        def run() -> T:
            with adapter.lock:
                if self.resources.kv_validity.namespace != self.controller.namespace:
                    raise IdentityChangedError(
                        f"the weights or adapters of {adapter.model_id} changed during the "
                        "calibration; nothing was kept, start it again"
                    )
                return call()

        return self.worker.run(run)
