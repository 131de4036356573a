"""The tables and pictures of docs/quality.md: ``python -m blendrag.lab.evaluation.quality_page``.

Measures what :mod:`blendrag.lab.evaluation.runs` lists, keeps the results in its folder as JSON, and writes
the page's regions from the kept results alone; ``--page-only`` measures nothing. Equal results give an equal
page.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from blendrag.cli.plots import require_matplotlib, write_png
from blendrag.config import DEFAULT_POLICY, DEFAULT_SCHEDULE
from blendrag.errors import BlendragError
from blendrag.fusor.selection.schedule import CALIBRATED
from blendrag.lab import plots
from blendrag.lab.evaluation.deviation import DeviationReport
from blendrag.lab.evaluation.rows import ALL, Row, certain_lead
from blendrag.lab.evaluation.runs import FAMILY, RATIO, RUNS, Result, collect, load_result
from blendrag.lab.evaluation.ways import CHAINS, FULL, NONE, PREFIX, REUSE
from blendrag.lab.pages import write_regions
from blendrag.lab.tables import NOTHING, Column, interval, number, table

PAGE = "quality.md"
#: Ways that compute chunks instead of loading them, at least all but the first.
COMPUTING = (FULL, NONE, PREFIX, *CHAINS)


def write_page(page: Path, results: Mapping[str, Result]) -> None:
    """Write the regions of ``page`` and the pictures in its folder, from results by name of their runs.

    Raises :class:`InvalidInputError` if the page cannot be read.
    """
    calibrations = [one for one in results["calibration"].printed if "weights" in one]
    report = TypeAdapter(DeviationReport).validate_python(results["deviations"].printed[0])
    short, long, schedules, prefix, chunks = (
        results[name].rows for name in ("policies", "long", "schedules", "prefix", "chunks")
    )
    texts = {
        "policies": policies_text(short, long),
        "default": default_text(short, long),
        "schedules": schedules_text(schedules, calibrations, prefix),
        "chunks": chunks_text(chunks),
        "deviations": deviations_text(report),
    }
    kinds = list(dict.fromkeys(row.kind for row in short if row.pgr is not None))
    figures = {
        "policies-ratio": plots.quality_against_ratio(short, kinds),
        "long-ttft": plots.quality_against_ttft(long),
        "schedules-shapes": plots.quality_by_schedule(schedules),
        "chunks-size": plots.quality_against_chunks(chunks),
        "deviations-ratio": plots.deviation_against_ratio(report),
        "deviations-distribution": plots.deviation_distribution(report),
        "deviations-correlation": plots.layer_correlation(report),
    }
    write_regions(page, texts)
    folder = page.with_suffix("")
    folder.mkdir(exist_ok=True)
    for name, figure in figures.items():
        write_png(figure, folder / f"{name}.png")


def _pgr(row: Row | None) -> str:
    return NOTHING if row is None else interval(row.pgr, row.pgr_low, row.pgr_high)


def _whole(rows: Sequence[Row]) -> list[Row]:
    """Rows over all kinds of question."""
    return [row for row in rows if row.kind == ALL]


# -- policies -------------------------------------------------------------------------------------


def policies_text(short: Sequence[Row], long: Sequence[Row]) -> str:
    """Every policy at one ratio, over short and over long chunks."""
    of_long = {_name(row): row for row in filter(_is_compared, long)}
    columns: list[Column] = [
        ("policy", _name),
        ("charged", lambda row: f"{row.charged_ratio:.3f}"),
        (f"{short[0].chunk_tokens} tokens: PGR [95%]", _pgr),
        ("KL", lambda row: number(row.kl, ".2g")),
        ("agrees", lambda row: number(row.agreement, ".2f")),
        ("TTFT ms", lambda row: f"{row.ttft_ms:.0f}"),
        (f"{long[0].chunk_tokens} tokens: PGR [95%]", lambda row: _pgr(of_long[_name(row)])),
        ("KL", lambda row: number(of_long[_name(row)].kl, ".2g")),
        ("TTFT ms", lambda row: f"{of_long[_name(row)].ttft_ms:.0f}"),
    ]
    compared = [row for row in short if _is_compared(row) and _name(row) in of_long]
    sizes = "; ".join(
        f"{rows[0].n_chunks} chunks of at most {rows[0].chunk_tokens} tokens: {_questions(rows)}"
        for rows in (short, long)
    )
    return f"r = {RATIO}, schedule `{FAMILY}`. {sizes}.\n\n{table(columns, compared).markdown()}"


def _is_compared(row: Row) -> bool:
    if row.kind != ALL or row.policy == NONE or row.schedule == CALIBRATED:
        return False
    return not row.has_budget or row.ratio == float(RATIO)


def _name(row: Row) -> str:
    """Without the number of tokens, which differs between short and long chunks."""
    return row.policy.partition("(")[0]


def _questions(rows: Sequence[Row]) -> str:
    """``200 questions (14 comparison, 68 coreference, …)``."""
    counts = {row.kind: row.n for row in rows}
    kinds = ", ".join(f"{n} {kind}" for kind, n in counts.items() if kind != ALL)
    return f"{counts[ALL]} questions ({kinds})"


# -- the default ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Standing:
    """A way at one ratio and kind, and the ways it must not be behind."""

    own: Row
    full: Row
    reuse: Row | None
    others: Sequence[Row]
    """The best first."""

    @property
    def ahead(self) -> list[Row]:
        """The others that score above by more than the interval of the paired difference."""
        return [other for other in self.others if certain_lead(other, self.own)]


def standings(
    rows: Sequence[Row], is_own: Callable[[Row], bool], is_other: Callable[[Row, Row], bool]
) -> list[Standing]:
    """Standings of the rows that are ``is_own`` among those that are ``is_other(row, own)``."""
    found = []
    stored = [row for row in rows if row.encode_prefix is not False]
    for own in filter(is_own, stored):
        alike = [row for row in stored if (row.kind, row.size) == (own.kind, own.size)]
        by_policy = {row.policy: row for row in alike}
        others = [row for row in alike if row.policy not in COMPUTING and is_other(row, own)]
        others.sort(key=lambda row: -row.score)
        found.append(Standing(own, by_policy[FULL], by_policy.get(REUSE), others))
    return found


def default_standings(rows: Sequence[Row], policy: str, schedule: str) -> list[Standing]:
    """Of a policy and schedule among the other policies, at the same ratio or, without one, at no more."""

    def is_other(row: Row, own: Row) -> bool:
        same_cost = row.ratio == own.ratio if row.has_budget else row.ratio <= own.ratio
        return row.policy != policy and same_cost

    return standings(rows, lambda row: (row.policy, row.schedule) == (policy, schedule), is_other)


def calibrated_standings(rows: Sequence[Row]) -> list[Standing]:
    """Of each policy's calibrated schedule among its fixed families."""

    def is_other(row: Row, own: Row) -> bool:
        return (row.policy, row.ratio) == (own.policy, own.ratio) and row.schedule != CALIBRATED

    return standings(rows, lambda row: row.schedule == CALIBRATED, is_other)


