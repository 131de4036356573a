"""Whether the default policy keeps what full prefill answers, held against every other policy.

Owns the judgement: by kind of question, at equal r, is another policy above by more than the interval?
Rows are plain mappings, as ``blendrag eval --json`` prints them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blendrag.evaluation.tables import ALL, NOTHING, UNSTEERED, Row, kinds_of, markdown, pgr

#: Where PGR is undefined, scores this much below the best other's count as behind.
SCORE_MARGIN = 0.03


@dataclass(frozen=True)
class Standing:
    """The default at one ratio and kind, beside the two ends and the best other policy."""

    default: Row
    full: Row
    reuse: Row | None
    best: Row | None
    """Of the other policies, none if there is no other."""

    @property
    def behind(self) -> bool:
        """Whether the best other is above by more than the interval, either one's: neither interval
        reaches the other's value."""
        if self.best is None:
            return False
        own, other = self.default, self.best
        if own["pgr"] is None or other["pgr"] is None:
            return bool(own["score"] < other["score"] - SCORE_MARGIN)
        high = own["pgr"] if own["pgr_high"] is None else own["pgr_high"]
        low = other["pgr"] if other["pgr_low"] is None else other["pgr_low"]
        return bool(high < other["pgr"] and own["pgr"] < low)


def reached_table(tables: Sequence[Sequence[Row]], policy: str, schedule: str) -> str:
    """One line for each prompt size, ratio and kind; empty where the default was not asked.

    ``tables`` holds the rows of each run; of those that asked the same, the first counts.
    """
    found: dict[tuple[object, ...], Standing] = {}
    for rows in tables:
        for one in standings(rows, policy, schedule):
            key = tuple(one.default[f] for f in ("n_chunks", "chunk_tokens", "ratio", "kind"))
            found.setdefault(key, one)
    if not found:
        return ""
    rows = [{**one.default, "standing": one} for one in found.values()]
    return markdown(
        [
            ("chunks", lambda row: f"{row['n_chunks']} × {row['chunk_tokens']}"),
            ("r", lambda row: f"{row['ratio']:.3g}"),
            ("charged", lambda row: f"{row['charged_ratio']:.3f}"),
            ("kind", lambda row: str(row["kind"])),
            ("n", lambda row: str(row["n"])),
            ("full", lambda row: _score(row["standing"].full)),
            ("reuse", lambda row: _score(row["standing"].reuse)),
            ("default", _score),
            ("PGR [95%]", pgr),
            ("best other", lambda row: _best(row["standing"].best)),
            ("behind", lambda row: "**yes**" if row["standing"].behind else "no"),
        ],
        rows,
    )


def standings(rows: Sequence[Row], policy: str, schedule: str) -> list[Standing]:
    """Of the default in ``rows``, encoded behind the prefix; by size, ratio and kind."""
    behind_prefix = [row for row in rows if row.get("encode_prefix") is not False]
    found = []
    for row in behind_prefix:
        if (row["policy"], row["schedule"]) != (policy, schedule):
            continue
        size = (row["n_chunks"], row["chunk_tokens"])
        of = [
            other
            for other in behind_prefix
            if other["kind"] == row["kind"] and (other["n_chunks"], other["chunk_tokens"]) == size
        ]
        full = next((other for other in of if other["policy"] == "full"), None)
        if full is not None:
            reuse = next((other for other in of if other["policy"] == "reuse"), None)
            found.append(Standing(row, full, reuse, _best_of(of, row)))
    order = {kind: i for i, kind in enumerate((ALL, *kinds_of(rows)))}
    return sorted(found, key=lambda one: (one.default["ratio"], order[one.default["kind"]]))


def _best_of(rows: Sequence[Row], default: Row) -> Row | None:
    others = [
        row
        for row in rows
        if row["policy"] not in (*UNSTEERED, default["policy"]) and _comparable(row, default)
    ]
    worth = "pgr" if default["pgr"] is not None else "score"
    return max(others, key=lambda row: row[worth] or 0.0, default=None)


def _comparable(row: Row, default: Row) -> bool:
    """At the same r, or at no more where no ratio steers the policy."""
    steered = bool(row["schedule"])
    return bool(row["ratio"] == default["ratio"] if steered else row["ratio"] <= default["ratio"])


def _score(row: Row | None) -> str:
    return NOTHING if row is None else f"{row['score']:.3f}"


def _best(row: Row | None) -> str:
    if row is None:
        return NOTHING
    value = f"score {row['score']:.3f}" if row["pgr"] is None else f"{row['pgr']:.2f}"
    named = f"{row['policy']}, {row['schedule']}" if row["schedule"] else row["policy"]
    return f"{named} {value}"
