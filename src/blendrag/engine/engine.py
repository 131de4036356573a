"""``BlendEngine``: ingest documents, answer questions over them; all an integration needs.

The way of a query: rendered prompt → :func:`prompt.make_plan` → :class:`Controller` → loader and
fusor inside ``model.generate`` → tokens stream → metrics; missing chunks are encoded afterwards, in
the background. All model work runs on one worker thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from blendrag.anchors import Match
from blendrag.config import Mode, settings
from blendrag.controller import Controller
from blendrag.engine.encoding import Background, Encoder
from blendrag.engine.generation import Generation, Task
from blendrag.engine.ingest import Ingest, Inputs, Totals, Watch, documents_of
from blendrag.engine.prompts import chunk_matches, explain_misses, rag_prompt, render
from blendrag.engine.resources import Resources
from blendrag.engine.stream import AnswerStream
from blendrag.engine.types import Answer, DryRun, IngestReport, Options, Prompt, Source
from blendrag.engine.worker import Worker
from blendrag.errors import IdentityChangedError, InvalidInputError
from blendrag.identity import chunk_key
from blendrag.model.adapter import ModelAdapter
from blendrag.prompt import PromptPlan, make_plan
from blendrag.readers import digest_of
from blendrag.retriever.corpus import Corpus, StoredChunk
from blendrag.retriever.retriever import RetrievedChunk
from blendrag.selection import Schedule, make_policy
from blendrag.verify import Verification

log = logging.getLogger(__name__)


class BlendEngine:
    """Answers prompts with one model over one store.

    Args:
        model: hub id, directory, ``"demo"``, a loaded ``AutoModelForCausalLM`` (then ``tokenizer`` is
            needed too) or a :class:`ModelAdapter`. Loaded on first use.
        store: directory of the KV store and the corpus beside it; made by the first ingest.
        mode, policy, schedule, ratio, max_new_tokens, top_k: defaults of every request.
        chunk_tokens, prefix_text, embedder: settings of a corpus made by this engine's ingest.
        ram_bytes, disk_bytes: limits of the store's tiers.
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
        ratio: float | None = None,
        max_new_tokens: int | None = None,
        top_k: int | None = None,
        chunk_tokens: int | None = None,
        prefix_text: str | None = None,
        embedder: str | None = None,
        ram_bytes: int | None = None,
        disk_bytes: int | None = None,
        read_only: bool = False,
    ) -> None:
        given = {
            "dtype": dtype, "device": device, "mode": mode, "policy": policy,
            "schedule": schedule, "ratio": ratio, "max_new_tokens": max_new_tokens,
            "top_k": top_k, "embedder": embedder, "ram_bytes": ram_bytes, "disk_bytes": disk_bytes,
        }  # fmt: skip
        changes = {name: value for name, value in given.items() if value is not None}
        self.settings = settings().model_copy(update=changes)
        _check_defaults(self.settings)
        root = Path(store if store is not None else self.settings.store)
        self._resources = Resources(
            model if model is not None else self.settings.model,
            tokenizer, root, self.settings, prefix_text, chunk_tokens, embedder, lora,
            read_only,
        )  # fmt: skip
        self._worker = Worker("blendrag-engine")
        self._background = Background(self._resources, self._worker)

    # -- answering ------------------------------------------------------------------------------

    def generate(self, prompt: Prompt, options: Options | None = None) -> Answer:
        """Answer ``prompt``: a string (one user message, through the chat template) or messages.

        Raises :class:`InvalidInputError` (also :class:`ContextOverflowError`),
        :class:`UnsupportedModelError` in any mode but full for a model the probe refuses.
        """
        stream, future = self._start(prompt, options or Options())
        try:
            return future.result()
        except BaseException:
            stream.cancel()
            raise

    def stream(self, prompt: Prompt, options: Options | None = None) -> AnswerIterator:
        """Like :meth:`generate`, piece by piece; ``.answer`` holds the whole once exhausted.

        Abandoning the iterator (``close()``, ``break``, garbage collection) stops generation.
        """
        return AnswerIterator(*self._start(prompt, options or Options()))

    async def agenerate(self, prompt: Prompt, options: Options | None = None) -> Answer:
        """:meth:`generate` without blocking the event loop; cancelling the task stops the work."""
        loop = asyncio.get_running_loop()
        starting = loop.run_in_executor(None, self._start, prompt, options or Options())
        try:
            stream, future = await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_cancel_started)
            raise
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            stream.cancel()
            raise

    async def astream(self, prompt: Prompt, options: Options | None = None) -> AsyncIterator[str]:
        """:meth:`stream` for event loops."""
        loop = asyncio.get_running_loop()
        pieces = await loop.run_in_executor(None, self.stream, prompt, options)
        try:
            while (piece := await loop.run_in_executor(None, next, pieces, None)) is not None:
                yield piece
        finally:
            pieces.abandon()

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
        return self._plan(render(prompt, self._resources.tokens, options))[0]

    # -- the corpus -----------------------------------------------------------------------------

    def ingest(self, inputs: Inputs, watch: Watch | None = None) -> IngestReport:
        """Precompute files, directories or :class:`Document` objects; safe to interrupt and repeat.

        Raises :class:`UnsupportedModelError` for a model whose KV cannot be reused.
        """
        resources = self._resources
        corpus = resources.create_corpus()
        listed: list[Any] = [inputs] if isinstance(inputs, str | Path) else list(inputs)

        def run() -> IngestReport:
            return Ingest(
                corpus,
                resources.store,
                Encoder(resources, self._worker),
                resources.embedder,
                resources.chunker,
                resources.prefix_ids,
                watch,
            ).run(listed)

        unloaded = not resources.is_loaded
        try:
            report = run()
        except IdentityChangedError:
            if not unloaded:
                raise
            report = run()  # the files looked unchanged but hold other weights: now they are loaded
        resources.remember_namespace()
        return report

    def remove(self, paths: Sequence[Path | str]) -> int:
        """Forget documents by path (or directory): texts, vectors and KV. How many there were.

        Raises :class:`InvalidInputError` when nothing of a path is in the corpus; then nothing is
        forgotten.
        """
        corpus = self._resources.require_corpus()
        prefix_ids = corpus.manifest.prefix_ids
        namespace = corpus.manifest.namespace or self._resources.namespace()
        sources: dict[str, None] = {}
        for path in paths:
            found = corpus.sources_of(path)
            if not found:
                raise InvalidInputError(
                    f"{path} is not in the corpus of {self._resources.root}; "
                    "expected a path as it was ingested"
                )
            sources |= dict.fromkeys(found)
        for source in sources:
            texts = {chunk.chunk_id: chunk.text for chunk in corpus.chunks_of(source)}
            for chunk_id in corpus.remove_source(source):
                if chunk_id in texts:  # else of a version that another process put there just now
                    ids = self._resources.text_ids(texts[chunk_id])
                    self._resources.store.delete(namespace, chunk_key(namespace, prefix_ids, ids))
        return len(sources)

    def dry_run(self, inputs: Inputs) -> DryRun:
        """What :meth:`ingest` would do: chunks, bytes, and seconds from one timed chunk."""
        resources = self._resources
        known = resources.corpus
        chunker = resources.chunker()
        totals = Totals()
        documents = chunks = tokens = new = 0
        for document in documents_of(inputs, totals):
            pieces = chunker.split(document.text)
            documents += 1
            chunks += len(pieces)
            tokens += sum(c.tokens for c in pieces)
            if known is None or known.document_digest(document.source) != digest_of(document):
                new += sum(c.tokens for c in pieces)
        adapter = resources.adapter
        adapter.require_blendable()
        sample = [17] * min(resources.chunk_tokens, max(tokens, 1))

        def encode_s() -> float:
            with adapter.lock:
                began = time.perf_counter()
                adapter.encode((), sample)
                return time.perf_counter() - began

        self._worker.run(encode_s)  # the first one warms up
        rate = len(sample) / self._worker.run(encode_s)
        return DryRun(
            documents, chunks, tokens, adapter.layout.chunk_bytes(tokens), new / rate,
            len(totals.failures), tuple(totals.failures), tuple(totals.skipped),
        )  # fmt: skip

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

    # -- inside ---------------------------------------------------------------------------------

    def _start(self, prompt: Prompt, options: Options) -> tuple[AnswerStream, Future[Answer]]:
        started = time.perf_counter()
        tokens = self._resources.tokens
        stream = AnswerStream(tokens.tokenizer, options.stop, started)
        task = self._task(prompt, options, started)

        def work() -> Answer:
            try:
                stream.check()
                return self._work(task, stream)
            finally:
                stream.finish()

        return stream, self._worker.submit(work)

    def _task(self, prompt: Prompt, options: Options, started: float) -> Task:
        s = self.settings
        mode = options.mode or s.mode
        policy, schedule = options.policy or s.policy, options.schedule or s.schedule
        make_policy(policy), Schedule.parse(schedule)  # fail before any work
        plan, source_of, notes = self._plan(render(prompt, self._resources.tokens, options))
        if not plan.ids:
            raise InvalidInputError("the prompt is empty; ask something")
        return Task(
            plan, mode, policy, schedule, s.ratio if options.ratio is None else options.ratio,
            options.max_new_tokens or s.max_new_tokens, options, started, source_of, notes,
        )  # fmt: skip

    def _plan(self, rendered: str) -> tuple[PromptPlan, dict[str, str], tuple[str, ...]]:
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
                namespace = adapter.identity.namespace
                if resources.trust.stands(namespace):
                    controller = Controller(
                        adapter,
                        resources.store,
                        namespace,
                        resources.prefix_ids,
                        self.settings.prefix_min_tokens,
                    )
                else:
                    resources.forget_signature()
                    task = replace(task, notes=(*task.notes, UNTRUSTED), why_computed=UNTRUSTED)
            generation = Generation(adapter, lambda: resources.fusor)
            return generation.run(task, controller, stream, self._background.note)


