"""How a tour is printed: one table and one line of totals."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from blendrag.demo.tour import ALONE, Tour, TourReply

MEANINGS = {
    "full": "full prefills the whole prompt",
    "reuse": "reuse loads every chunk's KV as it was stored",
    "blend": "blend loads every chunk's KV and recomputes a small share of it",
    ALONE: f"{ALONE} is blend over chunks that were encoded alone and without the writer",
}
RECOMPUTES_NOTHING = (
    "blend loads chunks that a writer encoded behind similar ones, and recomputes nothing"
)
LEGEND = (
    "✗: wrong. TTFT: time to first token. Reused: share of blend's prompt that was not computed. Of small "
    "models, fixed costs hide most of what reuse saves: blendrag bench ttft measures a larger one."
)
#: Columns of output that is not a terminal.
WIDTH = 140


def print_tour(tour: Tour, console: Console) -> None:
    console.print(table(tour))
    console.print(totals(tour), soft_wrap=True)


def table(tour: Tour) -> Table:
    """One row per question, with the answer of each mode; wrong answers are marked ✗."""
    drawn = Table(
        title=f"{tour.documents} documents, {tour.chunks} chunks of KV",
        caption=legend(tour),
        caption_justify="left",
        row_styles=["", "dim"],
    )
    for heading in ("question", *tour.modes, "sources"):
        drawn.add_column(heading, ratio=3)
    for heading in (f"TTFT ms\n{' / '.join(tour.modes)}", "reused"):
        drawn.add_column(heading, justify="right", no_wrap=True)
    for stop in tour.stops:
        drawn.add_row(
            Text(stop.question),
            *(_marked(reply) for reply in stop.replies.values()),
            Text("\n".join(stop.sources)),
            " / ".join(f"{1e3 * reply.ttft_s:,.0f}" for reply in stop.replies.values()),
            f"{stop.replies['blend'].reused_share:.0%}",
        )
    return drawn


def legend(tour: Tour) -> str:
    """What the modes of ``tour`` do, and what its columns show."""
    meanings = dict(MEANINGS)
    if ALONE in tour.modes:
        meanings["blend"] = RECOMPUTES_NOTHING
    return f"{'; '.join(meanings[mode] for mode in tour.modes)}. {LEGEND}"


def totals(tour: Tour) -> str:
    """The line below the table."""
    found, n = tour.totals(), len(tour.stops)
    right = ", ".join(f"{mode} {of['correct']}/{n}" for mode, of in found.items())
    times = ", ".join(f"{mode} {1e3 * of['ttft_s']:,.0f} ms" for mode, of in found.items())
    speed = ", ".join(f"{mode} {found[mode]['speedup']:.1f}×" for mode in found if mode != "full")
    return (
        f"right: {right}; answered alike by full and blend: {tour.alike}/{n}; median TTFT: {times}; "
        f"speed over full prefill: {speed}"
    )


def _marked(reply: TourReply) -> Text:
    shown = " ".join(reply.answer.split()) or "(nothing)"
    return Text(shown) if reply.correct else Text(f"✗ {shown}", "bold red")
