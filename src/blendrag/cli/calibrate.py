"""``blendrag calibrate``: find the schedule that suits a model and a corpus."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blendrag.cli import interrupt, options
from blendrag.cli.lifecycle import DONE, begin, interrupted, reporting
from blendrag.cli.output import duration, print_json, say
from blendrag.cli.progress import StatusLine
from blendrag.store.regular_files import MIB

if TYPE_CHECKING:
    from blendrag.engine import CalibrationReport
    from blendrag.planning.calibrate import Found

#: Size limit of ``--questions``.
MAX_QUESTIONS_BYTES = 16 * MIB


@reporting
def calibrate(
    context: typer.Context,
    model: options.Model = None,
    store: options.Store = None,
    ratio: options.Ratio = None,
    policy: options.Policy = None,
    samples: Annotated[int, options.number("Prompts to measure.", 1, kind=int)] = 16,
    minutes: Annotated[float, options.number("Time limit of the search.", 0)] = 10.0,
    questions: Annotated[
        Path | None,
        options.optional("Text file, one question a line. [default: first sentences of chunks]"),
    ] = None,
    top_k: options.TopK = None,
    embedder: options.Embedder = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    dtype: options.Dtype = None,
    device: options.Device = None,
    lora: options.Lora = None,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Find the layers on which recompute is best spent, on a sample of the corpus.

    The schedule found is kept with the store. If it was found with --questions, every answer uses it from
    then on; otherwise only answers with --schedule calibrated do.
    """
    begin(verbose, "nothing was calibrated yet")
    from blendrag.config import settings
    from blendrag.engine import CalibrationOptions

    defaults = settings()
    asked = CalibrationOptions(
        policy=policy or defaults.policy,
        ratio=defaults.fixed_ratio if ratio is None else ratio,
        samples=samples,
        seed=seed,
        minutes=minutes,
        top_k=top_k or defaults.top_k,
        questions=_questions(questions),
    )
    with options.engine_for(context) as engine, StatusLine("measuring full prefill") as line:

        def show(found: Found) -> None:
            interrupt.expect("the best schedule so far is kept", grace_s=10.0)
            line.show(
                f"{found.tried} schedules, best deviation {found.best.deviation:.4g} "
                f"({found.family.schedule}: {found.family.deviation:.4g})"
            )

        report = engine.calibrate(asked, show)
    print_json(report.as_dict()) if json else _print(report)
    if report.note:
        say("note", report.note)
    if report.search.out_of_time:
        say("note", f"the search stopped after {minutes:g} minutes; allow more with --minutes")
    if not asked.questions:
        say(
            "note",
            "calibrated on first sentences of chunks, not on questions, so this schedule is used only with "
            "--schedule calibrated; give questions with --questions FILE to use it for every answer",
        )
    return interrupted() if report.search.interrupted else DONE


def _questions(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ()
    text = options.read_text("--questions", path, MAX_QUESTIONS_BYTES, "one question a line")
    return tuple(line.strip() for line in text.splitlines() if line.strip())


def _print(report: CalibrationReport) -> None:
    found = report.calibration
    typer.echo(
        f"{found.policy} at ratio {found.ratio:g}: deviation {found.deviation:.4g} on {found.prompts} "
        f"prompts ({found.questions})"
    )
    typer.echo(f"  layers 1…: {', '.join(f'{share:.3f}' for share in found.weights)}")
    typer.echo(f"  nothing recomputed: {found.reuse_deviation:.4g}")
    for each in sorted(report.search.families, key=lambda each: each.deviation):
        typer.echo(f"  {each.schedule}: {each.deviation:.4g}")
    tried = report.search.tried
    typer.echo(
        f"{tried} schedules in {duration(report.seconds)}; the best is kept as --schedule calibrated"
    )
