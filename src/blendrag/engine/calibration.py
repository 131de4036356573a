"""Calibrating the schedule of an engine's model on its own corpus (``blendrag calibrate``).

Owns how a sample becomes prompts the engine would be asked, and where each piece of work runs: the
search in the caller's thread, so that Ctrl-C ends it at once, every forward on the worker.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from blendrag.engine.measured import Measured
from blendrag.engine.planner import UNTRUSTED
from blendrag.engine.rendering import prompt_over
from blendrag.engine.resources import Resources
from blendrag.engine.worker import Worker
from blendrag.errors import (
    ContextOverflowError,
    CorpusError,
    InvalidInputError,
    StoreUnavailableError,
)
from blendrag.fusor.selection import Schedule, SelectionPolicy, make_policy
from blendrag.fusor.selection.schedule import CALIBRATED
from blendrag.planning.calibration import GIVEN, PSEUDO, Calibration, remember, resolve
from blendrag.planning.controller import Controller
from blendrag.planning.deviation import ANSWER_TOKENS, Sample
from blendrag.planning.sample import Asked, sample_corpus, sample_questions
from blendrag.planning.search import Found, Step, Tried, search
from blendrag.store.durable import named_errors
from blendrag.text.prompt import PromptPlan

if TYPE_CHECKING:
    from blendrag.engine.engine import BlendEngine

Watch = Callable[[Step], None]
#: A gain of so many standard errors is taken for one.
SURE = 2


@dataclass(frozen=True)
class CalibrationOptions:
    """How to calibrate; the same options on the same store find the same schedule, time permitting.

    What was found before for the policy, at the nearest ratio, is gone on from.
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
    """What was found, and what it was found among."""

    calibration: Calibration
    families: tuple[Tried, ...]
    tried: int
    seconds: float
    interrupted: bool
    out_of_time: bool
    gain: float
    """By how much the schedule found is closer to full prefill than recomputing nothing: mean over the
    prompts of the difference in KL, in nats per token."""
    gain_error: float | None
    """Its standard error; ``None`` for a single prompt."""

    @property
    def note(self) -> str:
        """A sentence where recomputing nothing scores as well within noise; else empty."""
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
            **self.calibration.as_dict(),
            "families": {str(each.schedule): each.deviation for each in self.families},
            **{k: v for k, v in asdict(self).items() if k not in ("calibration", "families")},
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
    controller, namespace = worker.run(lambda: _controller(engine))
    of = Measured(resources, worker, controller, namespace, policy, options.ratio)
    of.expect(plans)
    deadline = began + 60 * options.minutes
    layers = len(resources.adapter.layout.layers)
    found = search(
        Sample(of, of.prompts),
        layers,
        options.ratio,
        options.seed,
        lambda: time.monotonic() < deadline,
        watch,
        _known(resources, namespace, options),
    )
    calibration = _calibration(found, of, options, policy, layers)
    with named_errors(f"writing the schedule below {resources.root}"):
        remember(resources.root, namespace, calibration)
    assert found.best is not None
    gains = of.gains(found.best.schedule)
    error = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else None
    return CalibrationReport(
        calibration, tuple(found.families), found.tried, time.monotonic() - began,
        found.interrupted, found.out_of_time, statistics.fmean(gains), error,
    )  # fmt: skip


def _known(resources: Resources, namespace: str, options: CalibrationOptions) -> Schedule | None:
    """What was found before, to go on from."""
    schedule = Schedule(CALIBRATED)
    found = resolve(resources.root, namespace, schedule, options.policy, options.ratio)
    fits = len(found.weights) == len(resources.adapter.layout.layers) - 1
    return Schedule("vector", found.weights) if found.name == CALIBRATED and fits else None


def _asked(resources: Resources, options: CalibrationOptions) -> list[Asked]:
    corpus = resources.require_corpus()
    if not options.questions:
        return list(sample_corpus(corpus, options.samples, options.top_k, options.seed))
    retriever = resources.retriever()
    return [
        Asked(question, tuple(c.text for c in retriever.retrieve(question, options.top_k)))
        for question in sample_questions(options.questions, options.samples, options.seed)
    ]


def _plan(engine: BlendEngine, asked: Asked) -> PromptPlan:
    """As :meth:`BlendEngine.ask` would make it. Raises :class:`ContextOverflowError`."""
    prompt = prompt_over(asked.question, asked.chunks)
    plan, adapter = engine.plan(prompt), engine.adapter
    limit = min(adapter.context_tokens, adapter.blend_limit_tokens or adapter.context_tokens)
    if len(plan.ids) + ANSWER_TOKENS > limit:
        raise ContextOverflowError(len(plan.ids), ANSWER_TOKENS, limit)
    return plan


def _controller(engine: BlendEngine) -> tuple[Controller, str]:
    """On the worker's thread. Raises :class:`CorpusError` where stored KV is not to be used."""
    resources, adapter = engine.resources, engine.adapter
    adapter.require_blendable()
    with adapter.lock:
        namespace = resources.kv_validity.namespace
        if not resources.kv_validity.is_valid(namespace):
            raise CorpusError(UNTRUSTED.text)
        return engine.controller(namespace), namespace


def _calibration(
    found: Found, of: Measured, options: CalibrationOptions, policy: SelectionPolicy, layers: int
) -> Calibration:
    best, family = found.best, found.family
    assert best is not None
    return Calibration(
        policy=str(policy),
        ratio=options.ratio,
        weights=tuple(best.schedule.shares(options.ratio, layers)),
        deviation=best.deviation,
        family=str(family.schedule),
        family_deviation=family.deviation,
        reuse_deviation=of.reuse_deviation,
        prompts=of.prompts,
        seed=options.seed,
        questions=GIVEN if options.questions else PSEUDO,
    )
