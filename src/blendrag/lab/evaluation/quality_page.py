"""``docs/quality.md`` and its pictures: ``make arena``.

Owns the page: which run becomes which tables and figures, and what is said about the default policy.
It runs what :mod:`blendrag.lab.evaluation.runs` lists, keeps what was printed beside the page, and writes
the page from the kept files alone, so that equal files give an equal page.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from blendrag.config import DEFAULT_POLICY, DEFAULT_SCHEDULE
from blendrag.errors import BlendragError
from blendrag.lab.evaluation.calibration_section import calibration_section
from blendrag.lab.evaluation.deviation_section import deviation_section
from blendrag.lab.evaluation.page import FOLDER, Draw, folded, head, picture, plots_module
from blendrag.lab.evaluation.reached import calibrated_table, reached_table
from blendrag.lab.evaluation.runs import (
    CALIBRATION,
    DEVIATIONS,
    RUNS,
    Result,
    Run,
    execute,
    load_result,
    save_result,
    shell,
)
from blendrag.lab.evaluation.tables import ALL, Row, kind_table, kinds_of, way_table

PAGE = "quality.md"
#: Written by hand, beside the results: what was measured on models that this repository does not have.
REAL_MODELS = "real-models.md"

INTRODUCTION = """# Quality

What selective recompute keeps of a full prefill's answers, by the embedded model on generated documents
it never saw. `make arena` runs every command on this page and writes it again; the numbers are kept in
[`{folder}/`]({folder}/) as JSON.

**PGR** = (score − no context) / (full − no context): 0 answers as if there were no context, 1 as a full
prefill does, with the 95% interval of a paired bootstrap over contexts; {nothing} where full prefill gains
nothing over no context. **Score** is the share of answers that are right. **r** is the mean share of chunk
tokens recomputed in layers 1…L−1; **charged** counts layer 0 too. **KL** is that of the first token from
full prefill's, in nats; **agrees** the share of answer tokens as full prefill gave them, up to the first
difference. **TTFT** is the median time to first token with KV read from disk, on shared CPU cores and for a
model so small that fixed costs hide most of what is saved: compare it within a run only
([performance](performance.md) has bigger shapes).
"""

REACHED = """## What the default reaches

Policy `{policy}`, schedule `{schedule}`. Where PGR is undefined, the score's distance from full prefill's
stands in its place. *Best other* is the policy with the highest score at the same r (of a policy that no
ratio steers: at no more); *behind* names every policy that is above by more than the interval: over the
same questions, the 95% interval of the paired difference between the two lies above 0.
"""

CALIBRATED_HELD = """## What calibration is worth

