"""From a prompt to an answer: planned in the caller's thread, worked off on the engine's.

Owns which task a prompt becomes, with the settings' defaults, and whether stored KV may be used for
it. Does not know how tokens are made (:mod:`blendrag.engine.generation`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from blendrag.anchors import Match
from blendrag.calibrate import nearest
from blendrag.config import AUTO, UNCALIBRATED_SCHEDULE, Settings
from blendrag.controller import Controller, LoadPlan
from blendrag.engine.answers import Started
from blendrag.engine.batch import prepared
from blendrag.engine.decoding import Likelihoods
from blendrag.engine.generation import Generation, Task, check_fits
from blendrag.engine.options import Options
from blendrag.engine.prompts import (
    chunk_matches,
    explain_bos,
    explain_misses,
    refuse_silence,
    render,
)
from blendrag.engine.request_log import log_answer, log_failure
from blendrag.engine.resources import Resources
from blendrag.engine.stream import AnswerStream
from blendrag.engine.types import Answer, Prompt
from blendrag.engine.worker import Worker
from blendrag.errors import InvalidInputError, RequestCancelled, RequestTimeout
from blendrag.prompt import PromptPlan, make_plan
from blendrag.retriever.corpus import Corpus
from blendrag.retriever.passages import StoredChunk
from blendrag.selection import Schedule, make_policy
from blendrag.store.encodings import ENCODINGS

UNTRUSTED = (
    "stored KV is not used: the probe stored beside it is damaged, or this machine computes other KV "
    "for it than when the corpus was ingested; ingest again to renew it"
)

UNCALIBRATED = (
    "no schedule is calibrated for this model and policy, so a fixed one was taken; find one with "
    "blendrag calibrate"
)

NO_PROFILE = "ratio auto needs to know what this machine takes for what, and nobody measured that"
OTHER_PROFILE = "the profile kept for ratio auto was measured elsewhere ({})"
PROFILE_COMMAND = "blendrag profile --model {} --store {}"


class Requests:
    """Starts requests of one engine. Thread-safe."""

    def __init__(
        self,
        resources: Resources,
        settings: Settings,
        worker: Worker,
        later: Callable[[LoadPlan], None],
    ) -> None:
        """``later`` hears what was missed, once the answer is there."""
        self._resources = resources
        self._settings = settings
        self._worker = worker
        self._later = later

    def start(self, prompt: Prompt, options: Options, asked: float | None = None) -> Started:
        """Plan here, in the caller's thread; answer on the worker. Errors of the plan are raised.

        ``asked``: when, by ``time.perf_counter()``, if that was not now.
        """
        return self.submit(self.prepare(prompt, options, asked))

    def start_all(
        self, prompts: Sequence[Prompt], options: Options, keep_errors: bool, asked: float
    ) -> list[Started | Exception]:
        """:meth:`start` for each, once all are planned. Errors of the plan are raised, or kept."""
        prepare = partial(self.prepare, options=options, asked=asked)
        return [
            self.submit(task) if isinstance(task, Task) else task
            for task in prepared(prompts, prepare, keep_errors)
        ]

    def prepare(self, prompt: Prompt, options: Options, asked: float | None = None) -> Task:
        """Plan and check; nothing is computed yet."""
        asked = time.perf_counter() if asked is None else asked
        if options.timeout_s is not None and time.perf_counter() - asked > options.timeout_s:
            raise RequestTimeout(options.timeout_s)  # those of a batch before it took all the time
        return self._task(prompt, options, asked)

    def submit(self, task: Task) -> Started:
        """Have the worker answer ``task`` after what was submitted before."""
        stream = self._stream(task)

        def work() -> Answer:
            try:
                stream.check()
                answer = self._work(task, stream)
            except BaseException as exc:
                log_failure(exc, task.started)
                if isinstance(exc, RequestCancelled | RequestTimeout):
                    # its frames hold the KV cache, for as long as an iterator that was left is kept
                    exc.__traceback__ = None
                raise
            finally:
                stream.finish()
            log_answer(answer.metrics)
            return answer

        return Started(stream, self._worker.submit(work))

    def _stream(self, task: Task) -> AnswerStream:
        options, tokens = task.options, self._resources.tokens
        return AnswerStream(
            tokens.tokenizer,
            options.stop,
            task.started,
            options.timeout_s,
            # calls are written with control tokens, which are text to whoever reads the calls
            hidden=tokens.framing_ids if options.tools else None,
            likely=None if options.logprobs is None else Likelihoods(options.logprobs),
        )

    def _task(self, prompt: Prompt, options: Options, started: float) -> Task:
        s = self._settings
        mode = options.mode or s.mode
        policy, schedule = options.policy or s.policy, options.schedule or s.schedule
        make_policy(policy)  # fail before any work
        parsed = Schedule.parse(schedule)
        tokens = self._resources.tokens
        rendered = render(prompt, tokens, options)
        if not isinstance(prompt, str):
            refuse_silence(prompt)
        plan, source_of, notes = self.plan_text(rendered)
        notes += explain_bos(prompt, tokens, options)
        if not plan.ids:
            raise InvalidInputError("the prompt is empty; ask something")
        new_tokens = options.max_new_tokens or s.max_new_tokens
        if self._resources.is_loaded:  # else the worker looks, once it has loaded the model
            check_fits(plan, new_tokens, self._resources.adapter)
        ratio = s.ratio if options.ratio is None else options.ratio
        is_auto = ratio == AUTO
        return Task(
            plan, mode, policy, parsed, s.min_ratio if ratio == AUTO else ratio,
            new_tokens, options, started, source_of, notes, is_auto=is_auto,
        )  # fmt: skip

    def plan_text(self, rendered: str) -> tuple[PromptPlan, dict[str, str], tuple[str, ...]]:
        """How a rendered prompt is cut, the source of each chunk in it, and notes for the metrics."""
        resources = self._resources
        tokens = resources.tokens
        corpus, foreign = resources.own_corpus()
        matches = chunk_matches(corpus, rendered)
        notes = (foreign,) if foreign else explain_misses(corpus, rendered, matches)
        chunks = _still_there(corpus, matches)
        matches = [m for m in matches if m.chunk_id in chunks]
        plan = make_plan(
            rendered,
            matches,
            tokens.encode_template,
            lambda chunk_id: resources.text_ids(chunks[chunk_id].text),
            tokens.encode_text,
        )
        return plan, {c.chunk_id: c.source for c in chunks.values()}, notes

    def _work(self, task: Task, stream: AnswerStream) -> Answer:
        resources = self._resources
        controller: Controller | None = None
        adapter = resources.adapter
        if task.mode != "full":
            adapter.require_blendable()
        with adapter.lock:  # one identity from here to the last token
            if task.plan.chunks and task.mode != "full":
                namespace = resources.trust.namespace
                if resources.trust.stands(namespace):
                    controller = self.controller(namespace)
                    task = self._with_profile(self._with_schedule(task, namespace), namespace)
                else:
                    resources.forget_signature()
                    task = replace(task, notes=(*task.notes, UNTRUSTED), why_computed=UNTRUSTED)
            generation = Generation(adapter, lambda: resources.fusor)
            return generation.run(task, controller, stream, self._later)

    def controller(self, namespace: str) -> Controller:
        """Plans loads of what is stored under ``namespace``."""
        resources = self._resources
        return Controller(
            resources.adapter,
            resources.store,
            namespace,
            resources.prefix_ids,
            self._settings.prefix_min_tokens,
            resources.encoding,
        )

    def _with_schedule(self, task: Task, namespace: str) -> Task:
        """What ``calibrated`` means for this model, policy and ratio; a note if that was found at another
        ratio, or if it means nothing.

        Left to the settings, it is only what was found on questions, and means nothing without a note; nor
        is there one where it decides nothing.
        """
        if not task.schedule.is_open:
            return task
        root, is_asked = self._resources.root, task.options.schedule is not None
        found = nearest(root, namespace, task.policy, task.ratio, of_questions=not is_asked)
        if found is None:
            schedule, note = Schedule.parse(UNCALIBRATED_SCHEDULE), UNCALIBRATED * is_asked
        else:
            schedule, note = found.schedule, found.note(task.ratio)
        task = replace(task, follows_load=task.is_auto and found is None and not is_asked)
        if note and task.mode == "blend" and make_policy(task.policy).follows_schedule:
            return replace(task, schedule=schedule, notes=(*task.notes, note))
        return replace(task, schedule=schedule)

    def _with_profile(self, task: Task, namespace: str) -> Task:
        """What this machine takes for what; a note where a ratio was to be found by it and cannot."""
        profile, differences = self._resources.profile_of(namespace)
        if profile is not None or not task.is_auto or task.mode != "blend":
            return replace(task, profile=profile)
        why = OTHER_PROFILE.format(differences) if differences else NO_PROFILE
        command = PROFILE_COMMAND.format(self._resources.model_name, self._resources.root)
        note = f"{why}, so ratio {task.ratio:g} was taken; measure with {command}"
        return replace(task, notes=(*task.notes, note))


def _still_there(corpus: Corpus | None, matches: Sequence[Match]) -> dict[str, StoredChunk]:
    """Chunks of ``matches``; another process may have removed one since it was found."""
    chunks = {}
    for match in matches:
        with suppress(KeyError):
            assert corpus is not None
            chunks[match.chunk_id] = corpus.chunk(match.chunk_id)
    return chunks


def check_defaults(chosen: Settings) -> None:
    """Raise :class:`InvalidInputError` for settings that no request or ingest could be made with."""
    if chosen.kv_encoding not in ENCODINGS:
        raise InvalidInputError(
            f"encoding {chosen.kv_encoding!r} is not one of {', '.join(ENCODINGS)}"
        )
    Options(mode=chosen.mode, ratio=chosen.ratio, max_new_tokens=chosen.max_new_tokens)
    if not 0.0 <= chosen.min_ratio <= 1.0:
        raise InvalidInputError(f"min_ratio {chosen.min_ratio} is outside [0, 1]")
    make_policy(chosen.policy)
    Schedule.parse(chosen.schedule)
    if chosen.top_k < 1:
        raise InvalidInputError(f"top_k is {chosen.top_k}, expected 1 or more")
