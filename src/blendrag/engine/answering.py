"""An engine's ways to be asked: whole, piece by piece, several at once, awaited; and over what is retrieved.

Owns what each of them returns. Does not know what answers (:mod:`blendrag.engine.requests`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, overload

from blendrag.config import Settings
from blendrag.corpus.retriever import RetrievedChunk
from blendrag.engine.answers import (
    AnswerIterator,
    AsyncAnswerIterator,
    Started,
    off_loop,
    sources_of,
)
from blendrag.engine.batch import all_awaited, all_late, wait_all
from blendrag.engine.options import Options
from blendrag.engine.prompts import rag_prompt, render
from blendrag.engine.requests import Requests
from blendrag.engine.resources import Resources
from blendrag.engine.types import Answer, Prompt
from blendrag.errors import RequestTimeout
from blendrag.text.prompt import PromptPlan


class Answering:
    """The part of :class:`BlendEngine` that answers."""

    settings: Settings
    _resources: Resources
    _requests: Requests

    def generate(self, prompt: Prompt, options: Options | None = None) -> Answer:
        """Answer ``prompt``: a string (one user message, through the chat template) or messages.

        Raises :class:`InvalidInputError` (also :class:`ContextOverflowError`),
        :class:`UnsupportedModelError` in any mode but full for a model the probe refuses.
        """
        return self._requests.start(prompt, options or Options()).wait()

    @overload
    def batch(self, prompts: Sequence[Prompt], options: Options | None = ...) -> list[Answer]: ...
    @overload
    def batch(
        self, prompts: Sequence[Prompt], options: Options | None = ..., *, return_exceptions: bool
    ) -> list[Answer | Exception]: ...
    def batch(
        self,
        prompts: Sequence[Prompt],
        options: Options | None = None,
        *,
        return_exceptions: bool = False,
    ) -> Any:
        """Answers to several prompts, in order. ``timeout_s`` is that of all of them together.

        All prompts are planned before anything is computed, so that a prompt that cannot be answered
        costs nothing; those over stored KV are prefilled together where that is faster. The first error
        ends the batch, names its prompt in a note, and is raised; ``return_exceptions`` puts errors in
        their places instead.
        """
        options, asked = options or Options(), time.perf_counter()
        started = self._requests.start_all(prompts, options, return_exceptions, asked)
        return wait_all(started, return_exceptions)

    async def abatch(
        self,
        prompts: Sequence[Prompt],
        options: Options | None = None,
        *,
        return_exceptions: bool = False,
    ) -> Any:
        """:meth:`batch` without blocking the event loop; cancelling the task stops the work."""
        options, asked = options or Options(), time.perf_counter()
        begin = partial(self._requests.start_all, prompts, options, return_exceptions, asked)
        try:
            started = await off_loop(begin, options.timeout_s)
        except RequestTimeout as late:
            if not return_exceptions:
                raise
            return all_late(prompts, late.timeout_s)
        return await all_awaited(started, return_exceptions)

    def stream(self, prompt: Prompt, options: Options | None = None) -> AnswerIterator:
        """Like :meth:`generate`, piece by piece; ``.answer`` holds the whole once exhausted.

        Abandoning the iterator (``close()``, ``break``, garbage collection) stops generation.
        """
        return AnswerIterator(self._requests.start(prompt, options or Options()))

    async def agenerate(self, prompt: Prompt, options: Options | None = None) -> Answer:
        """:meth:`generate` without blocking the event loop; cancelling the task stops the work."""
        return await (await self._start_off_loop(prompt, options or Options())).awaited()

    def astream(self, prompt: Prompt, options: Options | None = None) -> AsyncAnswerIterator:
        """:meth:`stream` for event loops: ``async for``, then ``.answer``. Starts when iterated."""
        return AsyncAnswerIterator(partial(self._start_off_loop, prompt, options or Options()))

    async def _start_off_loop(self, prompt: Prompt, options: Options) -> Started:
        begin = partial(self._requests.start, prompt, options, time.perf_counter())
        return await off_loop(begin, options.timeout_s)

    def ask(
        self, question: str, top_k: int | None = None, options: Options | None = None
    ) -> Answer:
        """Retrieve the nearest chunks and answer over them; the answer names its sources."""
        chunks = self.retrieve(question, top_k)
        answer = self.generate(rag_prompt(question, chunks), options)
        return replace(answer, sources=sources_of(chunks))

    def ask_stream(
        self, question: str, top_k: int | None = None, options: Options | None = None
    ) -> AnswerIterator:
        """:meth:`ask`, piece by piece."""
        chunks = self.retrieve(question, top_k)
        pieces = self.stream(rag_prompt(question, chunks), options)
        pieces.sources = sources_of(chunks)
        return pieces

    def retrieve(self, question: str, top_k: int | None = None) -> list[RetrievedChunk]:
        """The ``top_k`` chunks nearest to ``question`` by L2, in reading order."""
        wanted = self.settings.top_k if top_k is None else top_k
        return self._resources.retriever().retrieve(question, wanted)

    def plan(self, prompt: Prompt, options: Options | None = None) -> PromptPlan:
        """How ``prompt`` is cut; ``plan.ids`` is what mode ``full`` prefills."""
        options = options or Options()
        return self._requests.plan_text(render(prompt, self._resources.tokens, options))[0]