def default_text(short: Sequence[Row], long: Sequence[Row]) -> str:
    """The default among the other policies: every ratio, and at one of them every kind of question."""
    policy, schedule = DEFAULT_POLICY, DEFAULT_SCHEDULE
    found = [
        *default_standings(short, policy, schedule),
        *default_standings(_whole(long), policy, schedule),
    ]
    shown = [one for one in found if one.own.kind == ALL or one.own.ratio == float(RATIO)]
    shown.sort(key=lambda one: (one.own.chunk_tokens, one.own.ratio))
    columns: list[Column] = [
        ("chunks", lambda one: _size(one.own)),
        ("r", lambda one: f"{one.own.ratio:.3g}"),
        ("kind", lambda one: one.own.kind),
        ("n", lambda one: str(one.own.n)),
        ("full", lambda one: f"{one.full.score:.3f}"),
        ("reuse", lambda one: f"{one.reuse.score:.3f}" if one.reuse else NOTHING),
        (f"{policy}, {schedule}", lambda one: f"{one.own.score:.3f}"),
        ("PGR [95%]", lambda one: _pgr(one.own)),
        ("best other", lambda one: _scored(one.others[0]) if one.others else NOTHING),
        ("behind", lambda one: "; ".join(map(_scored, one.ahead)) or "no"),
    ]
    return table(columns, shown).markdown()


def _size(row: Row) -> str:
    return f"{row.n_chunks} × {row.chunk_tokens}"


def _scored(row: Row) -> str:
    named = f"{row.policy}, {row.schedule}" if row.schedule else row.policy
    return f"{named} {row.score:.3f}"


