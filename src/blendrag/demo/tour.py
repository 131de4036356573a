"""The run of the demo: ingest a corpus, then ask each question in several modes.

There are two tours. The embedded model compares ``full``, ``reuse`` and ``blend`` on a small corpus: half of
what it says can only be understood with the paragraph before, which is another chunk, so ``reuse`` must fail
there. SmolLM2 compares ``full`` with ``blend`` on a handbook whose chunks a writer has encoded behind similar
ones, and with ``alone``, the same over chunks that the model itself has encoded alone.

``full`` prefills the whole prompt, ``reuse`` loads every chunk's KV as it was stored, ``blend`` loads it and
recomputes a small share (CacheBlend), or nothing at ratio 0.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from blendrag.config import DEMO_MODEL, Mode
from blendrag.demo import (
    Question,
    demo_corpus_path,
    demo_questions,
    demo_writer_path,
    handbook_path,
    handbook_questions,
)

if TYPE_CHECKING:
    from blendrag.engine import BlendEngine, IngestReport

MODES: tuple[Mode, ...] = ("full", "reuse", "blend")
#: One paragraph of the corpus fits, two do not, so each paragraph is a chunk.
CHUNK_TOKENS = 64
EMBEDDER = "minilm-offline"
#: The engine's default; the model was trained on contexts of this size.
TOP_K = 6
MAX_NEW_TOKENS = 16

HANDBOOK_MODES: tuple[Mode, ...] = ("full", "blend")
#: Mode ``blend`` over chunks that the model itself encoded, each alone.
ALONE = "alone"
#: Similar chunks that each chunk is encoded behind where there is a writer.
ENCODE_AFTER = 2

Show = Callable[[str], None]
"""Shows how far the tour is."""


@dataclass(frozen=True)
class TourReply:
    """How one mode answered one question."""

    answer: str
    correct: bool
    ttft_s: float
    prompt_tokens: int
    reused_tokens: int
    recomputed_tokens: int

    @property
    def reused_share(self) -> float:
        """Share of the prompt whose KV was loaded and used as it was, in [0, 1]."""
        return (self.reused_tokens - self.recomputed_tokens) / self.prompt_tokens


@dataclass(frozen=True)
class Stop:
    """One question of the tour, with the reply of each mode."""

    question: str
    kind: str
    """As in :class:`blendrag.demo.Question`."""
    expected: str
    replies: dict[str, TourReply]
    """By mode; that of :data:`ALONE`, too, if there is a writer."""
    sources: tuple[str, ...] = ()
    """Names of the files that the retrieved chunks are from, the same in all modes."""

    @property
    def is_alike(self) -> bool:
        """Whether ``full`` and ``blend`` gave the same answer; case and white space do not matter."""
        full, blend = (self.replies[mode].answer.casefold().split() for mode in ("full", "blend"))
        return full == blend


@dataclass(frozen=True)
class Tour:
    """All questions, in order, and their totals."""

    documents: int
    chunks: int
    stops: tuple[Stop, ...]

    @property
    def modes(self) -> tuple[str, ...]:
        return tuple(self.stops[0].replies)

    def totals(self) -> dict[str, dict[str, float]]:
        """By mode: the number of correct answers, the median TTFT, and the median over the questions of full
        prefill's TTFT divided by this mode's."""
        found: dict[str, dict[str, float]] = {}
        for mode in self.modes:
            pairs = [(stop.replies["full"], stop.replies[mode]) for stop in self.stops]
            found[mode] = {
                "correct": sum(reply.correct for _, reply in pairs),
                "ttft_s": median(reply.ttft_s for _, reply in pairs),
                "speedup": median(full.ttft_s / reply.ttft_s for full, reply in pairs),
            }
        return found

    @property
    def alike(self) -> int:
        """Questions that ``full`` and ``blend`` answered alike."""
        return sum(stop.is_alike for stop in self.stops)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, with the totals."""
        totals = {"questions": len(self.stops), "alike": self.alike, "totals": self.totals()}
        return asdict(self) | totals


