"""``blendrag calibrate``: parse, search, say what was found and among what."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blendrag.cli import interrupt, options, output
from blendrag.cli.starting import begin
from blendrag.cli.status import DONE, INTERRUPTED, reporting, say
from blendrag.errors import InvalidInputError
from blendrag.store import regular_files

if TYPE_CHECKING:
    from blendrag.engine import CalibrationReport

#: Size limit of ``--questions``.
MAX_QUESTIONS_BYTES = 16 * regular_files.MIB

SAMPLES, MINUTES = 16, 10.0


@reporting
def calibrate(
    model: options.Model = None,
    store: options.Store = None,
    ratio: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Share of tokens recomputed.", show_default=False),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(help="Policy whose schedule is looked for.", show_default=False),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Prompts to measure on.")] = SAMPLES,
    minutes: Annotated[
        float, typer.Option(min=0.0, callback=options.finite, help="Stop searching after these.")
    ] = MINUTES,
    questions: Annotated[
        Path | None,
        typer.Option(
            help="Text file of questions as they are asked, one a line; else first sentences of chunks "
            "stand in for them.",
            show_default=False,
        ),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Chunks in a prompt.", show_default=False)
    ] = None,
    embedder: options.Embedder = None,
    seed: Annotated[int, typer.Option(help="Of the sample and the search.")] = 0,
    dtype: options.Dtype = None,
    device: options.Device = None,
    lora: options.Lora = None,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Find which layers of this model the recompute ratio is best spent in, on a sample of the corpus.

    The schedule found is kept beside the store. Answers use it from then on if it was found on --questions,
    else where --schedule calibrated is said.
    """
    begin(verbose, "nothing was calibrated yet")
    from blendrag.cli.progress import SearchProgress
    from blendrag.config import settings
    from blendrag.engine import BlendEngine, CalibrationOptions

    defaults = settings()
    wanted = CalibrationOptions(
        policy=policy or defaults.policy,
        ratio=defaults.fixed_ratio if ratio is None else ratio,
        samples=samples,
        seed=seed,
        minutes=minutes,
        top_k=top_k or defaults.top_k,
        questions=_questions(questions),
    )
    engine = BlendEngine(
        options.model_for(model, store, trust_remote_code=trust_remote_code),
        store,
        embedder=embedder,
        dtype=dtype,
        device=device,
        lora=str(lora) if lora else None,
        trust_remote_code=trust_remote_code,
    )
    with engine, SearchProgress() as progress:
        report = engine.calibrate(wanted, progress)
    _print_json(report) if json else _print(report)
    if report.note:
        say("note", report.note)
    if report.out_of_time:
        say("note", f"the search ended after {minutes:g} minutes; --minutes gives it more")
    if not wanted.questions:
        say(
            "note",
            "first sentences of chunks stood in for questions, and what suits them may not suit those, so "
            "this is used only where --schedule calibrated is said; --questions FILE calibrates on some "
            "of yours, one a line, for every answer from then on",
        )
    if report.interrupted:
        say("interrupted", interrupt.sentence())
        return INTERRUPTED
    return DONE


def _questions(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ()
    try:
        lines = regular_files.read_text(path, MAX_QUESTIONS_BYTES, follow=True).splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8"
        raise InvalidInputError(
            f"--questions {path} cannot be read ({reason}); expected a text file of one question a line"
        ) from exc
    found = tuple(line.strip() for line in lines if line.strip())
    if not found:
        raise InvalidInputError(f"--questions {path} is empty; leave the option out or fill it")
    return found


def _print_json(report: CalibrationReport) -> None:
    output.print_json(report.as_dict())


def _print(report: CalibrationReport) -> None:
    found = report.calibration
    typer.echo(
        f"{found.policy} at ratio {found.ratio:g}: deviation {found.deviation:.4g} on {found.prompts} "
        f"prompts ({found.questions})"
    )
    typer.echo(f"  layers 1…: {', '.join(f'{share:.3f}' for share in found.weights)}")
    typer.echo(f"  nothing recomputed: {found.reuse_deviation:.4g}")
    for each in sorted(report.families, key=lambda each: each.deviation):
        typer.echo(f"  {each.schedule}: {each.deviation:.4g}")
    typer.echo(
        f"{report.tried} schedules in {output.duration(report.seconds)}; kept as the meaning of "
        "--schedule calibrated"
    )
