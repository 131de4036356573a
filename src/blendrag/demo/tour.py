"""What ``make demo`` runs: a small corpus, a dozen questions, and three ways to answer each.

``full`` prefills the whole prompt, ``reuse`` loads every chunk's KV as it was stored, ``blend`` loads it and
recomputes a small share (CacheBlend). Half of what the corpus says can only be understood with the paragraph
before, which is another chunk, so ``reuse`` must fail there.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from blendrag.config import DEMO_MODEL, Mode
from blendrag.demo import Question, demo_corpus_path, demo_questions

if TYPE_CHECKING:
    from rich.table import Table

    from blendrag.engine import BlendEngine

MODES: tuple[Mode, ...] = ("full", "reuse", "blend")
#: One paragraph of the corpus fits, two do not, so each paragraph is a chunk.
CHUNK_TOKENS = 64
EMBEDDER = "minilm-offline"
#: The engine's default; the model was trained on contexts of this size.
TOP_K = 6
MAX_NEW_TOKENS = 16
LEGEND = (
    "full prefills the whole prompt; reuse loads every chunk's KV as it was stored; blend loads it and "
    "recomputes a small share. TTFT: time to first token. For this small model, fixed costs hide most of "
    "what blending saves: blendrag bench ttft measures a larger one."
)


@dataclass(frozen=True)
class Reply:
    """How one mode answered one question."""

    answer: str
    correct: bool
    ttft_s: float
    prompt_tokens: int
    reused_tokens: int
    recomputed_tokens: int


@dataclass(frozen=True)
class Stop:
    """One question of the tour, with the reply of each mode."""

    question: str
    kind: str
    """As in :class:`blendrag.demo.Question`."""
    expected: str
    replies: dict[str, Reply]


@dataclass(frozen=True)
class Tour:
    """All questions, in order, and their totals."""

    documents: int
    chunks: int
    stops: tuple[Stop, ...]

    def totals(self) -> dict[str, dict[str, float]]:
        """By mode: the number of correct answers, the median TTFT, and the median over the questions of full
        prefill's TTFT divided by this mode's."""
        found: dict[str, dict[str, float]] = {}
        for mode in MODES:
            pairs = [(stop.replies["full"], stop.replies[mode]) for stop in self.stops]
            found[mode] = {
                "correct": sum(reply.correct for _, reply in pairs),
                "ttft_s": median(reply.ttft_s for _, reply in pairs),
                "speedup": median(full.ttft_s / reply.ttft_s for full, reply in pairs),
            }
        return found

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, with the totals."""
        return asdict(self) | {"questions": len(self.stops), "totals": self.totals()}


def take_tour(
    store: Path | None = None,
    model: Any = DEMO_MODEL,
    corpus: Path | None = None,
    questions: Sequence[Question] | None = None,
    **settings: Any,
) -> Tour:
    """Ingest the corpus into ``store`` (``None``: a temporary one) and ask every question in every mode.

    ``settings`` go to :class:`BlendEngine`. The modes take turns, so that other load on the machine affects
    all of them equally; retrieval is not timed.

    Raises :class:`KeyboardInterrupt` and :class:`StoreFullError` if the ingest was cut short.
    """
    from blendrag.engine import BlendEngine

    asked = tuple(questions if questions is not None else demo_questions())
    defaults = {"embedder": EMBEDDER, "max_new_tokens": MAX_NEW_TOKENS, "top_k": TOP_K}
    settings = {**defaults, **settings}
    with ExitStack() as stack:
        if store is None:
            folder = tempfile.TemporaryDirectory(prefix="blendrag-demo-")
            store = Path(stack.enter_context(folder)) / "store"
        engine = BlendEngine(model, store, chunk_tokens=CHUNK_TOKENS, **settings)
        stack.enter_context(engine)
        report = engine.ingest([corpus if corpus is not None else demo_corpus_path()]).whole()
        for mode in MODES:  # warm up: the first answer of a mode takes longer
            _reply(engine, asked[0], mode)
        stops = tuple(
            Stop(each.text, each.kind, each.answer, {m: _reply(engine, each, m) for m in MODES})
            for each in asked
        )
    return Tour(report.documents, report.chunks, stops)


def _reply(engine: BlendEngine, question: Question, mode: Mode) -> Reply:
    from blendrag.engine import Options

    answer = engine.ask(question.text, options=Options(mode=mode))
    engine.drain()  # finish background work before the next question is timed
    metrics = answer.metrics
    return Reply(
        answer.text.strip(),
        _normalized(answer.text) == _normalized(question.answer),
        metrics.ttft_s,
        metrics.prompt_tokens,
        metrics.reused_tokens,
        metrics.recomputed_tokens,
    )


def _normalized(answer: str) -> str:
    return answer.strip(" .\n").casefold()


# -- printing -------------------------------------------------------------------------------------


def print_tour(tour: Tour) -> None:
    """Print the table and the line of totals."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table(tour))
    console.print(totals(tour), highlight=False, markup=False, soft_wrap=True)


def table(tour: Tour) -> Table:
    """One row per question; wrong answers are marked ✗."""
    from rich.markup import escape
    from rich.table import Table

    drawn = Table(
        title=f"{tour.documents} documents, {tour.chunks} chunks of KV",
        caption=LEGEND,
        caption_justify="left",
        row_styles=["", "dim"],
    )
    drawn.add_column("question", ratio=3)
    drawn.add_column("expected")
    for mode in MODES:
        drawn.add_column(mode)
    for heading in ("TTFT ms\n" + " / ".join(MODES), "prompt", "reused", "of them\nrecomputed"):
        drawn.add_column(heading, justify="right")
    for stop in tour.stops:
        replies = [stop.replies[mode] for mode in MODES]
        blend = stop.replies["blend"]
        drawn.add_row(
            escape(stop.question),
            escape(stop.expected),
            *map(_marked, replies),
            " / ".join(f"{1e3 * reply.ttft_s:.0f}" for reply in replies),
            str(blend.prompt_tokens),
            str(blend.reused_tokens),
            str(blend.recomputed_tokens),
        )
    return drawn


def _marked(reply: Reply) -> str:
    from rich.markup import escape

    printable = "".join(c if c.isprintable() else "�" for c in " ".join(reply.answer.split()))
    shown = escape(printable or "(nothing)")
    return shown if reply.correct else f"[bold red]✗ {shown}[/]"


def totals(tour: Tour) -> str:
    """The line below the table."""
    found, n = tour.totals(), len(tour.stops)
    right = ", ".join(f"{mode} {of['correct']}/{n}" for mode, of in found.items())
    times = ", ".join(f"{mode} {1e3 * of['ttft_s']:.0f} ms" for mode, of in found.items())
    speed = ", ".join(f"{mode} {found[mode]['speedup']:.1f}×" for mode in ("reuse", "blend"))
    return f"correct: {right}; median TTFT: {times}; speed over full prefill: {speed}"
