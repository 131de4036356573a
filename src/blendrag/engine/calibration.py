"""Finds the selection policy and the ratio for an engine's model on its own corpus (``blendrag calibrate``).

Prompts are drawn in the caller's thread, so that Ctrl-C ends it at once; the scheduler runs every prefill.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

from blendrag.config import DEFAULT_POLICY, DEFAULT_RATIO, OF_ENGINES, Settings
from blendrag.engine.kv_namespace import KVNamespace
from blendrag.engine.planner import UNTRUSTED, Planner, check_fits
from blendrag.engine.rendering import build_rag_prompt
from blendrag.engine.request import RagPrompt
from blendrag.errors import (
    CorpusError,
    CorruptKVError,
    IdentityChangedError,
    InvalidInputError,
    StoreUnavailableError,
)
from blendrag.fusor.loader import SpanCorruptError
from blendrag.option import refuses_unknown
from blendrag.planning.calibrate import (
    ANSWER_TOKENS,
    CANDIDATES,
    MIN_PROMPTS,
    MIN_STANDARD_ERRORS,
    Calibration,
    Closeness,
    PartialRace,
    Race,
    SampledQuestion,
    Trial,
    calibrations,
    deviation,
    partial_races,
    reference,
    sample_corpus,
    sample_questions,
)
from blendrag.planning.controller import Controller
from blendrag.serving.scheduler import Scheduler
from blendrag.store.durable import named_errors
from blendrag.store.identity import digest_fields
from blendrag.store.records import Records
from blendrag.text.prompt import SegmentedPrompt

T = TypeVar("T")
#: ``watch(race, done)`` after each prompt; ``done`` is the part of the calibration that is over.
Watch = Callable[[Race, float], None]


@refuses_unknown("an option of a calibration", elsewhere=OF_ENGINES)
@dataclass(frozen=True)
class CalibrationOptions:
    """How to calibrate; the same options on the same store measure the same prompts."""

    ratio: float
    """The largest one: smaller ratios are taken if they are as close to full prefill."""
    samples: int = 32
    """The most prompts to measure."""
    minutes: float = 10.0
    """The time limit; fewer prompts are measured if it is reached."""
    top_k: int = 6
    questions: tuple[str, ...] = ()
    """Asked in place of questions about chunks."""

    def __post_init__(self) -> None:
        if not 0.0 < self.ratio < 1.0:
            raise InvalidInputError(
                f"ratio {self.ratio} leaves nothing to compare; expected the largest ratio that requests may "
                "take, above 0 and below 1"
            )
        for name, what in (("samples", "prompts"), ("top_k", "chunks")):
            if getattr(self, name) < 1:
                raise InvalidInputError(
                    f"{name} is {getattr(self, name)}, expected 1 or more {what}"
                )
        if not self.minutes > 0:
            raise InvalidInputError(f"minutes is {self.minutes}, expected more than 0")


@dataclass(frozen=True)
class CalibrationReport:
    """What was found, and what it was chosen from."""

    found: tuple[Calibration, ...]
    """One for each ratio, ascending; empty if too few prompts were measured. Then nothing was kept."""
    race: Race
    seconds: float
    interrupted: bool
    before: int = 0
    """Prompts that an earlier run had measured, which this one went on from."""

    @property
    def chosen(self) -> Calibration | None:
        """What requests take that name neither policy nor ratio."""
        return next((each for each in self.found if each.is_chosen), None)

    @property
    def conclusion(self) -> str:
        """One sentence a line."""
        if self.chosen is None:
            count = len(self.race.rows)
            measured = "1 prompt was" if count == 1 else f"{count} prompts were"
            return (
                f"{measured} measured and nothing was chosen yet, because "
                f"{MIN_PROMPTS} or more must choose a policy and check it; the same command goes on from here"
            )
        largest = self.found[-1]
        if self.chosen is largest:
            first = (
                f"no smaller ratio is as close to full prefill as {largest.ratio:g}, which stays"
            )
        else:
            first = f"ratio {self.chosen.ratio:g} is as close to full prefill as {largest.ratio:g}"
        return "\n".join(
            (
                f"{first}: requests that name neither ratio nor policy take {self.chosen.trial}",
                *map(_line, self.found),
                f"means over {largest.prompts} of {len(self.race.rows)} prompts, which chose no policy: KL "
                "from full prefill in nats per token, and tokens that agree with it; ± is two standard "
                f"errors of the difference to ratio {largest.ratio:g}",
                f"each policy holds for its ratio, and requests at other ratios take {DEFAULT_POLICY}; "
                "blendrag calibrate --undo forgets all of this",
            )
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "calibration": asdict(self.chosen) if self.chosen else None,
            "ratios": [asdict(each) for each in self.found],
            "rows": [{str(t): d._asdict() for t, d in row.items()} for row in self.race.rows],
            "seconds": self.seconds,
            "interrupted": self.interrupted,
            "conclusion": self.conclusion,
        }


@dataclass(frozen=True)
class ForgottenCalibration:
    """What was kept of calibrations and is removed now; false if there was nothing."""

    had_result: bool
    """Whether a policy and a ratio had been found."""
    prompts: int
    """Measured prompts of a calibration that was not run to its end."""

    def __bool__(self) -> bool:
        return self.had_result or self.prompts > 0


def _line(found: Calibration) -> str:
    """What was measured at one ratio."""
    error = MIN_STANDARD_ERRORS * found.loss_error
    compared = f" ± {error:.2g}" if error else ""
    line = (
        f"  {found.trial}: KL {found.kl:.3g}{compared}, {100 * (found.agreement or 0):.1f}% agree"
    )
    if found.policy == found.candidate:
        return line
    gain, noise = found.gain, MIN_STANDARD_ERRORS * found.gain_error
    return f"{line}; {found.candidate} gains {gain:.2g} ± {noise:.2g}, which is not enough"


def calibrate(
    kv: KVNamespace,
    planner: Planner,
    segments: Callable[[RagPrompt], SegmentedPrompt],
    scheduler: Scheduler,
    options: CalibrationOptions,
    watch: Watch = lambda race, done: None,
) -> CalibrationReport:
    """See :meth:`BlendEngine.calibrate`."""
    began, limit_s = time.monotonic(), 60 * options.minutes
    kv.corpus.require()  # before a store is made where there is none
    if not kv.is_writable:
        raise StoreUnavailableError(
            f"store {kv.root} cannot be written, so nothing found could be kept; calibrate on a "
            "copy of it"
        )
    asked = _asked(kv, options)
    prompts = [segments(build_rag_prompt(each.question, each.chunks)) for each in asked]
    for prompt in prompts:
        check_fits(len(prompt.ids), ANSWER_TOKENS, kv.model.adapter.context_tokens)
    controller = scheduler.run(lambda: _controller(kv, planner))
    race, interrupted, is_complete = Race(options.ratio, len(prompts)), False, False
    kept = partial_races(kv.root, controller.namespace)
    compared = options.ratio, DEFAULT_POLICY, CANDIDATES
    ids = [str(compared).encode(), *(str(p.ids).encode() for p in prompts)]
    digest = digest_fields(ids)
    first = _resumed(kept, digest, race, len(prompts))
    before = len(race.rows)

    def done(measured: int) -> float:
        return max(measured / len(prompts), (time.monotonic() - began) / limit_s)

    try:
        for measured, prompt in enumerate(prompts[first:]):
            if measured and (time.monotonic() - began) * (measured + 1) / measured > limit_s:
                break  # the next one would take longer
            race.narrow(done(first + measured))
            row = _deviations(kv, scheduler, controller, prompt, race.trials)
            if row:
                race.rows.append(row)
            with named_errors(f"keeping the measured prompts below {kv.root}"):
                kept.replace([PartialRace.of(digest, race, first + measured + 1)])
            if row:
                watch(race, min(1.0, done(first + measured + 1)))
        else:
            is_complete = True
    except KeyboardInterrupt:
        interrupted = True
    if not race.rows and not interrupted:
        raise InvalidInputError(
            f"store {kv.root} holds no KV of {kv.model.adapter.model_id} that could be blended; expected an "
            "ingested corpus, ingest it with this model first"
        )
    found = race.result()
    if found:
        with named_errors(f"writing the calibration below {kv.root}"):
            calibrations(kv.root, controller.namespace).replace(found)
    if is_complete:
        with named_errors(f"removing the measured prompts below {kv.root}"):
            kept.clear()
    return CalibrationReport(found, race, time.monotonic() - began, interrupted, before)


def undo(kv: KVNamespace, scheduler: Scheduler) -> ForgottenCalibration:
    """See :meth:`BlendEngine.forget_calibration`."""
    kv.corpus.require()

    def namespace() -> str:
        with kv.model.adapter.lock:
            return kv.validity.namespace

    name = scheduler.run(namespace)
    with named_errors(f"removing the calibration below {kv.root}"):
        unfinished = partial_races(kv.root, name)
        prompts = sum(len(race.rows) for race in unfinished.entries())
        unfinished.clear()
        return ForgottenCalibration(calibrations(kv.root, name).clear(), prompts)


def largest_ratio(settings: Settings) -> float:
    """The ratio that a calibration compares smaller ones with: the one of requests, if any is smaller."""
    return settings.fixed_ratio if 0 < settings.fixed_ratio < 1 else DEFAULT_RATIO


def _asked(kv: KVNamespace, options: CalibrationOptions) -> list[SampledQuestion]:
    """The questions of the prompts. Raises :class:`InvalidInputError` if there are too few."""
    corpus = kv.corpus.require()
    if options.questions:
        retriever = kv.corpus.retriever()
        asked = [
            SampledQuestion(each, tuple(c.text for c in retriever.retrieve(each, options.top_k)))
            for each in sample_questions(options.questions, options.samples)
        ]
    else:
        asked = list(sample_corpus(corpus, options.samples, options.top_k))
    if len(asked) < MIN_PROMPTS:
        there = "is 1 prompt" if len(asked) == 1 else f"are {len(asked)} prompts"
        raise InvalidInputError(
            f"there {there} to calibrate on, expected {MIN_PROMPTS} or more, some to "
            "choose a policy and others to check it; give more --questions or --samples, or ingest more"
        )
    return asked


def _resumed(kept: Records[PartialRace], digest: str, race: Race, prompts: int) -> int:
    """How many prompts an earlier run has done, with which ``race`` goes on."""
    done = 0
    for earlier in kept.entries():
        if earlier.digest == digest and earlier.prompts_done < prompts and earlier.fits(race):
            earlier.resume(race)
            done = earlier.prompts_done
    return done


def _controller(kv: KVNamespace, planner: Planner) -> Controller:
    """On the thread that computes. Raises :class:`CorpusError` if stored KV must not be used."""
    adapter = kv.model.adapter
    adapter.require_fusing()
    with adapter.lock:
        namespace = kv.validity.namespace
        if not kv.validity.is_valid(namespace):
            why = kv.validity.why_invalid(namespace)
            raise CorpusError(f"{UNTRUSTED.text}: {why}")
        return planner.controller(namespace)


def _deviations(
    kv: KVNamespace,
    scheduler: Scheduler,
    controller: Controller,
    prompt: SegmentedPrompt,
    trials: Sequence[Trial],
) -> dict[Trial, Closeness]:
    """What each of ``trials`` measured; empty if ``prompt`` holds nothing to blend.

    One prefill at a time. Between two of them somebody may change the model, so each checks
    its identity. Raises :class:`IdentityChangedError`, :class:`CorruptKVError`.
    """
    adapter, fusor = kv.model.adapter, kv.model.fusor

    def run(call: Callable[[], T]) -> T:
        def locked() -> T:
            with adapter.lock:
                if kv.validity.namespace != controller.namespace:
                    raise IdentityChangedError(
                        f"the weights or adapters of {adapter.model_id} changed during the calibration; "
                        "nothing was chosen, start it again"
                    )
                return call()

        return scheduler.run(locked)

    expected = run(lambda: reference(adapter, prompt))
    found: dict[Trial, Closeness] = {}
    for trial in trials:
        try:
            measured = run(partial(deviation, fusor, controller, expected, trial))
        except SpanCorruptError as exc:
            raise CorruptKVError(
                "stored KV failed verification and was set aside; ingest again, then calibrate"
            ) from exc
        if measured is None:
            return {}
        found[trial] = measured
    return found