UNTRUSTED = (
    "stored KV is not used: this machine computes other KV for the probe than when the corpus was "
    "ingested; ingest again to renew it"
)


class AnswerIterator:
    """Text pieces of one answer; :attr:`answer` once exhausted."""

    def __init__(self, stream: AnswerStream, future: Future[Answer]) -> None:
        self._stream = stream
        self._pieces = iter(stream)
        self._future = future
        self.sources: tuple[Source, ...] = ()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        try:
            return next(self._pieces)
        except StopIteration:
            self._future.result()  # an error of the worker surfaces here
            raise
        except BaseException:
            self.abandon()
            raise

    @property
    def answer(self) -> Answer:
        """The whole answer; blocks until it is there."""
        return replace(self._future.result(), sources=self.sources)

    def abandon(self) -> None:
        """Stop generation and return at once; the model is free within one layer or token."""
        self._stream.cancel()

    close = abandon

    def __del__(self) -> None:
        self._stream.cancel()


def _cancel_started(starting: asyncio.Future[tuple[AnswerStream, Future[Answer]]]) -> None:
    """Abandon a request whose caller left while it was still being planned."""
    if not starting.cancelled() and starting.exception() is None:
        stream, _ = starting.result()
        stream.cancel()


def _still_there(corpus: Corpus | None, matches: Sequence[Match]) -> dict[str, StoredChunk]:
    """Chunks of ``matches``; another process may have removed one since it was found."""
    chunks = {}
    for match in matches:
        with suppress(KeyError):
            assert corpus is not None
            chunks[match.chunk_id] = corpus.chunk(match.chunk_id)
    return chunks


def sources_of(chunks: Sequence[RetrievedChunk]) -> tuple[Source, ...]:
    """Retrieved chunks as an answer names them."""
    return tuple(Source(c.chunk_id, c.source, c.title, c.distance, c.text) for c in chunks)


def _check_defaults(chosen: Any) -> None:
    Options(mode=chosen.mode, ratio=chosen.ratio, max_new_tokens=chosen.max_new_tokens)
    make_policy(chosen.policy)
    Schedule.parse(chosen.schedule)
    if chosen.top_k < 1:
        raise InvalidInputError(f"top_k is {chosen.top_k}, expected 1 or more")
