"""The tables and pictures of docs/quality.md: ``python -m blendrag.lab.evaluation.quality_page``.

Measures what :mod:`blendrag.lab.evaluation.runs` lists, keeps the results beside the page as JSON, and writes
the page's regions from the kept results alone; ``--page-only`` measures nothing. Equal results give an equal
page.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from blendrag.cli.plots import require_matplotlib
from blendrag.config import DEFAULT_POLICY, DEFAULT_SCHEDULE
from blendrag.errors import BlendragError
from blendrag.fusor.selection.schedule import CALIBRATED
from blendrag.lab import plots
from blendrag.lab.evaluation.deviation import DeviationReport
from blendrag.lab.evaluation.rows import ALL, Row, certain_lead
from blendrag.lab.evaluation.runs import FAMILY, RATIO, RUNS, Result, collect, load_result
from blendrag.lab.evaluation.ways import CHAINS, FULL, NONE, PREFIX, REUSE
from blendrag.lab.pages import picture, write_regions
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
        "policies": policies_text(short, long, page),
        "default": default_text(short, long),
        "schedules": schedules_text(schedules, calibrations, prefix, page),
        "chunks": chunks_text(chunks, page),
        "deviations": deviations_text(report, page),
    }
    write_regions(page, texts)


def _join(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)


def _pgr(row: Row | None) -> str:
    """PGR with its interval; the score if PGR is undefined."""
    if row is None:
        return NOTHING
    if row.pgr is None:
        return f"score {row.score:.3f}"
    return interval(row.pgr, row.pgr_low, row.pgr_high)


def _questions(rows: Sequence[Row]) -> str:
    """``200 questions (14 comparison, 68 coreference, …)``."""
    counts = {row.kind: row.n for row in rows}
    kinds = ", ".join(f"{n} {kind}" for kind, n in counts.items() if kind != ALL)
    return f"{counts[ALL]} questions ({kinds})"


# -- policies -------------------------------------------------------------------------------------


def policies_text(short: Sequence[Row], long: Sequence[Row], page: Path) -> str:
    """Every policy at one ratio, over short and over long chunks, and quality against ratio and TTFT."""
    compared = {_name(row): row for row in short if _is_compared(row)}
    others = {_name(row): row for row in long if _is_compared(row)}
    size, other_size = (f"{rows[0].chunk_tokens} tokens: " for rows in (short, long))
    of_long: Callable[[Row], Row | None] = lambda row: others.get(_name(row))  # noqa: E731
    columns: list[Column] = [
        ("policy", _name),
        ("charged", lambda row: f"{row.charged_ratio:.3f}"),
        (f"{size}PGR [95%]", _pgr),
        ("KL", lambda row: number(row.kl, ".2g")),
        ("agrees", lambda row: number(row.agreement, ".2f")),
        ("TTFT ms", lambda row: f"{row.ttft_ms:.0f}"),
        (f"{other_size}PGR [95%]", lambda row: _pgr(of_long(row))),
        ("KL", lambda row: number(other.kl if (other := of_long(row)) else None, ".2g")),
        ("TTFT ms", lambda row: number(other.ttft_ms if (other := of_long(row)) else None, ".0f")),
    ]
    kinds = [
        ALL,
        *dict.fromkeys(row.kind for row in short if row.kind != ALL and row.pgr is not None),
    ]
    return _join(
        f"r = {RATIO}, schedule `{FAMILY}`. 6 chunks of at most 64 tokens: {_questions(short)}. "
        f"6 of at most 512: {_questions(long)}.",
        table(columns, list(compared.values())).markdown(),
        picture(
            plots.quality_against_ratio(short, kinds),
            page,
            "policies-ratio",
            "PGR against the recompute ratio by kind of question, chunks of at most 64 tokens",
        )
        + "\n"
        + picture(
            plots.quality_against_ttft(long),
            page,
            "long-ttft",
            "PGR against time to first token, chunks of at most 512 tokens",
        ),
    )


def _is_compared(row: Row) -> bool:
    if row.kind != ALL or row.policy == NONE or row.schedule == CALIBRATED:
        return False
    return not row.has_budget or row.ratio == float(RATIO)


def _name(row: Row) -> str:
    """Without the number of tokens, which is another for long chunks."""
    return row.policy.partition("(")[0]


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
        alike = [row for row in stored if _subject(row) == _subject(own)]
        by_policy = {row.policy: row for row in alike}
        others = [row for row in alike if row.policy not in COMPUTING and is_other(row, own)]
        others.sort(key=lambda row: -row.score)
        found.append(Standing(own, by_policy[FULL], by_policy.get(REUSE), others))
    return found


def _subject(row: Row) -> tuple[object, ...]:
    return row.kind, row.n_chunks, row.chunk_tokens


def _same_cost(row: Row, own: Row) -> bool:
    """At the same ratio, or at no more if no ratio steers the policy."""
    return row.ratio == own.ratio if row.has_budget else row.ratio <= own.ratio


def default_standings(rows: Sequence[Row], policy: str, schedule: str) -> list[Standing]:
    """Of a policy and schedule among the other policies."""
    return standings(
        rows,
        lambda row: (row.policy, row.schedule) == (policy, schedule),
        lambda row, own: row.policy != policy and _same_cost(row, own),
    )


def calibrated_standings(rows: Sequence[Row]) -> list[Standing]:
    """Of each policy's calibrated schedule among its fixed families."""
    return standings(
        rows,
        lambda row: row.schedule == CALIBRATED,
        lambda row, own: (
            row.policy == own.policy and row.ratio == own.ratio and row.schedule != CALIBRATED
        ),
    )


