"""From a prompt to an answer: planned in the caller's thread, worked off on the engine's.

Owns which task a prompt becomes, with the settings' defaults, and whether stored KV may be used for
it. Does not know how tokens are made (:mod:`blendrag.engine.generation`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import wait
from contextlib import suppress
from functools import partial

from blendrag.config import AUTO, Settings
from blendrag.corpus.corpus import Corpus
from blendrag.corpus.documents import StoredChunk
from blendrag.engine.answers import Started
from blendrag.engine.batch import prepared
from blendrag.engine.decoding import Likelihoods
from blendrag.engine.generation import Generation
from blendrag.engine.kv_writer import BackgroundWriter
from blendrag.engine.options import Options
from blendrag.engine.prompts import Rendered, explain_bos, refuse_silence, render
from blendrag.engine.recognition import recognise
from blendrag.engine.request_log import log_answer, log_failure
from blendrag.engine.resources import Resources
from blendrag.engine.stored import Stored
from blendrag.engine.stream import AnswerStream
from blendrag.engine.task import Task, check_fits
from blendrag.engine.together import Batch, Entry
from blendrag.engine.types import Answer, Prompt, RagPrompt
from blendrag.engine.worker import Worker
from blendrag.errors import InvalidInputError, RequestCancelled, RequestTimeout
from blendrag.fusor.selection import Schedule, make_policy
from blendrag.planning.controller import Controller
from blendrag.store.encodings import ENCODINGS
from blendrag.text.matches import Match
from blendrag.text.prompt import PromptPlan, make_plan

LEAST_LEFT = (
    "min_ratio {:g} is the least that ratio auto takes and was left aside: the ratio is {:g}"
)


class Requests:
    """Starts requests of one engine. Thread-safe."""

    def __init__(
        self,
        resources: Resources,
        settings: Settings,
        worker: Worker,
        background: BackgroundWriter,
    ) -> None:
        """``background`` hears what was missed, once the answer is there."""
        self._resources = resources
        self._settings = settings
        self._worker = worker
        self._later = background.note
        self._stored = Stored(resources, settings, background)

    def start(self, prompt: Prompt, options: Options, asked: float | None = None) -> Started:
        """Plan here, in the caller's thread; answer on the worker. Errors of the plan are raised.

        ``asked``: when, by ``time.perf_counter()``, if that was not now.
        """
        return self.submit(self.prepare(prompt, options, asked))

    def start_all(
        self, prompts: Sequence[Prompt], options: Options, keep_errors: bool, asked: float
    ) -> list[Started | Exception]:
        """:meth:`start` for each, once all are planned; prefilled together where that is faster.

        Errors of the plan are raised, or kept.
        """
        prepare = partial(self.prepare, options=options, asked=asked)
        made = prepared(prompts, prepare, keep_errors)
        tasks = [task for task in made if isinstance(task, Task)]
        batch = Batch([Entry(task, self._stream(task)) for task in tasks])
        places = iter(range(len(tasks)))
        started: list[Started | Exception] = []
        try:
            for task in made:
                if isinstance(task, Task):
                    started.append(self._submit(batch, next(places)))
                else:
                    started.append(task)
        except BaseException:  # closed, or interrupted: nobody will ask for those that began
            begun = [each for each in started if isinstance(each, Started)]
            for each in begun:
                each.stream.cancel()
            wait([each.future for each in begun])
            batch.close()
            raise
        return started

    def prepare(self, prompt: Prompt, options: Options, asked: float | None = None) -> Task:
        """Plan and check; nothing is computed yet."""
        asked = time.perf_counter() if asked is None else asked
        if options.timeout_s is not None and time.perf_counter() - asked > options.timeout_s:
            raise RequestTimeout(options.timeout_s)  # those of a batch before it took all the time
        return self._task(prompt, options, asked)

    def submit(self, task: Task) -> Started:
        """Have the worker answer ``task`` after what was submitted before."""
        return self._submit(Batch([Entry(task, self._stream(task))]), 0)

    def _submit(self, batch: Batch, number: int) -> Started:
        task, stream = batch.entries[number]

        def work() -> Answer:
            try:
                stream.check()
                answer = self._work(batch, number)
            except BaseException as exc:
                log_failure(exc, task.started)
                if isinstance(exc, RequestCancelled | RequestTimeout):
                    # its frames hold the KV cache, for as long as an iterator that was left is kept
                    exc.__traceback__ = None
                raise
            finally:
                batch.leave(number)
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
        if not isinstance(prompt, str | RagPrompt):
            refuse_silence(prompt)
        plan, source_of, notes = self.plan_text(rendered)
        notes += explain_bos(prompt, tokens, options)
        if not plan.ids:
            raise InvalidInputError("the prompt is empty; ask something")
        new_tokens = options.max_new_tokens or s.max_new_tokens
        if self._resources.is_loaded:  # else the worker looks, once it has loaded the model
            check_fits(plan, new_tokens, self._resources.adapter)
        ratio = s.ratio if options.ratio is None else options.ratio
        least = s.min_ratio if options.min_ratio is None else options.min_ratio
        is_auto = ratio == AUTO
        if options.min_ratio is not None and ratio != AUTO:
            notes += (LEAST_LEFT.format(least, ratio),)
        return Task(
            plan, mode, policy, parsed, least if ratio == AUTO else ratio,
            new_tokens, options, started, source_of, notes, is_auto=is_auto,
        )  # fmt: skip

    def plan_text(self, rendered: Rendered) -> tuple[PromptPlan, dict[str, str], tuple[str, ...]]:
        """How a rendered prompt is cut, the source of each chunk in it, and notes for the metrics."""
        resources = self._resources
        tokens = resources.tokens
        corpus, foreign = resources.own_corpus()
        found = recognise(corpus, rendered, tokens)
        notes = (foreign,) if foreign else found.notes
        chunks = _still_there(corpus, found.chunks)
        plan = make_plan(
            rendered.text,
            [m for m in found.chunks if m.chunk_id in chunks],
            tokens,
            lambda chunk_id: resources.text_ids(chunks[chunk_id].text),
            found.plain,
        )
        return plan, {c.chunk_id: c.source for c in chunks.values()}, notes

    def controller(self, namespace: str) -> Controller:
        """Plans loads of what is stored under ``namespace``."""
        return self._stored.controller(namespace)

    def _work(self, batch: Batch, number: int) -> Answer:
        task, stream = batch.entries[number]
        resources = self._resources
        adapter = resources.adapter
        if task.mode != "full":
            adapter.require_blendable()
        with adapter.lock.while_wanted(stream.check):  # one identity from here to the last token
            ahead = batch.take(number, self._stored.together)
            is_open = ahead is not None and ahead.prepared is not None
            task, controller = self._stored.resolve(task, None if is_open else stream.check)
            generation = Generation(adapter, lambda: resources.fusor)
            return generation.run(task, controller, stream, self._later, ahead)


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
    Options(
        mode=chosen.mode,
        ratio=chosen.ratio,
        min_ratio=chosen.min_ratio,
        max_new_tokens=chosen.max_new_tokens,
    )
    make_policy(chosen.policy)
    Schedule.parse(chosen.schedule)
    if chosen.top_k < 1:
        raise InvalidInputError(f"top_k is {chosen.top_k}, expected 1 or more")
