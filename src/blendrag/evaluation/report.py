"""The rows as a table on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from blendrag.evaluation.rows import ALL, Row
from blendrag.evaluation.ways import FULL, NONE

LEGEND = (
    "PGR: 0 answers as without context, 1 as full prefill does, with the 95% interval of a paired "
    "bootstrap over contexts; – where full prefill gains nothing. charged: share of chunk tokens "
    "computed over all layers. KL: of the first token, in nats. prefix on/off: chunks encoded behind "
    "the corpus's prefix or behind nothing. TTFT: median, KV read from disk."
)


def print_rows(rows: Sequence[Row]) -> None:
    """One line per way: score by kind, then what all of its answers together were worth and cost."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(table(rows))


def table(rows: Sequence[Row]) -> Table:
    """Ways down, kinds across."""
    first = rows[0]
    kinds = list(dict.fromkeys(row.kind for row in rows if row.kind != ALL))
    drawn = Table(
        title=f"{first.dataset}: {first.n} questions, up to {first.n_chunks} chunks of at most "
        f"{first.chunk_tokens} tokens; {first.metric.replace('_', ' ')}",
        caption=LEGEND,
        caption_justify="left",
    )
    for column in ("policy", "schedule", "prefix"):
        drawn.add_column(column)
    for column in ("r", "charged", *kinds, "all", "PGR", "KL", "agrees", "TTFT ms"):
        drawn.add_column(column, justify="right")
    for whole in (row for row in rows if row.kind == ALL):
        of_kind = {row.kind: row for row in rows if _way(row) == _way(whole)}
        drawn.add_row(
            whole.policy,
            whole.schedule,
            {None: "", True: "on", False: "off"}[whole.encode_prefix],
            "" if whole.policy in (NONE, FULL) else f"{whole.ratio:.3g}",
            f"{whole.charged_ratio:.3f}",
            *(f"{of_kind[kind].score:.3f}" for kind in kinds),
            f"{whole.score:.3f}",
            _interval(whole),
            _number(whole.kl, ".2g"),
            _number(whole.agreement, ".2f"),
            f"{whole.ttft_ms:.0f}",
            end_section=whole.policy == FULL,
        )
    return drawn


def _way(row: Row) -> tuple[object, ...]:
    # The ratio is measured for some policies, so it may differ by kind.
    asked = row.ratio if row.schedule else None
    return row.policy, row.schedule, asked, row.encode_prefix


def _interval(row: Row) -> str:
    if row.pgr is None:
        return "–"
    if row.pgr_low is None or row.pgr_high is None:
        return f"{row.pgr:.2f}"
    return f"{row.pgr:.2f} [{row.pgr_low:.2f}, {row.pgr_high:.2f}]"


def _number(value: float | None, spec: str) -> str:
    return "–" if value is None else format(value, spec)
