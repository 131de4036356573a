"""Whether the default policy keeps what full prefill answers, held against every other policy, and
whether a calibrated schedule is worth its search, held against the fixed families.

Owns the judgement: by kind of question, at equal r, is another policy above by more than the interval
of their difference over the same questions? Rows are plain mappings, as ``blendrag eval --json`` prints
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blendrag.fusor.selection.schedule import CALIBRATED
from blendrag.lab.evaluation.bootstrap import Lead, paired_lead
from blendrag.lab.evaluation.tables import (
    ALL,
    NOTHING,
    UNSTEERED,
    Column,
    Row,
    kinds_of,
    markdown,
    pgr,
)

#: A lead this small is what rounding leaves of none.
LEAST_LEAD = 1e-9


@dataclass(frozen=True)
class Standing:
    """One way at one ratio and kind, beside the two ends and every other way it must not be behind."""

    own: Row
    full: Row
    reuse: Row | None
    others: tuple[Row, ...]
    """At a comparable cost; the best first."""

    @property
    def best(self) -> Row | None:
        """Of the others, if there are any."""
        return self.others[0] if self.others else None

    @property
    def ahead(self) -> tuple[Row, ...]:
        """The others that are above by more than the interval: the whole interval of the paired
        difference is above 0."""
        return tuple(
            other
            for other in self.others
            if (lead := self._lead(other)) is not None and lead.low > LEAST_LEAD
        )

    @property
    def is_known(self) -> bool:
        """Whether there are contexts enough to compare with all others."""
        return all(self._lead(other) is not None for other in self.others)

    def _lead(self, other: Row) -> Lead | None:
        return paired_lead(other.get("by_context", ()), self.own.get("by_context", ()))


def reached_table(tables: Sequence[Sequence[Row]], policy: str, schedule: str) -> str:
    """One line for each prompt size, ratio and kind; empty where the default was not asked.

    ``tables`` holds the rows of each run; of those that asked the same, the first counts.
    """
    return _table([standings(rows, policy, schedule) for rows in tables], "default")


def calibrated_table(tables: Sequence[Sequence[Row]]) -> str:
    """One line for each policy, prompt size, ratio and kind; empty where nothing calibrated was asked.

    Of runs that asked the same, the one that asked the most families counts.
    """
    found = [calibrated_standings(rows) for rows in tables]
    found.sort(key=lambda of: -max((len(one.others) for one in of), default=0))
    return _table(found, "calibrated")


def _table(tables: Sequence[Sequence[Standing]], name: str) -> str:
    found: dict[tuple[object, ...], Standing] = {}
    for one in (standing for table in tables for standing in table):
        fields = ("policy", "n_chunks", "chunk_tokens", "ratio", "kind")
        found.setdefault(tuple(one.own[field] for field in fields), one)
    if not found:
        return ""
    rows = [{**one.own, "standing": one} for one in found.values()]
    several = len({row["policy"] for row in rows}) > 1
    policy: list[Column] = [("policy", lambda row: str(row["policy"]))] if several else []
    return markdown(
        [
            *policy,
            ("chunks", lambda row: f"{row['n_chunks']} × {row['chunk_tokens']}"),
            ("r", lambda row: f"{row['ratio']:.3g}"),
            ("charged", lambda row: f"{row['charged_ratio']:.3f}"),
            ("kind", lambda row: str(row["kind"])),
            ("n", lambda row: str(row["n"])),
            ("full", lambda row: _score(row["standing"].full)),
            ("reuse", lambda row: _score(row["standing"].reuse)),
            (name, _score),
            ("PGR [95%]", lambda row: _kept(row["standing"])),
            ("best other", lambda row: _named(row["standing"].best)),
            ("behind", lambda row: _behind(row["standing"])),
        ],
        rows,
    )


def standings(rows: Sequence[Row], policy: str, schedule: str) -> list[Standing]:
    """Of the default in ``rows`` among the other policies; by ratio and kind."""
    return _standings(
        rows,
        lambda row: (row["policy"], row["schedule"]) == (policy, schedule),
        lambda row, own: row["policy"] != own["policy"] and _comparable(row, own),
    )


def calibrated_standings(rows: Sequence[Row]) -> list[Standing]:
    """Of every calibrated schedule among the others of its policy, at the same r; by ratio and kind."""
    return _standings(
        rows,
        lambda row: row["schedule"] == CALIBRATED,
        lambda row, own: (
            (row["policy"], row["ratio"]) == (own["policy"], own["ratio"])
            and row["schedule"] != CALIBRATED
        ),
    )


def _standings(
    rows: Sequence[Row], is_own: Callable[[Row], bool], is_other: Callable[[Row, Row], bool]
) -> list[Standing]:
    """Chunks encoded behind the prefix, prompts of one size, questions of one kind."""
    behind_prefix = [row for row in rows if row.get("encode_prefix") is not False]
    found = []
    for own in filter(is_own, behind_prefix):
        alike = [row for row in behind_prefix if _asked(row) == _asked(own)]
        full = next((row for row in alike if row["policy"] == "full"), None)
        if full is not None:
            reuse = next((row for row in alike if row["policy"] == "reuse"), None)
            others = [row for row in alike if row["policy"] not in UNSTEERED and is_other(row, own)]
            others.sort(key=lambda row: -row["score"])
            found.append(Standing(own, full, reuse, tuple(others)))
    order = {kind: i for i, kind in enumerate((ALL, *kinds_of(rows)))}
    return sorted(found, key=lambda one: (one.own["ratio"], order[one.own["kind"]]))


def _asked(row: Row) -> tuple[object, ...]:
    return row["kind"], row["n_chunks"], row["chunk_tokens"]


def _comparable(row: Row, default: Row) -> bool:
    """At the same r, or at no more where no ratio steers the policy."""
    steered = bool(row["schedule"])
    return bool(row["ratio"] == default["ratio"] if steered else row["ratio"] <= default["ratio"])


def _score(row: Row | None) -> str:
    return NOTHING if row is None else f"{row['score']:.3f}"


def _kept(standing: Standing) -> str:
    """PGR; where it is undefined, how far the score is from full prefill's."""
    if standing.own["pgr"] is not None:
        return pgr(standing.own)
    return f"score {standing.own['score'] - standing.full['score']:+.3f}"


def _behind(standing: Standing) -> str:
    if standing.ahead:
        return f"**{'; '.join(_named(row) for row in standing.ahead)}**"
    return "no" if standing.is_known else NOTHING


def _named(row: Row | None) -> str:
    if row is None:
        return NOTHING
    value = f"score {row['score']:.3f}" if row["pgr"] is None else f"{row['pgr']:.2f}"
    named = f"{row['policy']}, {row['schedule']}" if row["schedule"] else row["policy"]
    return f"{named} {value} (charged {row['charged_ratio']:.3f})"