# -- schedules, prefix, sizes ---------------------------------------------------------------------


def schedules_text(
    rows: Sequence[Row], calibrations: Sequence[Mapping[str, Any]], prefix: Sequence[Row]
) -> str:
    """PGR by schedule and policy, whether a fixed family is above the calibrated schedule, and what
    encoding behind the prefix changes."""
    above = [row for one in calibrated_standings(_whole(rows)) for row in one.ahead]
    found = "; ".join(
        f"`{one['policy']}` {one['deviation']:.3g} (best family {one['family_deviation']:.3g}, nothing "
        f"recomputed {one['reuse_deviation']:.3g})"
        for one in calibrations
    )
    pgr = {(row.policy, row.encode_prefix): number(row.pgr, ".2f") for row in _whole(prefix)}
    pairs = (
        f"`{policy}` {pgr[policy, True]} → {pgr[policy, on]}" for policy, on in pgr if on is False
    )
    return (
        f"{_by_policy(rows, ('schedule', lambda row: row.schedule))}\n\n"
        f"Fixed families above `{CALIBRATED}` by more than the interval of the paired difference: "
        f"{', '.join(f'`{row.policy}, {row.schedule}`' for row in above) or 'none'}. Mean KL on the "
        f"calibration's own sample of {calibrations[0]['prompts']} prompts: {found}. PGR of chunks encoded "
        f"behind the corpus's prefix → behind nothing, schedule `{FAMILY}`: {', '.join(pairs)}."
    )


def chunks_text(rows: Sequence[Row]) -> str:
    """PGR by size of the prompt and policy."""
    full = {row.size: row for row in _whole(rows) if row.policy == FULL}
    return _by_policy(
        rows,
        ("chunks", _size),
        ("questions", lambda row: str(row.n)),
        ("score of full", lambda row: f"{full[row.size].score:.3f}"),
    )


def _by_policy(rows: Sequence[Row], *names: Column) -> str:
    """PGR: a line for each value of the first column of ``names``, a column for each policy."""
    by = names[0][1]
    shown = [row for row in _whole(rows) if row.policy not in COMPUTING]
    found = {(by(row), row.policy): row for row in shown}
    lines = list({by(row): row for row in shown}.values())

    def pgr_of(policy: str) -> Column:
        return policy, lambda row: _pgr(found.get((by(row), policy)))

    policies = dict.fromkeys(row.policy for row in shown)
    return table([*names, *map(pgr_of, policies)], lines).markdown()


def deviations_text(report: DeviationReport) -> str:
    """Attention deviation by policy and ratio."""
    found = {(point.policy, point.ratio): point.attention for point in report.points}

    def at(ratio: float) -> Column:
        return f"r = {ratio:.3g}", lambda policy: number(found.get((policy, ratio)), ".3f")

    columns: list[Column] = [("policy", str), *map(at, dict.fromkeys(r for _, r in found))]
    shown = table(columns, dict.fromkeys(policy for policy, _ in found)).markdown()
    return (
        f"{report.prompts} prompts, {report.tokens} chunk tokens, schedule `{FAMILY}`.\n\n{shown}"
    )


# -- the command ----------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the page. Exits with status 2 and one sentence on an error."""
    parser = argparse.ArgumentParser(
        prog="python -m blendrag.lab.evaluation.quality_page",
        description="Run the arena and write docs/quality.md with its pictures.",
    )
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder of the page")
    parser.add_argument("--keep", action="store_true", help="measure only what has no result")
    parser.add_argument(
        "--page-only", action="store_true", help="measure nothing; write the kept results"
    )
    args = parser.parse_args(arguments)

    def say(text: str) -> None:
        sys.stderr.write(f"{text}\n")

    page = args.out / PAGE
    folder = page.with_suffix("")
    try:
        require_matplotlib("pictures")  # before an hour of measuring
        if args.page_only:
            results = {name: load_result(folder / f"{name}.json") for name in RUNS}
        else:
            results = collect(folder, RUNS, args.keep, say)
        write_page(page, results)
    except KeyboardInterrupt:
        say("interrupted: finished runs are kept; repeat with --keep to continue")
        sys.exit(130)
    except BlendragError as error:
        say(f"error: {error}")
        sys.exit(2)
    say(f"wrote {page}")


if __name__ == "__main__":
    main()
