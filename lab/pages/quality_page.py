"""The tables and pictures of docs/quality.md: ``python -m lab.pages.quality_page``.

Runs the commands of :data:`RUNS`, which can be repeated in a shell, keeps what they printed as JSON in the
page's folder, and writes the page's regions from that alone. Equal results give an equal page.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter

from blendrag.cli import interrupt
from blendrag.cli.lifecycle import DONE, FAILED, begin, reporting
from blendrag.cli.output import say
from blendrag.config import DEFAULT_SCHEDULE
from blendrag.errors import BlendragError, InvalidInputError
from blendrag_lab.evaluation.deviation import DeviationReport
from blendrag_lab.evaluation.pretrained import (
    ByTask,
    fidelities,
    means_of_models,
    pretrained_runs,
    pretrained_text,
    stand_ins,
)
from blendrag_lab.evaluation.rows import ALL, ArenaRow, kept_by
from blendrag_lab.evaluation.scoring import Kept
from blendrag_lab.evaluation.ways import NONE
from blendrag_lab.plots import write_png
from blendrag_lab.tables import NOTHING, Column, interval, number, table
from lab.pages import quality_plots as plots
from lab.pages.regions import write_regions
from lab.pages.schema_page import schema_runs, schemas_text
from lab.pages.writers_page import (
    WRITERS,
    frontiers,
    model_of,
    writer_runs,
    writers_text,
)

PAGE = "quality.md"
#: Folder of the results of pretrained models, in the page's folder.
PRETRAINED = "pretrained"
#: Folder of the results with writers, in the page's folder.
WITH_WRITERS = "writers"
#: In the page's folder, a page on prompt schemas and the folder of its results.
SCHEMAS = "schemas"
#: Nothing was trained or chosen on this seed.
SEED = 2027
#: The ratio at which policies are compared.
RATIO = "0.05"
#: The policies that are compared in every schedule.
TUNED = "hkvd,query,blend"
SCHEDULES = "constant,linear,geometric:0.8,geometric:0.5,first:2,first:4,first:6"


@dataclass(frozen=True)
class Result:
    """What the commands of a run printed, in order."""

    commands: tuple[str, ...]
    printed: tuple[Any, ...]

    @property
    def rows(self) -> list[ArenaRow]:
        """Rows of all commands of the arena; one that several of them printed is taken once."""
        found: dict[Any, ArenaRow] = {}
        for row in (ArenaRow(**fields) for rows in self.printed for fields in rows):
            found.setdefault((*row.way, row.kind), row)
        return list(found.values())


def write_page(
    page: Path,
    results: Mapping[str, Result],
    measured: Mapping[str, ByTask],
    written: Mapping[str, ByTask],
) -> None:
    """Write the regions of ``page`` and the pictures in its folder, from results by name of their runs."""
    report = TypeAdapter(DeviationReport).validate_python(results["deviations"].printed[0])
    short, long, schedules, chunks = (
        results[name].rows for name in ("policies", "long", "schedules", "chunks")
    )
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
    if measured:
        figures["pretrained-ttft"] = plots.fidelity_against_ttft(means_of_models(measured))
    if drawn := frontiers(written):
        figures["writers-frontier"] = plots.agreement_against_ttft(drawn)
    texts = {
        "writers": writers_text(written),
        "pretrained": pretrained_text(measured),
        "policies": policies_text(short, long),
    }
    write_regions(page, texts)
    folder = page.with_suffix("")
    folder.mkdir(exist_ok=True)
    for name, figure in figures.items():
        write_png(figure, folder / f"{name}.png")


def _pgr(row: ArenaRow | None) -> str:
    return NOTHING if row is None else interval(row.pgr, row.pgr_low, row.pgr_high)


def policies_text(short: Sequence[ArenaRow], long: Sequence[ArenaRow]) -> str:
    """Every policy at one ratio, over short and over long chunks."""
    of_long = {_name(row): row for row in filter(_is_compared, long)}
    compared = [row for row in short if _is_compared(row) and _name(row) in of_long]
    kept = {row.way: kept_by(row, short) or Kept() for row in compared}
    columns: list[Column] = [
        ("policy", _name),
        ("charged", lambda row: f"{row.charged_ratio:.3f}"),
        (f"{short[0].chunk_tokens} tokens: PGR [95%]", _pgr),
        ("KL", lambda row: number(row.kl, ".2g")),
        ("agrees", lambda row: number(row.agreement, ".2f")),
        ("kept", lambda row: number(kept[row.way].kept, ".2f")),
        ("gained", lambda row: number(kept[row.way].gained, ".2f")),
        ("TTFT ms", lambda row: f"{row.ttft_ms:.0f}"),
        (f"{long[0].chunk_tokens} tokens: PGR [95%]", lambda row: _pgr(of_long[_name(row)])),
        ("KL", lambda row: number(of_long[_name(row)].kl, ".2g")),
        ("TTFT ms", lambda row: f"{of_long[_name(row)].ttft_ms:.0f}"),
    ]
    asked = f"{_questions(short)}; {_questions(long)}"
    right = next(iter(kept.values())).right
    counted = (
        f"**kept**: share of {right} questions that full prefill answers right which the policy answers, "
        "too; **gained**: share of others"
    )
    given = f"r = {RATIO}, schedule `{DEFAULT_SCHEDULE}`. {asked}. {counted}."
    return f"{given}\n\n{table(columns, compared).markdown()}"


def _is_compared(row: ArenaRow) -> bool:
    is_listed = row.kind == ALL and row.policy != NONE
    return is_listed and (not row.has_budget or row.ratio == float(RATIO))


def _name(row: ArenaRow) -> str:
    """Without the number of tokens, which differs between short and long chunks."""
    return row.policy.partition("(")[0]


def _questions(rows: Sequence[ArenaRow]) -> str:
    counts = {row.kind: row.n for row in rows}
    kinds = ", ".join(f"{n} {kind}" for kind, n in counts.items() if kind != ALL)
    size = f"{rows[0].n_chunks} chunks of at most {rows[0].chunk_tokens} tokens"
    return f"{size}: {counts[ALL]} questions ({kinds})"


#: Arguments of the Python interpreter, so that a run needs no script on the path.
PROGRAMS = {"blendrag": ("-m", "blendrag.cli.main"), "python": ()}


_SIZE = "--chunks {} --chunk-tokens {} --contexts {} --questions {}"
_SHORT, _LONG = _SIZE.format(6, 64, 20, 10), _SIZE.format(6, 512, 12, 8)


def _evaluation(
    policies: str,
    size: str = _SHORT,
    ratios: Sequence[str] = (RATIO,),
    schedules: str = DEFAULT_SCHEDULE,
    more: str = "",
) -> str:
    """``blendrag eval`` on generated questions."""
    return (
        f"blendrag eval --dataset synthetic --seed {SEED} {size} --policies {shlex.quote(policies)} "
        f"--schedules {schedules}{''.join(f' --ratio {ratio}' for ratio in ratios)}{more} --json"
    )


_ALL = "prefix,reuse,random,boundary({}),hkvd-once,hkvd,query,query+hkvd,blend"
_COMPARED = f"reuse,{TUNED}"
_SWEEP = ("0.02", RATIO, "0.10", "0.15")
#: Commands by the name of their run.
RUNS: dict[str, tuple[str, ...]] = {
    "policies": (_evaluation(_ALL.format(4), ratios=_SWEEP),),
    "long": (_evaluation(_ALL.format(16), _LONG, ("0.02", RATIO)),),
    "schedules": (_evaluation(TUNED, schedules=SCHEDULES),),
    "prefix": (_evaluation(_COMPARED, more=" --encode-prefix on,off"),),
    "chunks": tuple(
        _evaluation(_COMPARED, _SIZE.format(chunks, tokens, 8, 8))
        for chunks, tokens in ((2, 64), (6, 64), (12, 64), (24, 64), (6, 128), (6, 256))
    ),
    "deviations": (
        f"python -m blendrag_lab.evaluation.deviation --seed {SEED} --chunks 6 --chunk-tokens 64 "
        "--contexts 12 --policies random,hkvd,query,blend --schedules constant --ratio 0 --ratio 0.02 "
        "--ratio 0.05 --ratio 0.1 --ratio 0.15 --ratio 0.3 --ratio 0.5 --ratio 0.75 --ratio 1",
    ),
}


def execute(
    commands: Sequence[str],
    say: Callable[[str], None] = lambda text: None,
    paths: Mapping[str, Path] = MappingProxyType({}),
) -> Result:
    """Run ``commands`` one after another; their progress goes to stderr. ``paths``: what arguments that name
    a model or a file without its folder stand for. Raises :class:`BlendragError`."""
    printed = []
    for command in commands:
        say(command)
        program, *arguments = shlex.split(command)
        there = [str(paths.get(argument, argument)) for argument in arguments]
        line = [sys.executable, *PROGRAMS[program], *there]
        done = subprocess.run(line, stdout=subprocess.PIPE, check=False)
        if done.returncode:
            raise BlendragError(
                f"{command} ended with status {done.returncode}, expected 0; read its message, then repeat "
                "with --keep, which continues after the finished runs"
            )
        # Six significant digits: further ones differ between machines.
        printed.append(
            json.loads(done.stdout, parse_float=lambda text: float(f"{float(text):.6g}"))
        )
    return Result(tuple(commands), tuple(printed))


def collect(
    folder: Path,
    runs: Mapping[str, Sequence[str]],
    keep: bool,
    say: Callable[[str], None],
    paths: Mapping[str, Path] = MappingProxyType({}),
) -> dict[str, Result]:
    """Execute ``runs`` and keep each result in ``folder``. With ``keep``, a kept result of the same
    commands is used instead."""
    found = {}
    for name, commands in runs.items():
        path = folder / f"{name}.json"
        kept = load_result(path) if keep and path.is_file() else None
        if kept is None or kept.commands != tuple(commands):
            kept = execute(commands, say, paths)
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(asdict(kept), separators=(",", ":")) + "\n", "utf-8")
        found[name] = kept
    return found


def load_result(path: Path) -> Result:
    """Raises :class:`InvalidInputError` for a file that is not a result."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return Result(tuple(kept["commands"]), tuple(kept["printed"]))
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise InvalidInputError(
            f"{path} holds no results of the arena; make them with make arena"
        ) from exc