def default_text(
    short: Sequence[Row],
    long: Sequence[Row],
    policy: str = DEFAULT_POLICY,
    schedule: str = DEFAULT_SCHEDULE,
) -> str:
    """The default among the other policies: every ratio, and at one of them every kind of question."""
    found = [
        *default_standings(short, policy, schedule),
        *(one for one in default_standings(long, policy, schedule) if one.own.kind == ALL),
    ]
    shown = [one for one in found if one.own.kind == ALL or one.own.ratio == float(RATIO)]
    shown.sort(key=lambda one: (one.own.chunk_tokens, one.own.ratio))
    columns: list[Column] = [
        ("chunks", lambda one: f"{one.own.n_chunks} × {one.own.chunk_tokens}"),
        ("r", lambda one: f"{one.own.ratio:.3g}"),
        ("kind", lambda one: one.own.kind),
        ("n", lambda one: str(one.own.n)),
        ("full", lambda one: f"{one.full.score:.3f}"),
        ("reuse", lambda one: f"{one.reuse.score:.3f}" if one.reuse else NOTHING),
        (f"{policy}, {schedule}", lambda one: f"{one.own.score:.3f}"),
        ("PGR [95%]", lambda one: NOTHING if one.own.pgr is None else _pgr(one.own)),
        ("best other", lambda one: _scored(one.others[0]) if one.others else NOTHING),
        ("behind", lambda one: "; ".join(map(_scored, one.ahead)) or "no"),
    ]
    return table(columns, shown).markdown()


def _scored(row: Row) -> str:
    named = f"{row.policy}, {row.schedule}" if row.schedule else row.policy
    return f"{named} {row.score:.3f}"


# -- schedules, prefix, sizes ---------------------------------------------------------------------


def schedules_text(
    rows: Sequence[Row],
    calibrations: Sequence[Mapping[str, object]],
    prefix_rows: Sequence[Row],
    page: Path,
) -> str:
    """PGR by schedule and policy, whether a fixed family is above the calibrated schedule, and what
    encoding behind the prefix changes."""
    whole = [row for row in rows if row.kind == ALL]
    ahead = [
        f"`{row.policy}, {row.schedule}`"
        for one in calibrated_standings(whole)
        for row in one.ahead
    ]
    found = "; ".join(
        f"`{one['policy']}` {one['deviation']:.3g} (best family {one['family_deviation']:.3g}, nothing "
        f"recomputed {one['reuse_deviation']:.3g})"
        for one in calibrations
    )
    return _join(
        f"r = {RATIO}, 6 chunks of at most 64 tokens, {_questions(rows)}. PGR [95%]:",
        _by_policy(whole, ("schedule", lambda row: row.schedule)),
        f"Fixed families above `{CALIBRATED}` by more than the interval of the paired difference: "
        f"{', '.join(ahead) or 'none'}. Mean KL on the calibration's own sample of "
        f"{calibrations[0]['prompts']} prompts: {found}. {_prefix_text(prefix_rows)}",
        picture(
            plots.quality_by_schedule(rows), page, "schedules-shapes", "PGR by schedule and policy"
        ),
    )


