"""``BlendEngine``: ingest documents, answer questions over them; all an integration needs.

The way of a query: rendered prompt → :func:`prompt.make_plan` → :class:`Controller` → loader and
fusor inside ``model.generate`` → tokens stream → metrics; missing chunks are encoded afterwards, in
the background. All model work runs on one worker thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from blendrag.config import KVEncoding, Mode, Ratio, settings
from blendrag.engine import calibration as calibrating
from blendrag.engine import ingest as ingesting
from blendrag.engine import profiling
from blendrag.engine.answering import Answering
from blendrag.engine.calibration import CalibrationOptions, CalibrationReport
from blendrag.engine.exposition import exposition
from blendrag.engine.ingest import DryRun, IngestReport, Inputs, Watch
from blendrag.engine.kv_writer import BackgroundWriter
from blendrag.engine.library import Library
from blendrag.engine.profiling import ProfileReport
from blendrag.engine.requests import Requests, check_defaults
from blendrag.engine.resources import CorpusSettings, Resources
from blendrag.engine.worker import Worker
from blendrag.fusor.gate_record import Verification
from blendrag.model.adapter import ModelAdapter
from blendrag.planning.search import Step
from blendrag.store import StoreStats


class BlendEngine(Answering):
    """Answers prompts with one model over one store.

    Args:
        model: hub id, directory, ``"demo"``, a loaded ``AutoModelForCausalLM`` (then ``tokenizer`` is
            needed too) or a :class:`ModelAdapter`. Loaded on first use. Open engines of the same name,
            files, dtype, device and adapter share one loaded model; they answer in turn.
        store: directory of the KV store and the corpus beside it; made by the first ingest.
        mode, policy, schedule, ratio, max_new_tokens, top_k: defaults of every request.
        min_ratio: the least that ratio ``auto`` takes.
        chunk_tokens, prefix_text, embedder: settings of a corpus made by this engine's ingest.
        encode_prefix: ``False`` makes a corpus whose chunks are encoded behind nothing at all, not even
            BOS, to measure what the prefix is worth.
        ram_bytes, disk_bytes: limits of the store's tiers.
        encoding: how a store made by this engine's ingest keeps KV: native, int8 or fp8.
        lora: directory of a PEFT adapter to load onto the model.
        trust_remote_code: run Python files that ``model`` or ``embedder`` brings in its directory or
            repository. Read them first: they can do whatever you can.

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
        trust_remote_code: bool = False,
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
            CorpusSettings(prefix_text, encode_prefix, chunk_tokens, embedder, encoding),
            lora,
            read_only,
            trust_remote_code,
        )
        self._worker = Worker("blendrag-engine")
        self.library = Library(self._resources, self._worker)
        background = BackgroundWriter(self._resources, self._worker)
        self._requests = Requests(self._resources, self.settings, self._worker, background)

    # -- the corpus -----------------------------------------------------------------------------

    def ingest(self, inputs: Inputs, watch: Watch | None = None) -> IngestReport:
        """Precompute files, directories or :class:`Document` objects; safe to interrupt and repeat.

        Raises :class:`UnsupportedModelError` for a model whose KV cannot be reused.
        """
        return ingesting.ingest(self._resources, self._worker, inputs, watch)

    def remove(self, paths: Sequence[Path | str]) -> int:
        """Forget documents by path (or directory): texts, vectors and KV. How many there were.

        Raises :class:`InvalidInputError` when nothing of a path is in the corpus; then nothing is
        forgotten.
        """
        return ingesting.remove(self._resources, paths)

    def dry_run(self, inputs: Inputs) -> DryRun:
        """What :meth:`ingest` would do: chunks, bytes, and seconds from one timed chunk."""
        return ingesting.dry_run(self._resources, self._worker, inputs)

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
        return self._worker.run(lambda: self._resources.kv_validity.verification())

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
        directories: Sequence[str | Path] = (),
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
        """Finish running requests, drop queued background work, close the store, and free a model loaded by
        its name unless another open engine uses it. Idempotent.
        """
        self._worker.close()
        self._resources.close()

    def __enter__(self) -> BlendEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