def _write_schemas(folder: Path) -> None:
    """Write the page on prompt schemas from the results in ``folder``, if there are any."""
    results = [load_result(path) for path in sorted(folder.glob("*.json"))]
    if results:
        text = schemas_text({result.commands: result.rows for result in results})
        write_regions(folder.with_suffix(".md"), {"schemas": text})


def load_measured(folder: Path) -> dict[str, ByTask]:
    """What was measured, by model and task."""
    found: dict[str, ByTask] = {}
    for path in sorted(folder.glob("*.json")):
        result = load_result(path)
        found.setdefault(model_of(result.commands[0]), {})[result.rows[0].dataset] = fidelities(
            result.rows
        )
    return found


@reporting
def main(
    out: Annotated[Path, typer.Option(help="Folder of the page.")] = Path("docs"),
    model: Annotated[
        list[Path] | None,
        typer.Option(help="Measure this pretrained model, a folder, in place of the embedded one."),
    ] = None,
    questions: Annotated[
        list[Path] | None, typer.Option(help="File of questions for the pretrained models.")
    ] = None,
    writers: Annotated[
        Path | None,
        typer.Option(
            help="Folder with a writer for each model, under its name: measure with and without it."
        ),
    ] = None,
    contexts: Annotated[int, typer.Option(help="Cases of a pretrained model and task.")] = 6,
    schemas: Annotated[
        bool, typer.Option("--schemas", help="Measure prompts of schemas in place of policies.")
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Measure only what has no result.")] = False,
    page_only: Annotated[
        bool, typer.Option("--page-only", help="Measure nothing; write the kept results.")
    ] = False,
) -> int:
    """Run the arena and write docs/quality.md."""
    begin(False, "finished runs are kept; repeat with --keep to continue")
    page = out / PAGE
    folder = page.with_suffix("")
    status = DONE
    kind, runs = PRETRAINED, pretrained_runs
    if schemas:
        kind, runs = SCHEMAS, schema_runs
    elif writers is not None:
        kind, runs = WITH_WRITERS, partial(writer_runs, writers=writers)
    asked = {} if page_only else runs(model or (), questions or (), contexts)
    for done, (name, commands) in enumerate(asked.items()):
        left = ", ".join([*asked][done:])
        interrupt.expect(f"{done} of {len(asked)} runs are kept; repeat with --keep for {left}")
        try:  # hours: one that fails does not end the others
            paths = stand_ins(model or (), questions or ())
            if writers is not None:
                paths |= {f"{WRITERS}/{path.name}": writers / path.name for path in model or ()}
            collect(folder / kind, {name: commands}, keep, partial(say, "run"), paths)
        except BlendragError as exc:
            say("error", str(exc))
            status = FAILED
    if page_only or model or schemas:
        results = {name: load_result(folder / f"{name}.json") for name in RUNS}
    else:
        results = collect(folder, RUNS, keep, partial(say, "run"))
    written = load_measured(folder / WITH_WRITERS)
    write_page(page, results, load_measured(folder / PRETRAINED), written)
    _write_schemas(folder / SCHEMAS)
    say("wrote", str(page))
    return status


if __name__ == "__main__":
    typer.run(main)
