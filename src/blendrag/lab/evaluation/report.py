"""The rows as a table on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from blendrag.lab.evaluation.rows import ALL, Row
from blendrag.lab.evaluation.ways import FULL, NONE

LEGEND = (
    "PGR: 0 answers as without context, 1 as full prefill does, with the 95% interval of a paired "
    "bootstrap over contexts; – where full prefill gains nothing. charged: share of chunk tokens "
    "computed over all layers; above r where a policy computes the entry layer for all of them to "
    "choose. KL: of the first token, KL/tok: per token of full prefill's answer, in nats. recovered: "
    "1 - KL/tok over reuse's, with its 95% interval. prefix on/off: chunks encoded behind the corpus's "
    "prefix or behind nothing. TTFT: median, KV read from disk."
)


#: Columns of a terminal that the whole table fits in.
WIDE = 180


def print_rows(rows: Sequence[Row]) -> None:
    """One line per way: score by kind, then what all of its answers together were worth and cost.

    On a narrow terminal the two stand below one another.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=190)
    if console.width >= WIDE:
        console.print(table(rows))
    else:
        console.print(table(rows, by_kind=False))
        console.print(kinds_table(rows))


def table(rows: Sequence[Row], by_kind: bool = True) -> Table:
    """Ways down; score by kind, if asked for, and the rest across."""
    kinds = _kinds(rows) if by_kind else []
    drawn = _titled(rows)
    drawn.caption, drawn.caption_justify = LEGEND, "left"
    if not by_kind:
        drawn.padding = (0, 0, 0, 0)
    several = len({row.encode_prefix for row in rows} - {None}) > 1 or by_kind
    _add_names(drawn, several)
    for column in (
        "r",
        "charged",
        *kinds,
        "all",
        "PGR",
        "KL",
        "KL/tok",
        "recovered",
        "agrees",
        "TTFT ms",
    ):
        drawn.add_column(column, justify="right", no_wrap=not by_kind)
    for whole, of_kind in _ways(rows):
        drawn.add_row(
            *_names(whole, several),
            f"{whole.charged_ratio:.3f}",
            *(f"{of_kind[kind].score:.3f}" for kind in kinds),
            f"{whole.score:.3f}",
            _interval(whole.pgr, whole.pgr_low, whole.pgr_high),
            _number(whole.kl, ".2g"),
            _number(whole.token_kl, ".2g"),
            _interval(whole.recovered, whole.recovered_low, whole.recovered_high),
            _number(whole.agreement, ".2f"),
            f"{whole.ttft_ms:.0f}",
            end_section=whole.policy == FULL,
        )
    return drawn


def kinds_table(rows: Sequence[Row]) -> Table:
    """Ways down, score by kind across, and how many questions each kind has."""
    drawn = Table(title="score by kind, and questions asked", padding=0)
    several = len({row.encode_prefix for row in rows} - {None}) > 1
    _add_names(drawn, several)
    kinds = _kinds(rows)
    asked = {row.kind: row.n for row in rows}
    for column in ("r", *(f"{kind} {asked[kind]}" for kind in kinds)):
        drawn.add_column(column, justify="right", overflow="fold")
    for whole, of_kind in _ways(rows):
        scores = (f"{of_kind[kind].score:.3f}" for kind in kinds)
        drawn.add_row(*_names(whole, several), *scores, end_section=whole.policy == FULL)
    return drawn


def _titled(rows: Sequence[Row]) -> Table:
    first = rows[0]
    return Table(
        title=f"{first.dataset}: {first.n} questions, up to {first.n_chunks} chunks of at most "
        f"{first.chunk_tokens} tokens; {first.metric.replace('_', ' ')}"
    )


def _kinds(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.kind for row in rows if row.kind != ALL))


def _ways(rows: Sequence[Row]) -> Iterator[tuple[Row, dict[str, Row]]]:
    """Of each way the row of all its answers, and its rows by kind."""
    for whole in (row for row in rows if row.kind == ALL):
        yield whole, {row.kind: row for row in rows if _way(row) == _way(whole)}


def _add_names(drawn: Table, several: bool) -> None:
    for column in ("policy", "schedule", *(["prefix"] if several else [])):
        drawn.add_column(column, overflow="fold", min_width=len(column))


def _names(row: Row, several: bool) -> list[str]:
    """Policy, schedule, prefix where there are several, and r."""
    prefix = {None: "", True: "on", False: "off"}[row.encode_prefix]
    ratio = "" if row.policy in (NONE, FULL) else f"{row.ratio:.3g}"
    return [row.policy, row.schedule, *([prefix] if several else []), ratio]


def _way(row: Row) -> tuple[object, ...]:
    # The ratio is measured for some policies, so it may differ by kind.
    asked = row.ratio if row.schedule else None
    return row.policy, row.schedule, asked, row.encode_prefix


def _interval(value: float | None, low: float | None, high: float | None) -> str:
    if value is None:
        return "–"
    if low is None or high is None:
        return f"{value:.2f}"
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def _number(value: float | None, spec: str) -> str:
    return "–" if value is None else format(value, spec)
