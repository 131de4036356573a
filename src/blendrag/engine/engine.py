"""``BlendEngine``: ingest documents, answer questions over them; all an integration needs.

The way of a query: rendered prompt → :func:`prompt.make_plan` → :class:`Controller` → loader and
fusor inside ``model.generate`` → tokens stream → metrics; missing chunks are encoded afterwards, in
the background. All model work runs on one worker thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, overload

from blendrag.calibrate import Step
from blendrag.config import KVEncoding, Mode, Ratio, settings
from blendrag.engine import calibration as calibrating
from blendrag.engine import documents, profiling
from blendrag.engine.answers import (
    AnswerIterator,
    AsyncAnswerIterator,
    Started,
    off_loop,
    sources_of,
)
from blendrag.engine.batch import all_awaited, all_late, wait_all
from blendrag.engine.calibration import CalibrationOptions, CalibrationReport
from blendrag.engine.encoding import Background
from blendrag.engine.exposition import exposition
from blendrag.engine.ingest import Inputs, Watch
from blendrag.engine.library import Library
from blendrag.engine.options import Options
from blendrag.engine.profiling import ProfileReport
from blendrag.engine.prompts import rag_prompt, render
from blendrag.engine.requests import Requests, check_defaults
from blendrag.engine.resources import Resources
from blendrag.engine.types import Answer, DryRun, IngestReport, Prompt
from blendrag.engine.wanted import Wanted
from blendrag.engine.worker import Worker
from blendrag.errors import RequestTimeout
from blendrag.model.adapter import ModelAdapter
from blendrag.prompt import PromptPlan
from blendrag.retriever.retriever import RetrievedChunk
from blendrag.store import StoreStats
from blendrag.verify import Verification


class BlendEngine:
    """Answers prompts with one model over one store.

    Args:
        model: hub id, directory, ``"demo"``, a loaded ``AutoModelForCausalLM`` (then ``tokenizer`` is
            needed too) or a :class:`ModelAdapter`. Loaded on first use.
        store: directory of the KV store and the corpus beside it; made by the first ingest.
        mode, policy, schedule, ratio, max_new_tokens, top_k: defaults of every request.
        min_ratio: the least that ratio ``auto`` takes.
        chunk_tokens, prefix_text, embedder: settings of a corpus made by this engine's ingest.
        encode_prefix: ``False`` makes a corpus whose chunks are encoded behind nothing at all, not even
            BOS, to measure what the prefix is worth.
        ram_bytes, disk_bytes: limits of the store's tiers.
        encoding: how a store made by this engine's ingest keeps KV: native, int8 or fp8.
        lora: directory of a PEFT adapter to load onto the model.

    Thread-safe. Close it, or use it as a context manager; :meth:`drain` first if chunks missed by
    queries must be stored before.
    """

    def __init__(
        self,
        model: Any = None,
        store: Path | str | None = None,
        *,
        tokenizer: Any = None,
        dtype: str | None = None,
        device: str | None = None,
        lora: str | None = None,
        mode: Mode | None = None,
        policy: str | None = None,
        schedule: str | None = None,
        ratio: Ratio | None = None,
        min_ratio: float | None = None,
        max_new_tokens: int | None = None,
        top_k: int | None = None,
        chunk_tokens: int | None = None,
        prefix_text: str | None = None,
        encode_prefix: bool = True,
        embedder: str | None = None,
        ram_bytes: int | None = None,
        disk_bytes: int | None = None,
        encoding: KVEncoding | None = None,
        read_only: bool = False,
    ) -> None:
        given = {
            "dtype": dtype, "device": device, "mode": mode, "policy": policy,
            "schedule": schedule, "ratio": ratio, "min_ratio": min_ratio, "max_new_tokens": max_new_tokens,
            "top_k": top_k, "embedder": embedder, "ram_bytes": ram_bytes, "disk_bytes": disk_bytes,
            "kv_encoding": encoding,
        }  # fmt: skip
        changes = {name: value for name, value in given.items() if value is not None}
        self.settings = settings().model_copy(update=changes)
        check_defaults(self.settings)
        root = Path(store if store is not None else self.settings.store)
        self._resources = Resources(
            model if model is not None else self.settings.model,
            tokenizer,
            root,
            self.settings,
            Wanted(prefix_text, encode_prefix, chunk_tokens, embedder, encoding),
            lora,
            read_only,
        )
        self._worker = Worker("blendrag-engine")
        self.library = Library(self._resources, self._worker)
        background = Background(self._resources, self._worker)
        self._requests = Requests(self._resources, self.settings, self._worker, background.note)

    # -- answering ------------------------------------------------------------------------------

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

    # -- the corpus -----------------------------------------------------------------------------

    def ingest(self, inputs: Inputs, watch: Watch | None = None) -> IngestReport:
        """Precompute files, directories or :class:`Document` objects; safe to interrupt and repeat.

        Raises :class:`UnsupportedModelError` for a model whose KV cannot be reused.
        """
        return documents.ingest(self._resources, self._worker, inputs, watch)

    def remove(self, paths: Sequence[Path | str]) -> int:
        """Forget documents by path (or directory): texts, vectors and KV. How many there were.

        Raises :class:`InvalidInputError` when nothing of a path is in the corpus; then nothing is
        forgotten.
        """
        return documents.remove(self._resources, paths)

    def dry_run(self, inputs: Inputs) -> DryRun:
        """What :meth:`ingest` would do: chunks, bytes, and seconds from one timed chunk."""
        return documents.dry_run(self._resources, self._worker, inputs)

    # -- the rest -------------------------------------------------------------------------------

    @property
    def adapter(self) -> ModelAdapter:
        """The loaded model; loads it."""
        return self._resources.adapter

    @property
    def resources(self) -> Resources:
        """Store, corpus and embedder, for those who need more than answers."""
        return self._resources

    def verify(self) -> Verification:
        """The correctness gate for the loaded model, remembered beside the store."""
        return self._worker.run(lambda: self._resources.trust.verification())

    def calibrate(
        self,
        options: CalibrationOptions | None = None,
        watch: Callable[[Step], None] = lambda step: None,
    ) -> CalibrationReport:
        """Find, on a sample of the corpus, how r is best spread over this model's layers.

        What is found is kept beside the store as the meaning of schedule ``calibrated``. Ctrl-C ends
        the search and keeps the best so far. Raises :class:`InvalidInputError`,
        :class:`CorpusError` and :class:`StoreUnavailableError` for a store that cannot be written.
        """
        s = self.settings
        options = options or CalibrationOptions(s.policy, s.fixed_ratio, top_k=s.top_k)
        return calibrating.calibrate(self._resources, self._requests, self._worker, options, watch)

    def profile(
        self,
        directories: Sequence[Path] = (),
        again: bool = False,
        watch: profiling.Watch = lambda what, done, steps: None,
    ) -> ProfileReport:
        """Measure what loading and computing take here, for ratio ``auto``; once, then remembered.

        ``directories`` are measured as places to keep KV, beside the store's own. ``again`` measures
        although a profile is kept. Interrupted, it keeps nothing. Raises :class:`InvalidInputError`,
        :class:`UnsupportedModelError`, :class:`StoreFullError`.
        """
        return profiling.profile(self._resources, self._worker, directories, again, watch)

    def stats(self) -> StoreStats:
        """What the store holds, and what this engine's use of it was so far. Opens the store."""
        return self._resources.store.stats()

    def prometheus(self) -> str:
        """:meth:`stats` in Prometheus' text format, for a ``/metrics`` that the caller serves."""
        return exposition(self.stats(), str(self._resources.root.absolute()))

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called; a closed engine answers nothing more."""
        return self._worker.closed

    def drain(self) -> None:
        """Block until background encoding is done."""
        self._worker.drain()

    def close(self) -> None:
        """Finish running requests, drop queued background work, close the store. Idempotent."""
        self._worker.close()
        self._resources.close()

    def __enter__(self) -> BlendEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