Schedule `calibrated` among the fixed families of the same policy at the same r, on questions that it was not
calibrated on; read as the table above.
"""


def write_page(
    directory: Path,
    results: Mapping[str, Result],
    runs: Sequence[Run] = RUNS,
    policy: str = DEFAULT_POLICY,
    schedule: str = DEFAULT_SCHEDULE,
) -> Path:
    """The page and its pictures in ``directory``, from ``results`` by the names of their runs.

    Runs without result are left out. Raises :class:`InvalidInputError` where matplotlib is missing.
    """
    real = directory / FOLDER / REAL_MODELS
    parts = [INTRODUCTION.format(folder=FOLDER, nothing="–")]
    parts += [real.read_text(encoding="utf-8")] if real.is_file() else []
    there = [run for run in runs if run.name in results]
    tables = [results[run.name].rows for run in there]
    if table := reached_table(tables, policy, schedule):
        parts.append(REACHED.format(policy=policy, schedule=schedule) + "\n" + table + "\n")
    if table := calibrated_table(tables):
        parts.append(CALIBRATED_HELD + "\n" + table + "\n")
    if CALIBRATION.name in results:
        parts.append(calibration_section(CALIBRATION, results[CALIBRATION.name]))
    parts += [_section(run, results[run.name], directory / FOLDER) for run in there]
    if DEVIATIONS.name in results:
        parts.append(deviation_section(DEVIATIONS, results[DEVIATIONS.name], directory / FOLDER))
    page = directory / PAGE
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(parts), encoding="utf-8")
    return page


# -- sections -----------------------------------------------------------------------------------


def _section(run: Run, result: Result, folder: Path) -> str:
    rows = result.rows
    parts = [head(run, result), _size(rows), way_table(rows)]
    parts += [
        picture(folder, f"{run.name}-{name}", text, draw, rows)
        for name, text, draw in _figures(rows)
    ]
    kinds = kinds_of(rows)
    if len(kinds) > 1:
        parts += ["PGR by kind of question:", kind_table(rows)]
        parts += [folded(kind, way_table(rows, kind)) for kind in kinds]
    return "\n\n".join(parts) + "\n"


def _figures(rows: Sequence[Row]) -> list[tuple[str, str, Draw]]:
    """(name, caption, how to draw) of what these rows can show."""
    plots = plots_module()
    kinds = [kind for kind in (ALL, *kinds_of(rows)) if _has_pgr(rows, kind)]
    if not kinds:
        return []
    if len({(row["n_chunks"], row["chunk_tokens"]) for row in rows}) > 1:
        text = "Over number and length of chunks (figure 15)."
        return [("size", text, plots.quality_against_chunks)]
    steered = [row for row in rows if row["schedule"]]
    ratios, schedules = ({row[field] for row in steered} for field in ("ratio", "schedule"))
    if len(schedules) > 2 and len(ratios) == 1:
        return [("shapes", "Quality by schedule.", plots.quality_by_schedule)]
    found: list[tuple[str, str, Draw]] = [
        ("ttft", "Quality against time to first token (figures 12 and 13).",
         plots.quality_against_ttft)
    ]  # fmt: skip
    if len(ratios) > 1:
        found += [
            ("ratio", "Quality against the recompute ratio, by kind of question (figure 16).",
             lambda of: plots.quality_against_ratio(of, kinds)),
            ("cost", "The same against the charged ratio.", plots.quality_against_cost),
        ]  # fmt: skip
    return found


def _has_pgr(rows: Sequence[Row], kind: str) -> bool:
    return any(row["pgr"] is not None for row in rows if row["kind"] == kind)


def _size(rows: Sequence[Row]) -> str:
    """Questions asked, by kind, summed over different prompts."""
    asked: dict[str, dict[tuple[int, int], int]] = {}
    for row in rows:
        asked.setdefault(row["kind"], {})[row["n_chunks"], row["chunk_tokens"]] = row["n"]
    counts = {kind: sum(sizes.values()) for kind, sizes in asked.items()}
    kinds = ", ".join(f"{counts[kind]} {kind}" for kind in kinds_of(rows))
    return f"{counts[ALL]} questions{f': {kinds}' if kinds else ''}."


# -- the command --------------------------------------------------------------------------------


def collect(
    directory: Path, runs: Sequence[Run], keep: bool, say: Callable[[str], None]
) -> dict[str, Result]:
    """Results of ``runs``, each kept in the folder; with ``keep`` those already there of the same
    commands are not asked for again."""
    found = {}
    for run in runs:
        path = directory / FOLDER / f"{run.name}.json"
        if not (keep and _is_of(path, run)):
            save_result(execute(run, say), path)
        found[run.name] = load_result(path)
    return found


def _is_of(path: Path, run: Run) -> bool:
    return path.is_file() and load_result(path).commands == tuple(map(shell, run.commands))


def main(arguments: Sequence[str] | None = None) -> None:
    """Exit status 2 and one sentence for what does not work."""
    parser = argparse.ArgumentParser(
        prog="python -m blendrag.lab.evaluation.quality_page",
        description="Run the arena and write docs/quality.md with its pictures.",
    )
    parser.add_argument("--out", type=Path, default=Path("docs"), help="where the page goes")
    parser.add_argument("--keep", action="store_true", help="ask again only what has no result")
    args = parser.parse_args(arguments)

    def say(text: str) -> None:
        sys.stderr.write(f"{text}\n")

    try:
        plots_module()  # said before an hour of running, not after
        page = write_page(
            args.out, collect(args.out, (CALIBRATION, *RUNS, DEVIATIONS), args.keep, say)
        )
    except KeyboardInterrupt:
        say("interrupted: finished runs are kept; repeat with --keep to go on")
        sys.exit(130)
    except BlendragError as error:
        say(f"error: {error}")
        sys.exit(2)
    say(f"wrote {page}")


if __name__ == "__main__":
    main()
