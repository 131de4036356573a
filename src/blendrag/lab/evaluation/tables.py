"""The arena's rows as Markdown tables.

Owns columns, how numbers are written and what a table leaves out: a dimension that does not vary.
Equal rows give equal text. Rows are plain mappings, as ``blendrag eval --json`` prints them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

ALL = "all"
NOTHING = "–"
#: Rows that no recompute ratio describes.
UNSTEERED = ("full", "none", "prefix", "map-reduce", "map-rerank")
#: What tells ways apart: field and heading, in the order of the columns.
DIMENSIONS = (
    ("policy", "policy"),
    ("schedule", "schedule"),
    ("encode_prefix", "prefix"),
    ("n_chunks", "chunks"),
    ("chunk_tokens", "of tokens"),
    ("ratio", "r"),
)

Column = tuple[str, Callable[[Row], str]]


def kinds_of(rows: Sequence[Row]) -> list[str]:
    """In the order of their first rows, without ``all``."""
    return [kind for kind in dict.fromkeys(row["kind"] for row in rows) if kind != ALL]


def way_table(rows: Sequence[Row], kind: str = ALL) -> str:
    """What each way scored and cost on the questions of one kind."""
    columns = [
        *_dimensions(rows),
        ("charged", lambda row: number(row["charged_ratio"], ".3f")),
        ("score", lambda row: number(row["score"], ".3f")),
        ("PGR [95%]", pgr),
        ("KL", lambda row: number(row["kl"], ".2g")),
        ("agrees", lambda row: number(row.get("agreement"), ".2f")),
        ("TTFT ms", lambda row: number(row["ttft_ms"], ".0f")),
    ]
    return markdown(columns, [row for row in rows if row["kind"] == kind])


def kind_table(rows: Sequence[Row]) -> str:
    """PGR of each way by kind of question; the score where PGR is undefined."""
    found = {(way_of(row), row["kind"]): row for row in rows}

    def cell(kind: str) -> Callable[[Row], str]:
        def write(row: Row) -> str:
            there = found.get((way_of(row), kind))
            if there is None:
                return NOTHING
            return pgr(there) if there["pgr"] is not None else f"score {there['score']:.3f}"

        return write

    columns = [*_dimensions(rows), *((kind, cell(kind)) for kind in (*kinds_of(rows), ALL))]
    ways = [row for row in rows if row["kind"] == ALL and row["policy"] not in ("full", "none")]
    return markdown(columns, ways)


def way_of(row: Row) -> tuple[Any, ...]:
    """What no other row of its kind has the same, and what its rows of other kinds share: a ratio that
    was measured rather than asked for differs by kind."""
    asked = {**row, "ratio": row.get("ratio") if row.get("schedule") else None}
    return tuple(asked.get(field) for field, _ in DIMENSIONS)


def pgr(row: Row) -> str:
    """``0.93 [0.88, 0.97]``."""
    if row["pgr"] is None:
        return NOTHING
    if row["pgr_low"] is None or row["pgr_high"] is None:
        return f"{row['pgr']:.2f}"
    return f"{row['pgr']:.2f} [{row['pgr_low']:.2f}, {row['pgr_high']:.2f}]"


def number(value: float | None, form: str) -> str:
    """``value`` written in ``form``; a dash for none."""
    return NOTHING if value is None else format(value, form)


def markdown(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    """A table of GitHub's Markdown; vertical bars within cells are escaped."""
    lines = [[name for name, _ in columns], ["---"] * len(columns)]
    lines += [[write(row).replace("|", "\\|") for _, write in columns] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _dimensions(rows: Sequence[Row]) -> list[Column]:
    """The policy and its ratio, and whatever else takes more than one value where it applies."""

    def varies(field: str) -> bool:
        return len({row.get(field) for row in rows if row.get(field) not in (None, "")}) > 1

    return [
        (heading, _written(field))
        for field, heading in DIMENSIONS
        if field in ("policy", "ratio") or varies(field)
    ]


def _written(field: str) -> Callable[[Row], str]:
    def write(row: Row) -> str:
        value = row.get(field)
        if value is None or value == "" or (field == "ratio" and row["policy"] in UNSTEERED):
            return ""
        if field == "encode_prefix":
            return "on" if value else "off"
        return f"{value:.3g}" if field == "ratio" else str(value)

    return write
