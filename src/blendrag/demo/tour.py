"""What ``make demo`` runs: one small corpus, a dozen questions, three ways to answer each.

Owns the comparison and its table. ``full`` prefills the whole prompt, ``reuse`` loads every chunk's KV
as it was stored, ``blend`` loads it and recomputes a small share (CacheBlend). Half of what the corpus
says can be told apart only by the paragraph before, which is another chunk: there ``reuse`` must fail.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
#: A paragraph of the corpus fits, two do not: each paragraph is a chunk of its own.
CHUNK_TOKENS = 64
EMBEDDER = "minilm-offline"
LEGEND = (
    "full prefills the whole prompt; reuse loads every chunk's KV as it was stored; blend loads it and "
    "recomputes a small share. TTFT: time to first token. This model is so small that "
    "fixed costs eat what blending saves: blendrag bench ttft measures it on a bigger one."
)
#: What an engine retrieves by default, and contexts of the size that the model was trained on.
TOP_K = 6
MAX_NEW_TOKENS = 16


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
    """One question of the tour; ``kind`` as in :class:`blendrag.demo.Question`."""

    question: str
    kind: str
    expected: str
    replies: dict[str, Reply]


@dataclass(frozen=True)
class Tour:
    """All stops, in order, and what they amount to."""

    documents: int
    chunks: int
    stops: tuple[Stop, ...]

    def correct(self, mode: str) -> int:
        return sum(stop.replies[mode].correct for stop in self.stops)

    def ttft_s(self, mode: str) -> float:
        """Median over the questions."""
        return median(stop.replies[mode].ttft_s for stop in self.stops)

    def speedup(self, mode: str) -> float:
        """Median over the questions of full prefill's TTFT divided by this mode's."""
        return median(s.replies["full"].ttft_s / s.replies[mode].ttft_s for s in self.stops)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON-ready dictionary, totals included."""
        totals = {
            mode: {
                "correct": self.correct(mode),
                "ttft_s": self.ttft_s(mode),
                "speedup": self.speedup(mode),
            }
            for mode in MODES
        }
        return asdict(self) | {"questions": len(self.stops), "totals": totals}


def take_tour(
    store: Path | None = None,
    model: Any = DEMO_MODEL,
    corpus: Path | None = None,
    questions: Sequence[Question] | None = None,
    **engine: Any,
) -> Tour:
    """Ingest the corpus into ``store`` (a temporary one if ``None``) and ask everything.

    Further arguments go to :class:`BlendEngine`. Modes take turns, so that whatever else the
    machine does hits all of them alike; retrieval is outside the times.

    Raises :class:`KeyboardInterrupt` and :class:`StoreFullError` for an ingest that was cut short.
    """
    from blendrag.engine import BlendEngine

    asked = tuple(questions if questions is not None else demo_questions())
    settings: dict[str, Any] = {
        "embedder": EMBEDDER, "max_new_tokens": MAX_NEW_TOKENS, "top_k": TOP_K
    } | engine  # fmt: skip
    with (
        _directory(store) as root,
        BlendEngine(model, root, chunk_tokens=CHUNK_TOKENS, **settings) as blend,
    ):
        report = blend.ingest([corpus if corpus is not None else demo_corpus_path()]).whole()
        for mode in MODES:  # the first answer of a mode pays for what is set up only once
            _reply(blend, asked[0], mode)
        stops = tuple(_stop(blend, question) for question in asked)
    return Tour(report.documents, report.chunks, stops)


@contextmanager
def _directory(store: Path | None) -> Iterator[Path]:
    if store is not None:
        yield store
        return
    with tempfile.TemporaryDirectory(prefix="blendrag-demo-") as folder:
        yield Path(folder) / "store"


def _stop(engine: BlendEngine, question: Question) -> Stop:
    replies: dict[str, Reply] = {mode: _reply(engine, question, mode) for mode in MODES}
    return Stop(question.text, question.kind, question.answer, replies)


def _reply(engine: BlendEngine, question: Question, mode: Mode) -> Reply:
    from blendrag.engine import Options

    answer = engine.ask(question.text, options=Options(mode=mode))
    engine.drain()  # nothing of this question may run during the next
    metrics = answer.metrics
    return Reply(
        answer.text.strip(),
        _same(answer.text, question.answer),
        metrics.ttft_s,
        metrics.prompt_tokens,
        metrics.reused_tokens,
        metrics.recomputed_tokens,
    )


def _same(answer: str, expected: str) -> bool:
    return answer.strip(" .\n").casefold() == expected.strip(" .\n").casefold()


# -- on paper -----------------------------------------------------------------------------------


def print_tour(tour: Tour) -> None:
    """The table and the line of totals, on stdout."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    console.print(table(tour))
    console.print(totals(tour), highlight=False, markup=False, soft_wrap=True)


def table(tour: Tour) -> Table:
    """One row per question; wrong answers are marked ✗."""
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
    drawn.add_column("TTFT ms\n" + " / ".join(MODES), justify="right")
    drawn.add_column("prompt", justify="right")
    drawn.add_column("reused", justify="right")
    drawn.add_column("of them\nrecomputed", justify="right")
    for stop in tour.stops:
        replies = [stop.replies[mode] for mode in MODES]
        blend = stop.replies["blend"]
        drawn.add_row(
            _plain(stop.question),
            _plain(stop.expected),
            *map(_marked, replies),
            " / ".join(f"{1e3 * reply.ttft_s:.0f}" for reply in replies),
            str(blend.prompt_tokens),
            str(blend.reused_tokens),
            str(blend.recomputed_tokens),
        )
    return drawn


def totals(tour: Tour) -> str:
    """The one line below the table."""
    n = len(tour.stops)
    right = ", ".join(f"{mode} {tour.correct(mode)}/{n}" for mode in MODES)
    times = ", ".join(f"{mode} {1e3 * tour.ttft_s(mode):.0f} ms" for mode in MODES)
    return (
        f"correct: {right}; median TTFT: {times}; speed over full prefill: "
        f"reuse {tour.speedup('reuse'):.1f}×, blend {tour.speedup('blend'):.1f}×"
    )


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _marked(reply: Reply) -> str:
    printable = "".join(c if c.isprintable() else "�" for c in " ".join(reply.answer.split()))
    shown = _plain(printable or "(nothing)")
    return shown if reply.correct else f"[bold red]✗ {shown}[/]"
