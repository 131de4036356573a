"""How a tour is printed: one table and one line of totals."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from blendrag.demo.tour import HANDBOOK_MODES, HANDBOOK_RATIO, Stop, Tour, TourReply

LEGEND = (
    "full prefills the whole prompt; reuse loads every chunk's KV as it was stored; blend loads it and "
    "recomputes a small share. TTFT: time to first token. For this small model, fixed costs hide most of "
    "what blending saves: blendrag bench ttft measures a larger one."
)
HANDBOOK_LEGEND = (
    "The answers are blend's. full prefills the whole prompt; blend loads the chunks' KV and recomputes "
    f"{HANDBOOK_RATIO:.0%} of it. TTFT: time to first token. Reused: share of the prompt that was not "
    "computed."
)
#: Columns of output that is not a terminal.
WIDTH = 140


def print_tour(tour: Tour, console: Console) -> None:
    """Print the table and the line of totals of the tour's kind."""
    draw, sum_up = (
        (handbook_table, handbook_totals) if tour.modes == HANDBOOK_MODES else (table, totals)
    )
    console.print(draw(tour))
    console.print(sum_up(tour), soft_wrap=True)


# -- the embedded model ---------------------------------------------------------------------------


def table(tour: Tour) -> Table:
    """One row per question; wrong answers are marked ✗."""
    drawn = _empty(tour, LEGEND)
    drawn.add_column("question", ratio=3)
    drawn.add_column("expected")
    for mode in tour.modes:
        drawn.add_column(mode)
    for heading in (
        "TTFT ms\n" + " / ".join(tour.modes),
        "prompt",
        "reused",
        "of them\nrecomputed",
    ):
        drawn.add_column(heading, justify="right")
    for stop in tour.stops:
        replies = [stop.replies[mode] for mode in tour.modes]
        blend = stop.replies["blend"]
        drawn.add_row(
            Text(stop.question),
            Text(stop.expected),
            *map(_marked, replies),
            " / ".join(f"{1e3 * reply.ttft_s:.0f}" for reply in replies),
            str(blend.prompt_tokens),
            str(blend.reused_tokens),
            str(blend.recomputed_tokens),
        )
    return drawn


def totals(tour: Tour) -> str:
    """The line below the table."""
    found, n = tour.totals(), len(tour.stops)
    right = ", ".join(f"{mode} {of['correct']}/{n}" for mode, of in found.items())
    times = ", ".join(f"{mode} {1e3 * of['ttft_s']:.0f} ms" for mode, of in found.items())
    speed = ", ".join(f"{mode} {found[mode]['speedup']:.1f}×" for mode in ("reuse", "blend"))
    return f"correct: {right}; median TTFT: {times}; speed over full prefill: {speed}"


# -- the handbook ---------------------------------------------------------------------------------


def handbook_table(tour: Tour) -> Table:
    """One row per question, with the answer of mode ``blend``; a wrong one is marked ✗."""
    drawn = _empty(tour, HANDBOOK_LEGEND)
    drawn.add_column("question", ratio=4)
    drawn.add_column("answer", ratio=5)
    drawn.add_column("sources", ratio=3)
    for heading in ("TTFT s\nfull", "TTFT s\nblend", "reused"):
        drawn.add_column(heading, justify="right", no_wrap=True)
    for stop in tour.stops:
        drawn.add_row(*_handbook_row(stop))
    return drawn


def _handbook_row(stop: Stop) -> tuple[str | Text, ...]:
    full, blend = stop.replies["full"], stop.replies["blend"]
    return (
        Text(stop.question),
        _marked(blend),
        Text("\n".join(stop.sources)),
        f"{full.ttft_s:.2f}",
        f"{blend.ttft_s:.2f}",
        f"{blend.reused_share:.0%}",
    )


def handbook_totals(tour: Tour) -> str:
    """The line below the table."""
    found, n = tour.totals(), len(tour.stops)
    right = ", ".join(f"{mode} {of['correct']}/{n}" for mode, of in found.items())
    times = " → ".join(f"{of['ttft_s']:.2f} s" for of in found.values())
    return (
        f"answered alike by full and blend: {tour.alike}/{n}; right: {right}; "
        f"median TTFT: {times}, {found['blend']['speedup']:.1f}× faster"
    )


# -- both -----------------------------------------------------------------------------------------


def _empty(tour: Tour, caption: str) -> Table:
    return Table(
        title=f"{tour.documents} documents, {tour.chunks} chunks of KV",
        caption=caption,
        caption_justify="left",
        row_styles=["", "dim"],
    )


def _marked(reply: TourReply) -> Text:
    shown = " ".join(reply.answer.split()) or "(nothing)"
    return Text(shown) if reply.correct else Text(f"✗ {shown}", "bold red")
