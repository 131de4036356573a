"""``BlendEngine``: ingest documents, answer questions over them.

The road of a request::

    Prompts.request      rendered, its chunks recognised, tokenised: a Request   caller's thread
    Scheduler.submit     waits until it may begin
    Planner.plan         per chunk: exact, blend or compute, and why: a Plan     scheduler's thread
    Road.prefill         blended, or at fixed positions
    Generation.run       ``model.generate``: an Answer
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from blendrag import tracing
from blendrag.config import ConstructorOptions, RequestDefaults, SearchMode, check_options, settings
from blendrag.corpus.corpus import Corpus
from blendrag.corpus.embedder import Embedder
from blendrag.corpus.embedding_turns import Check, proceed
from blendrag.corpus.filters import FilterLike
from blendrag.corpus.manifest import Manifest
from blendrag.corpus.recorded_model import model_for
from blendrag.corpus.retriever import RetrievedChunk
from blendrag.corpus.shared.sharing import Followed, Published
from blendrag.engine import calibration as calibrating
from blendrag.engine import ingest as ingesting
from blendrag.engine import profiling, publishing
from blendrag.engine.answering import Answering
from blendrag.engine.answers import AnswerIterator, AsyncAnswerIterator
from blendrag.engine.asking import Asking
from blendrag.engine.background_writer import BackgroundWriter
from blendrag.engine.calibration import CalibrationOptions, CalibrationReport, ForgottenCalibration
from blendrag.engine.dry_run import DryRun, dry_run
from blendrag.engine.exact_prefixes import ExactPrefixes
from blendrag.engine.exposition import exposition
from blendrag.engine.ingest import IngestReport, Inputs, Watch
from blendrag.engine.kept_kv import KeptKV
from blendrag.engine.kv_namespace import KVNamespace, opened_namespace
from blendrag.engine.learning import Learner
from blendrag.engine.library import Library
from blendrag.engine.planner import Planner
from blendrag.engine.profiling import ProfileReport
from blendrag.engine.prompts import Prompts
from blendrag.engine.request import (
    OF_REQUESTS,
    Answer,
    OptionFields,
    Options,
    Prompt,
    Rendered,
    Request,
    one_prompt,
    takes_options,
    with_keywords,
)
from blendrag.engine.schemas import Positions, SchemaReport, Schemas
from blendrag.engine.schemas import Source as SchemaSource
from blendrag.errors import InvalidInputError
from blendrag.fusor.gate import Verification
from blendrag.model.adapter import ModelAdapter
from blendrag.model.tokens import Tokens
from blendrag.option import refuse_unknown
from blendrag.serving.kv_budget import KVBudget
from blendrag.serving.scheduler import CLOSED, Scheduler
from blendrag.serving.thread_queue import QueueState, ThreadQueue
from blendrag.signatures import shows
from blendrag.store.base import StoreStats
from blendrag.store.tiered import KVStore
from blendrag.text.inputs import ALL, Patterns
from blendrag.text.prompt import SegmentedPrompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class BlendEngine:
    """Answers prompts with one model over one store.

    Args:
        model: hub id, directory, ``"demo"``, a loaded ``AutoModelForCausalLM`` (then ``tokenizer`` is
            required) or a :class:`ModelAdapter`; ``None`` takes the model that the store was ingested with.
            Loaded on first use. Open engines with the same name, files, dtype, device and adapter share one
            loaded model and take turns.
        store: directory of the KV store and the corpus; created by the first ingest.
        beside: an open engine, of this model or another, whose scheduler this one uses, too: requests to both
            are computed in one order and within one memory limit, and those over one model decode together.
            They are closed together: closing one ends the others' requests.
        options: :class:`~blendrag.config.ConstructorOptions`, described in docs/options.md. Those of a
            request are defaults, to whose ``chat_template_kwargs`` a request's own are added.

    Raises :class:`InvalidInputError` for an option that does not exist or is out of range, and
    :class:`ModelLoadError` for a ``writer`` that is not there.

    Thread-safe. Close it, or use it as a context manager; call :meth:`drain` first to store the chunks that
    queries missed.
    """

    @shows(ConstructorOptions)
    def __init__(
        self,
        model: str | Path | PreTrainedModel | ModelAdapter | None = None,
        store: Path | str | None = None,
        *,
        beside: BlendEngine | None = None,
        **options: Unpack[ConstructorOptions],
    ) -> None:
        known = ConstructorOptions.__annotations__
        refuse_unknown(options, known, "an option of an engine", elsewhere=OF_REQUESTS)
        check_options(options)
        given: dict[str, Any] = {n: value for n, value in options.items() if value is not None}
        self.settings = replace(
            settings(), **{name: given[name] for name in given.keys() & vars(settings()).keys()}
        )
        # raises for settings that no request could be made with
        Options(**{n: getattr(self.settings, n) for n in RequestDefaults.__annotations__})
        root = Path(store if store is not None else self.settings.store)
        #: Model, corpus and KV, for the modules of this room. Others use the accessors below.
        self.kv_namespace = kv = opened_namespace(
            model_for(model, root, bool(options.get("trust_remote_code"))),
            root,
            self.settings,
            given,
        )
        #: What waits and runs on the model.
        if beside is None:
            budget = KVBudget(self.settings.batch_bytes)
            self.scheduler = Scheduler(budget, kv.corpus.embedding_turns, self.settings.max_running)
        else:
            self.scheduler = beside.scheduler
            kv.corpus.embedding_turns = self.scheduler.embedding
        self.library = Library(kv, self.scheduler)
        self.background = BackgroundWriter(kv, self.scheduler)
        self.prefixes = ExactPrefixes(kv, self.scheduler)
        self.scheduler.budget.add_keeper(self.prefixes.shrink)
        self.prefixes.limit_bytes //= self.scheduler.budget.keepers
        kept = KeptKV(kv)
        self.planner = Planner(kv, self.background, self.prefixes, kept)
        self._learner = Learner(kv, self.background, kept)
        self.schemas = Schemas(kv, self.scheduler)
        self.prompts = Prompts(kv.model, kv.corpus, self.schemas)
        self._answering = Answering(
            kv, self.scheduler, self.prompts, self.planner, self.schemas, self._learner
        )
        self.asking = Asking(kv.model, kv.corpus, self.prompts)

    # -- asking ---------------------------------------------------------------------------------

    @takes_options
    def generate(
        self,
        prompt: Prompt | None = None,
        options: Options | None = None,
        *,
        pml: str | None = None,
        **given: Unpack[OptionFields],
    ) -> Answer:
        """Answer ``prompt``: a string (one user message, through the chat template) or messages.

        Or ``pml``: ``<prompt schema="…">…</prompt>``, for a schema that was added with :meth:`add_schema`.
        Options of the request are keywords (``max_new_tokens=20``), or ``options``. Raises
        :class:`InvalidInputError` (also :class:`ContextOverflowError`), and
        :class:`UnsupportedModelError` in any mode but full for a model whose KV cannot be reused.
        """
        return self._answering.one(*_asked(prompt, pml, options, given)).wait()

    @takes_options
    def stream(
        self,
        prompt: Prompt | None = None,
        options: Options | None = None,
        *,
        pml: str | None = None,
        **given: Unpack[OptionFields],
    ) -> AnswerIterator:
        """Like :meth:`generate`, piece by piece; ``.answer`` holds the whole answer once exhausted.

        Abandoning the iterator (``close()``, ``break``, garbage collection) stops generation.
        """
        return AnswerIterator(self._answering.one(*_asked(prompt, pml, options, given)))

    @takes_options
    async def agenerate(
        self,
        prompt: Prompt | None = None,
        options: Options | None = None,
        *,
        pml: str | None = None,
        **given: Unpack[OptionFields],
    ) -> Answer:
        """:meth:`generate` without blocking the event loop; cancelling the task stops the work."""
        asked = _asked(prompt, pml, options, given)
        return await (await self._answering.one_off_loop(*asked)).awaited()

    @takes_options
    def astream(
        self,
        prompt: Prompt | None = None,
        options: Options | None = None,
        *,
        pml: str | None = None,
        **given: Unpack[OptionFields],
    ) -> AsyncAnswerIterator:
        """:meth:`stream` for event loops: ``async for``, then ``.answer``. Starts when iterated."""
        asked = _asked(prompt, pml, options, given)
        return AsyncAnswerIterator(partial(self._answering.one_off_loop, *asked))

    @overload
    def batch(
        self,
        prompts: Sequence[Prompt],
        options: Options | None = ...,
        *,
        return_exceptions: Literal[False] = ...,
        **given: Unpack[OptionFields],
    ) -> list[Answer]: ...
    @overload
    def batch(
        self,
        prompts: Sequence[Prompt],
        options: Options | None = ...,
        *,
        return_exceptions: bool,
        **given: Unpack[OptionFields],
    ) -> list[Answer | Exception]: ...
    @takes_options
    def batch(
        self,
        prompts: Sequence[Prompt],
        options: Options | None = None,
        *,
        return_exceptions: bool = False,
        **given: Unpack[OptionFields],
    ) -> Any:
        """Answers to several prompts, in order. ``timeout_s`` applies to all of them together.

        All prompts are checked before anything is computed; those over stored KV are prefilled together
        where that is faster. The first error ends the batch, names its prompt in a note, and is raised; with
        ``return_exceptions`` errors are returned in place of answers.
        """
        return self._answering.batch(prompts, with_keywords(options, given), return_exceptions)

    @takes_options
    async def abatch(
        self,
        prompts: Sequence[Prompt],
        options: Options | None = None,
        *,
        return_exceptions: bool = False,
        **given: Unpack[OptionFields],
    ) -> Any:
        """:meth:`batch` without blocking the event loop; cancelling the task stops the work."""
        options = with_keywords(options, given)
        return await self._answering.batch_off_loop(prompts, options, return_exceptions)

    @takes_options
    def ask(
        self,
        question: str,
        top_k: int | None = None,
        options: Options | None = None,
        *,
        filter: FilterLike | None = None,
        history: Sequence[tuple[str, str]] = (),
        **given: Unpack[OptionFields],
    ) -> Answer:
        """Retrieve the nearest chunks and answer over them; the answer names its sources.

        ``filter``: which documents are searched, as for :meth:`retrieve`; one that no document passes is an
        error.
        ``history``: earlier questions and answers of the conversation, the oldest first. Chunks are retrieved
        for the question alone, and for it together with the one before. Options of the request are keywords,
        or ``options``.
        """
        options = with_keywords(options, given)
        with tracing.span("ask"):
            prompt, options = self.asking.prompt(question, top_k, history, options, filter)
            return replace(self._answering.one(prompt, options).wait(), sources=prompt.retrieved)

    @takes_options
    def ask_stream(
        self,
        question: str,
        top_k: int | None = None,
        options: Options | None = None,
        *,
        filter: FilterLike | None = None,
        history: Sequence[tuple[str, str]] = (),
        trim_history: bool = False,
        **given: Unpack[OptionFields],
    ) -> AnswerIterator:
        """:meth:`ask`, piece by piece.

        ``trim_history``: if the context is full, the oldest questions and answers are left out, as many as
        the iterator's ``left_out`` says.
        """
        options, left_out = with_keywords(options, given), 0
        with tracing.span("ask"):  # ends before the answer does
            prompt, options = self.asking.prompt(question, top_k, history, options, filter)
            request: Prompt | Request = prompt
            if trim_history:
                shorter = self.asking.without_oldest(prompt, question, history, options)
                request, left_out = self.asking.trimmed(shorter, len(history), options)
            pieces = AnswerIterator(self._answering.one(request, options))
        pieces.sources, pieces.left_out = prompt.retrieved, left_out
        return pieces

    def retrieve(
        self,
        question: str,
        top_k: int | None = None,
        *,
        search: SearchMode | None = None,
        filter: FilterLike | None = None,
        earlier: str = "",
        check: Check = proceed,
    ) -> list[RetrievedChunk]:
        """The ``top_k`` best chunks for ``question``, in reading order; their ``rank`` says which is best.

        ``search``: ``hybrid`` merges the rankings by vectors and by words, ``dense`` and ``lexical`` take one
        of them. ``filter``: which documents are searched, a :class:`Filter` or ``{"type": "eq", "key":
        "author", "value": "Kim"}``; nothing is found if none passes it. ``earlier``: the question before it
        in a conversation; then some of the chunks are the best for the two together.
        ``check`` is called while the question waits to be embedded, and may raise to give up.
        """
        return self.asking.retrieve(question, top_k, earlier, check, search, filter)

    def render(self, prompt: Prompt, options: Options | None = None) -> Rendered:
        """``prompt`` as the model reads it (``.text``). It can be asked in place of ``prompt``, with the same
        options, and is not rendered again."""
        return self.prompts.render(prompt, options or Options())

    def segments(self, prompt: Prompt, options: Options | None = None) -> SegmentedPrompt:
        """How ``prompt`` is cut into segments; its ``ids`` are what mode ``full`` prefills."""
        return self.prompts.segments(prompt, options or Options())

    # -- prompt schemas -------------------------------------------------------------------------

    def add_schema(self, source: SchemaSource, positions: Positions = "schema") -> str:
        """Add a schema of Prompt Cache for prompts in ``pml``; returns its name.

        ``source``: markup (``<schema name="…">…``), a file of it, a parsed schema, or a program. A
        schema of the same name is replaced. With ``positions="schema"`` modules keep the positions of the
        schema and are never recomputed; with ``"blend"`` they follow each other as in any prompt, and the
        policy recomputes the most important tokens. Nothing is computed now: modules are encoded at
        first use, or by :meth:`encode_schema`. Raises :class:`SchemaError`, :class:`InvalidInputError`.
        """
        return self.schemas.add(source, positions).name

    def encode_schema(self, name: str) -> SchemaReport:
        """Encode the modules of a schema that are not stored yet.

        Raises :class:`UnsupportedModelError` for a model whose tokens cannot be placed.
        """
        return self.schemas.encode(name)

    # -- the corpus -----------------------------------------------------------------------------

    def ingest(
        self,
        inputs: Inputs,
        watch: Watch | None = None,
        prune: bool = False,
        patterns: Patterns = ALL,
    ) -> IngestReport:
        """Precompute files, directories or :class:`Document` objects. Safe to interrupt and to repeat.

        ``prune`` removes documents whose file no longer exists in the given directories. ``patterns`` choose
        files of directories, for example ``Patterns(include=("*.md",))``.
        Raises :class:`UnsupportedModelError` for a model whose KV cannot be reused, after the texts were
        stored without it, for mode ``full``.
        """
        return ingesting.ingest(self.kv_namespace, self.scheduler, inputs, watch, prune, patterns)

    def remove(self, paths: Sequence[Path | str]) -> int:
        """Remove documents by path or directory, in any spelling: texts, vectors and KV. Returns how many.

        Raises :class:`InvalidInputError` if a path is not in the corpus; then nothing is removed.
        """
        return ingesting.remove(self.kv_namespace, paths)

    def publish(self, again: bool = False) -> Published:
        """Publish the corpus in the remote: an immutable snapshot, which other machines follow.

        ``again``: write also what the remote should have, because it has lost or damaged it.
        Copies KV first that only this machine has, so that the snapshot names none that is not there. Publish
        from one machine at a time. Raises :class:`InvalidInputError` without a remote, and if the remote has
        the corpus of another store or a newer snapshot; :class:`CorpusError`,
        :class:`StoreUnavailableError`.
        """
        return publishing.publish(self.kv_namespace, again)

    def follow(self) -> Followed | None:
        """Make the corpus equal to the one published in the remote; ``None`` if there is none.

        Requests that run go on. Raises :class:`InvalidInputError` if the store has documents of its own
        or changes that were not published, :class:`CorpusError`, :class:`StoreUnavailableError`.
        """
        return publishing.follow(self.kv_namespace.root, self.settings, keep_settings=True)

    def dry_run(self, inputs: Inputs, patterns: Patterns = ALL) -> DryRun:
        """What :meth:`ingest` would do: chunks, bytes, and seconds estimated from timed samples."""
        return dry_run(self.kv_namespace, self.scheduler, inputs, patterns)

    def remove_sources(self, sources: Iterable[str]) -> int:
        """Remove the documents with these very sources: texts, vectors and KV. Returns how many.

        Raises :class:`CorpusError` without a corpus.
        """
        return ingesting.remove_sources(self.kv_namespace, sources)

    def keep_following(self, every_s: float | None = None) -> publishing.Follower:
        """:meth:`follow` in the background, until what is returned is closed."""
        return publishing.Follower(self.kv_namespace, every_s)

    def ingest_by(self, run: Callable[[KVNamespace], IngestReport]) -> IngestReport:
        """:meth:`ingest` by ``run``, which computes on other machines and may use the engine's insides."""
        return run(self.kv_namespace)

    @property
    def corpus(self) -> Corpus | None:
        """The corpus in the store's directory; ``None`` before the first ingest."""
        return self.kv_namespace.corpus.current

    def require_corpus(self) -> Corpus:
        """:attr:`corpus`. Raises :class:`CorpusError`, or :class:`InvalidInputError` for another model's."""
        return self.kv_namespace.corpus.require()

    @property
    def manifest(self) -> Manifest:
        """Settings of the corpus, or those that a new one would have."""
        return self.kv_namespace.corpus.manifest

    @property
    def store(self) -> KVStore:
        """The KV store; opens it."""
        return self.kv_namespace.store

    @property
    def root(self) -> Path:
        """Directory of the store and the corpus."""
        return self.kv_namespace.root

    def open_retrieval(self) -> None:
        """Load the embedder and the reranker, which the first question does otherwise.

        Raises as :meth:`require_corpus`.
        """
        self.asking.open()

    def use_embedder(self, embedder: Embedder) -> None:
        """Embed with ``embedder`` instead of the corpus's own, whose vectors must be the same."""
        self.kv_namespace.corpus.embedder = embedder

    # -- the model ------------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        """The name that the model was given by, or its id."""
        return self.kv_namespace.model.name

    @property
    def tokens(self) -> Tokens:
        """The model's tokenizers and chat template. Loads no weights."""
        return self.kv_namespace.model.tokens

    @property
    def context_tokens(self) -> int:
        """Length of the model's context. Loads no weights."""
        return self.kv_namespace.model.context_tokens

    @property
    def adapter(self) -> ModelAdapter:
        """The loaded model; loads it."""
        return self.kv_namespace.model.adapter

    def open(self) -> None:
        """Load the model and check that stored KV is its own, which the first request does otherwise."""
        _ = self.kv_namespace.model.adapter
        self.scheduler.run(self.planner.open)

    def verify(self) -> Verification:
        """The correctness gate for the loaded model, remembered in the store."""
        return self.scheduler.run(lambda: self.kv_namespace.validity.verification())

    def calibrate(
        self,
        options: CalibrationOptions | None = None,
        watch: calibrating.Watch = lambda race, done: None,
    ) -> CalibrationReport:
        """Find the policy that brings blended answers closest to full prefill, and the smallest ratio, from 0
        on, that is as close as the largest one.

        Measures the candidates on prompts sampled from the corpus, and checks the best on other prompts, at
        each ratio. What is found is kept in the store for requests that name none: the ratio, and for each
        ratio the best candidate, or the default if the check does not show a gain. Ctrl-C concludes from the
        finished prompts. ``watch`` is called after each prompt. Raises :class:`InvalidInputError`,
        :class:`CorpusError`, and :class:`StoreUnavailableError` for a store that cannot be written.
        """
        s = self.settings
        options = options or CalibrationOptions(calibrating.largest_ratio(s), top_k=s.top_k)
        return calibrating.calibrate(
            self.kv_namespace, self.planner, self.segments, self.scheduler, options, watch
        )

    def forget_calibration(self) -> ForgottenCalibration:
        """Undo :meth:`calibrate` for the loaded model, also if it is unfinished; what there was of it."""
        return calibrating.undo(self.kv_namespace, self.scheduler)

    def profile(
        self,
        directories: Sequence[str | Path] = (),
        again: bool = False,
        watch: profiling.Watch = lambda what, done, steps: None,
    ) -> ProfileReport:
        """Measure how long loading and computing take on this machine, for ratio ``auto``.

        The profile is kept in the store and returned by later calls; ``again`` measures again.
        ``directories``: also time reading from these. ``watch`` is called before each step. An
        interrupted measurement keeps nothing. Raises :class:`InvalidInputError`,
        :class:`UnsupportedModelError`, :class:`StoreFullError`.
        """
        return profiling.profile(self.kv_namespace, self.scheduler, directories, again, watch)

    def stats(self) -> StoreStats:
        """What the store holds, and how this engine has used it. Opens the store."""
        if self.closed:
            raise InvalidInputError(CLOSED)
        return self.kv_namespace.store.stats()

    def prometheus(self) -> str:
        """:meth:`stats` in Prometheus' text format, for a ``/metrics`` endpoint."""
        learner, root = self._learner, str(self.kv_namespace.root.absolute())
        return exposition(self.stats(), root, learner.passages, learner.tokens)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called; a closed engine answers nothing more."""
        return self.scheduler.closed

    def threads_for(self, characters: int) -> ThreadQueue:
        """Where a prompt with so many characters is prepared."""
        return self._answering.threads_for(characters)

    @property
    def queues(self) -> list[QueueState]:
        """What waits in this engine: prompts, the model, batches of the embedder."""
        embedding = self.kv_namespace.corpus.embedding_turns
        texts = QueueState("batches of texts", *embedding.counts)
        return [*self.own_queues, self.scheduler.state, texts]

    @property
    def own_queues(self) -> list[QueueState]:
        """What waits in this engine, and not in those beside it: prompts."""
        return self._answering.queues

    def progress_at(self) -> float:
        """``time.monotonic()`` when the model or the embedder last did something."""
        embedding = self.kv_namespace.corpus.embedding_turns
        return max(embedding.moved_at, embedding.stepped_at)

    def drain(self) -> None:
        """Block until background encoding is done."""
        self.scheduler.drain()

    def close(self) -> None:
        """Finish running requests, drop queued background work, close the store, and free a model that was
        loaded by name unless another open engine uses it. Idempotent.
        """
        self.library.additions.stop()
        self.scheduler.close()
        self._answering.close()
        self.library.additions.close()
        self.prefixes.close()
        self.kv_namespace.close()

    def __enter__(self) -> BlendEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _asked(
    prompt: Prompt | None, pml: str | None, options: Options | None, given: OptionFields
) -> tuple[Prompt, Options]:
    """What a call asks for. Raises :class:`InvalidInputError`."""
    return one_prompt(prompt, pml), with_keywords(options, given)
