"""From requests to answers: each is checked, submitted to the scheduler, and answered over its road."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext, suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from blendrag import tracing
from blendrag.chat.formats import hidden_ids
from blendrag.engine import request_spans as spans
from blendrag.engine.answers import (
    PendingAnswer,
    abandon_all,
    all_awaited,
    name_prompt,
    off_loop,
    wait_all,
)
from blendrag.engine.batched_prefill import BatchEntry, RequestBatch, share_of
from blendrag.engine.decoding import Likelihoods
from blendrag.engine.generation import Generation
from blendrag.engine.kv_namespace import KVNamespace
from blendrag.engine.learning import Learner
from blendrag.engine.planner import Planner, checked, sequences_of
from blendrag.engine.prompts import Prompts
from blendrag.engine.request import Answer, Options, Prompt, Request, prompt_chars
from blendrag.engine.request_log import log_answer, log_failure
from blendrag.engine.roads import BlendedRoad, FixedPositionsRoad, Road
from blendrag.engine.schemas import Schemas
from blendrag.engine.stream import AnswerStream
from blendrag.errors import RequestCancelled, RequestTimeout
from blendrag.serving.kv_budget import KVShare
from blendrag.serving.pending import Pending
from blendrag.serving.scheduler import Scheduler
from blendrag.serving.thread_queue import QueueState, ThreadQueue

#: Threads on which prompts of asynchronous calls are rendered and tokenised, and those for long ones, so that
#: short prompts do not wait for them.
PROMPT_THREADS, LONG_PROMPT_THREADS = 4, 2
LONG_PROMPT_CHARS = 1 << 16


class Answering:
    """Answers the requests of one engine."""

    def __init__(
        self,
        kv: KVNamespace,
        scheduler: Scheduler,
        prompts: Prompts,
        planner: Planner,
        schemas: Schemas,
        learner: Learner,
    ) -> None:
        self._kv = kv
        self._model = kv.model
        self._settings = kv.settings
        self._scheduler = scheduler
        self._prompts = prompts
        self._planner = planner
        self._schemas = schemas
        self._learner = learner
        self._threads = ThreadQueue("prompts", PROMPT_THREADS)
        self._long_threads = ThreadQueue("long prompts", LONG_PROMPT_THREADS)
        self._is_measuring = False
        """Whether a piece of the measurement of decode weights is in the queue."""

    # -- the caller's thread ----------------------------------------------------------------------

    def one(self, prompt: Prompt | Request, options: Options) -> PendingAnswer:
        """Check the request here, and submit it."""
        (pending,) = self._start([prompt], options, False, time.perf_counter())
        assert isinstance(pending, PendingAnswer)
        return pending

    async def one_off_loop(self, prompt: Prompt, options: Options) -> PendingAnswer:
        """:meth:`one` on another thread."""
        (pending,) = await self._start_off_loop([prompt], options, False)
        assert isinstance(pending, PendingAnswer)
        return pending

    def batch(
        self, prompts: Sequence[Prompt], options: Options, keep_errors: bool
    ) -> list[Answer | Exception]:
        """See :meth:`BlendEngine.batch`."""
        return wait_all(
            self._start(prompts, options, keep_errors, time.perf_counter()), keep_errors
        )

    async def batch_off_loop(
        self, prompts: Sequence[Prompt], options: Options, keep_errors: bool
    ) -> list[Answer | Exception]:
        """See :meth:`BlendEngine.abatch`."""
        started: Sequence[PendingAnswer | Exception]
        try:
            started = await self._start_off_loop(prompts, options, keep_errors)
        except RequestTimeout as late:
            if not keep_errors:
                raise
            started = [RequestTimeout(late.timeout_s) for _ in prompts]
        return await all_awaited(started, keep_errors)

    def threads_for(self, characters: int) -> ThreadQueue:
        """Where a prompt with so many characters is prepared."""
        return self._threads if characters <= LONG_PROMPT_CHARS else self._long_threads

    @property
    def queues(self) -> list[QueueState]:
        """Prompts of asynchronous calls that wait."""
        return [self._threads.state, self._long_threads.state]

    def close(self) -> None:
        """End the threads that prepare prompts."""
        self._threads.close()
        self._long_threads.close()

    async def _start_off_loop(
        self, prompts: Sequence[Prompt], options: Options, keep_errors: bool
    ) -> list[PendingAnswer | Exception]:
        begin = partial(self._start, prompts, options, keep_errors, time.perf_counter())
        threads = self.threads_for(sum(map(prompt_chars, prompts)))
        return await off_loop(begin, options.timeout_s, threads)

    def _start(
        self,
        prompts: Sequence[Prompt | Request],
        options: Options,
        keep_errors: bool,
        asked_at: float,
    ) -> list[PendingAnswer | Exception]:
        """Check all requests, and submit them. Errors are raised, or kept in place."""
        checked_requests: list[Request | Exception] = []
        for i, prompt in enumerate(prompts):
            try:
                with self._kv.corpus.one_look():
                    checked_requests.append(self._request(prompt, options, asked_at))
            except Exception as exc:
                if not keep_errors:
                    name_prompt(exc, i, len(prompts))
                    raise
                checked_requests.append(exc)
        requests = [one for one in checked_requests if isinstance(one, Request)]
        batch = RequestBatch(
            [BatchEntry(one, self._stream(one)) for one in requests],
            self._model,
            self._planner,
            self._scheduler.budget,
        )
        pending = [self._pending(batch, number) for number in range(len(requests))]
        try:
            self._scheduler.submit(*pending)
        except BaseException:  # interrupted: they may be in the queue
            abandon_all(pending)
            raise
        submitted = iter(pending)
        return [one if isinstance(one, Exception) else next(submitted) for one in checked_requests]

    def _request(self, prompt: Prompt | Request, options: Options, asked_at: float) -> Request:
        """The request for ``prompt``, checked as far as it can be without loading the model."""
        try:
            request = prompt
            if not isinstance(request, Request):
                request = self._prompts.request(request, options, asked_at)
            request = self._learner.advised(request)
            if self._model.is_loaded and request.fixed is None:
                checked(request, self._model.adapter)  # else once it begins
        except Exception:
            with suppress(Exception), self._span(options, None, asked_at):
                raise
            raise
        return request

    def _stream(self, request: Request) -> AnswerStream:
        options, tokens = request.options, self._model.tokens
        return AnswerStream(
            tokens.tokenizer,
            options.stop,
            request.asked_at,
            options.timeout_s,
            hidden=None if request.form is None else hidden_ids(tokens, request.form),
            likely=None if options.logprobs is None else Likelihoods(options.logprobs),
            reply=request.new_reply(),
        )

    def _span(
        self, options: Options, parent: Any, asked_at: float
    ) -> AbstractContextManager[tracing.Add]:
        name, has_template = self._model.name, self._model.tokens.has_template
        kind = "chat" if options.apply_chat_template and has_template else "text_completion"
        attributes = partial(spans.asked, kind, options, name, self._settings)
        return tracing.span(f"{kind} {name}", attributes, parent, asked_at)

    # -- the thread that computes -----------------------------------------------------------------

    def _pending(self, batch: RequestBatch, number: int) -> PendingAnswer:
        """The answer to that prompt, for the scheduler."""
        request, stream = batch.entries[number]

        def answer() -> Answer:
            stream.begin()
            try:
                with self._span(request.options, request.trace_context, request.asked_at) as add:
                    stream.check()
                    answer = self._answer(request, stream, batch, number)
                    add(partial(spans.answered, answer, self._model.name))
            except BaseException as exc:
                log_failure(exc, request.asked_at)
                if isinstance(exc, RequestCancelled | RequestTimeout):
                    exc.__traceback__ = None  # its frames hold the KV cache
                raise
            finally:
                batch.leave(number)
                stream.finish()
            log_answer(answer.metrics)
            return answer

        def share() -> KVShare:
            adapter, counted = self._model.adapter, request
            with suppress(ValueError, TypeError):  # refused once it begins
                counted = replace(request, sequences=sequences_of(request, adapter))
            return batch.share_of(number) or share_of(counted, adapter, stream)

        def joins() -> bool:
            adapter = self._model.adapter
            return adapter.refusal is None and not adapter.lock.is_wanted  # by another engine

        def cost() -> float:
            return 0.0 if batch.share_of(number) is not None else computed_tokens()

        @cache
        def computed_tokens() -> float:
            """The tokens that its prefill computes if the KV of its chunks is stored."""
            chunks = sum(len(segment.ids) for segment in request.prompt.chunks)
            computed = request.blending.fixed_ratio if request.may_blend else 1.0
            known = self._planner.prefixes.known_tokens(request)
            return max(1.0, len(request.prompt.ids) - max(known, (1 - computed) * chunks))

        return PendingAnswer(
            *(answer, joins, lambda: stream.done, share, cost),
            request=request,
            stream=stream,
            prefixes=self._planner.prefixes,
        )

    def _answer(
        self, request: Request, stream: AnswerStream, batch: RequestBatch, number: int
    ) -> Answer:
        """The model's lock is held throughout, so that one request sees one model."""
        began = time.perf_counter()
        adapter, budget = self._model.adapter, self._scheduler.budget
        stream.opening_s = request.opening_s + time.perf_counter() - began
        # forwards that may blend run uncompiled
        compiled = nullcontext() if request.mode == "full" else adapter.uncompiled()
        with adapter.lock.while_wanted(stream.check), compiled, torch.inference_mode():
            road = self._road(request, stream)
            with self._kv.corpus.one_look():
                stream.opening_s += road.open()
            began = time.perf_counter()
            choice = self._model.decode_weights
            weights = choice.now() if request.max_new_tokens > 1 else None  # packs them once
            stream.opening_s += time.perf_counter() - began
            # closed also if it is over before it is run
            with closing(batch.take(number)) as ahead, ExitStack() as held:
                if ahead.share is not None:  # also if it is refused now
                    held.callback(budget.release, ahead.share)
                road.begin(ahead, stream.opening_s)
                lesson = self._learner.lesson(road.request)
                road.prefilled = lesson.take
                share = ahead.share or share_of(road.request, adapter, stream)
                held.callback(budget.release, share)
                budget.hold(share)
                with self._kv.corpus.one_look():
                    answer = Generation(road, stream, share, weights, choice.note).run()
                self._measure_in_background()
                return lesson.learned(answer)

    def _measure_in_background(self) -> None:
        """Go on to find out with which weights the model decodes, a token at a time."""
        choice = self._model.decode_weights
        if not choice.is_measurable or self._is_measuring:
            return
        self._is_measuring = True

        def measure() -> None:
            self._is_measuring = False
            lock = self._model.adapter.lock
            if not lock.acquire(0):  # another engine's requests go first; on after the next answer
                return
            try:
                choice.measure()
            finally:
                lock.release()
            self._measure_in_background()

        self._scheduler.submit(Pending(measure), background=True)

    def _road(self, request: Request, stream: AnswerStream) -> Road:
        if request.fixed is None:
            return BlendedRoad(self._model, self._planner, request, stream)
        return FixedPositionsRoad(self._model, self._schemas, request, request.fixed, stream)