def take_handbook_tour(model: Any, store: Path | None = None, show: Show | None = None) -> Tour:
    """Ask the questions on the handbook of ``model``, in the modes ``full`` and ``blend``, the latter over KV
    that the demo's writer encoded behind similar chunks, and over KV of chunks that were encoded alone."""
    return take_tour(
        store, model, handbook_path(), handbook_questions(), HANDBOOK_MODES, show,
        stop=("\n",),  # the questions need one sentence; a small model would go on
        writer=demo_writer_path(),
        chunk_tokens=512,
        max_new_tokens=32,
        ratio=0.0,  # recomputing would cost most of so small a model's time to first token
    )  # fmt: skip


def take_tour(
    store: Path | None = None,
    model: Any = DEMO_MODEL,
    corpus: Path | None = None,
    questions: Sequence[Question] | None = None,
    modes: Sequence[Mode] = MODES,
    show: Show | None = None,
    stop: tuple[str, ...] = (),
    writer: Path | None = None,
    **settings: Any,
) -> Tour:
    """Ingest the corpus into ``store`` (``None``: a temporary one) and ask every question in every mode.

    ``stop`` ends an answer; ``settings`` go to :class:`BlendEngine`. With a ``writer`` the corpus is encoded
    twice: every chunk alone without it, and with it behind similar chunks. The modes take turns, so that
    other load on the machine affects all of them equally.

    Raises :class:`KeyboardInterrupt` and :class:`StoreFullError` if the ingest was cut short.
    """
    from blendrag.engine import BlendEngine
    from blendrag.model.writer import NONE

    chosen = tuple(questions if questions is not None else demo_questions())
    tell: Show = show or (lambda text: None)
    defaults: dict[str, Any] = {
        "chunk_tokens": CHUNK_TOKENS,
        "embedder": EMBEDDER,
        "max_new_tokens": MAX_NEW_TOKENS,
        "top_k": TOP_K,
    }
    with ExitStack() as stack:
        if store is None:
            folder = tempfile.TemporaryDirectory(prefix="blendrag-demo-")
            store = Path(stack.enter_context(folder)) / "store"
        tell("loading the model")
        documents = [corpus if corpus is not None else demo_corpus_path()]

        def lanes_of(modes: Sequence[tuple[str, Mode]], **more: Any) -> list[Lane]:
            engine = stack.enter_context(BlendEngine(model, store, **defaults | settings | more))
            reports.append(engine.ingest(documents, lambda so_far: tell(_ingested(so_far))).whole())
            return [Lane(name, engine, mode) for name, mode in modes]

        reports: list[IngestReport] = []
        lanes: list[Lane] = []
        given: dict[str, Any] = {}
        if writer is not None:  # first, as a store keeps the writer of its last ingest
            lanes = lanes_of([(ALONE, "blend")], writer=NONE, encode_after=0)
            given = {"writer": writer, "encode_after": ENCODE_AFTER}
        lanes = [*lanes_of([(mode, mode) for mode in modes], **given), *lanes]
        tell("warming up")
        for lane in lanes:  # the first answer of a mode takes longer
            _reply(lane, chosen[0], stop)
        stops = []
        for number, question in enumerate(chosen, start=1):
            tell(f"question {number} of {len(chosen)}")
            stops.append(_stop(question, lanes, stop))
    return Tour(reports[-1].documents, reports[-1].chunks, tuple(stops))


class Lane(NamedTuple):
    """A column of the table: an engine, and the mode in which it is asked."""

    name: str
    engine: BlendEngine
    mode: Mode


def _ingested(so_far: IngestReport) -> str:
    return f"ingesting: {so_far.documents} documents, {so_far.chunks} chunks"


def _stop(question: Question, lanes: Sequence[Lane], stop: tuple[str, ...]) -> Stop:
    replies = {lane.name: _reply(lane, question, stop) for lane in lanes}
    chunks = lanes[0].engine.retrieve(question.text)
    sources = dict.fromkeys(Path(chunk.source).name for chunk in chunks)
    return Stop(question.text, question.kind, question.answer, replies, tuple(sources))


def _reply(lane: Lane, question: Question, stop: tuple[str, ...]) -> TourReply:
    from blendrag.engine import Options

    answer = lane.engine.ask(question.text, options=Options(mode=lane.mode, stop=stop))
    lane.engine.drain()  # finish background work before the next question is timed
    metrics = answer.metrics
    return TourReply(
        answer.text.strip(),
        question.is_answered_by(answer.text),
        metrics.ttft_s,
        metrics.prompt_tokens,
        metrics.reused_tokens,
        metrics.recomputed_tokens,
    )