def _prefix_text(rows: Sequence[Row]) -> str:
    """PGR by policy with chunks encoded behind the prefix, and behind nothing."""
    whole = [row for row in rows if row.kind == ALL and row.encode_prefix is not None]
    found = {(row.policy, row.encode_prefix): row for row in whole}
    pairs = (
        f"`{policy}` {number(found[policy, True].pgr, '.2f')} → {number(found[policy, False].pgr, '.2f')}"
        for policy in dict.fromkeys(row.policy for row in whole)
    )
    return (
        "PGR of chunks encoded behind the corpus's prefix → behind nothing, same questions, schedule "
        f"`{FAMILY}`: {', '.join(pairs)}."
    )


def chunks_text(rows: Sequence[Row], page: Path) -> str:
    """PGR by size of the prompt and policy."""
    whole = [row for row in rows if row.kind == ALL]
    full = {_subject(row): row for row in whole if row.policy == FULL}
    return _join(
        f"r = {RATIO}, schedule `{FAMILY}`. PGR [95%]:",
        _by_policy(
            [row for row in whole if row.policy not in COMPUTING],
            ("chunks", lambda row: f"{row.n_chunks} × {row.chunk_tokens}"),
            ("questions", lambda row: str(row.n)),
            ("score of full", lambda row: f"{full[_subject(row)].score:.3f}"),
        ),
        picture(
            plots.quality_against_chunks(rows),
            page,
            "chunks-size",
            "PGR and TTFT over the number and the length of chunks",
        ),
    )


def _by_policy(rows: Sequence[Row], *names: Column) -> str:
    """PGR: a line for each value of the first column of ``names``, a column for each policy."""
    by = names[0][1]
    shown = [row for row in rows if row.policy not in COMPUTING]
    found = {(by(row), row.policy): row for row in shown}
    first = list({by(row): row for row in reversed(shown)}.values())[::-1]

    def pgr_of(policy: str) -> Column:
        return policy, lambda row: _pgr(found.get((by(row), policy)))

    policies = dict.fromkeys(row.policy for row in shown)
    return table([*names, *map(pgr_of, policies)], first).markdown()


# -- deviations -----------------------------------------------------------------------------------


def deviations_text(report: DeviationReport, page: Path) -> str:
    """Attention deviation by policy and ratio; figures 6 to 8 of CacheBlend."""
    ratios = dict.fromkeys(point.ratio for point in report.points)
    found = {(point.policy, point.ratio): point.attention for point in report.points}

    def at(ratio: float) -> Column:
        return f"r = {ratio:.3g}", lambda policy: number(found.get((policy, ratio)), ".3f")

    policies = dict.fromkeys(point.policy for point in report.points)
    columns: list[Column] = [("policy", str), *map(at, ratios)]
    figures = (
        ("deviations-ratio", "Attention deviation by ratio (figure 6 of CacheBlend)",
         plots.deviation_against_ratio),
        ("deviations-distribution", "KV deviation of stored KV over the tokens (figure 7)",
         plots.deviation_distribution),
        ("deviations-correlation", "Rank correlation of KV deviation between layers (figure 8)",
         plots.layer_correlation),
    )  # fmt: skip
    return _join(
        f"{report.prompts} prompts, {report.tokens} chunk tokens, schedule `{FAMILY}`.",
        table(columns, list(policies)).markdown(),
        "\n".join(picture(draw(report), page, name, text) for name, text, draw in figures),
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
