"""``blendrag calibrate``: parse, search, say what was found and among what."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from blendrag.cli import interrupt, options, output, quiet
from blendrag.cli.progress import LINE_EVERY_S
from blendrag.cli.status import DONE, INTERRUPTED, reporting, say
from blendrag.errors import InvalidInputError

if TYPE_CHECKING:
    from blendrag.calibrate import Step
    from blendrag.engine import CalibrationReport

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
    seed: Annotated[int, typer.Option(help="Of the sample and the search.")] = 0,
    dtype: options.Dtype = None,
    device: options.Device = None,
    lora: options.Lora = None,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Find which layers of this model the recompute ratio is best spent in, on a sample of the corpus.

    The schedule found is kept beside the store; --schedule calibrated uses it.
    """
    quiet.set_up(verbose)
    options.check_environment()
    interrupt.expect("nothing was calibrated yet")
    from blendrag.config import settings
    from blendrag.engine import BlendEngine, CalibrationOptions

    defaults = settings()
    wanted = CalibrationOptions(
        policy=policy or defaults.policy,
        ratio=defaults.ratio if ratio is None else ratio,
        samples=samples,
        seed=seed,
        minutes=minutes,
        top_k=top_k or defaults.top_k,
        questions=_questions(questions),
    )
    engine = BlendEngine(
        options.model_for(model, store),
        store,
        dtype=dtype,
        device=device,
        lora=str(lora) if lora else None,
    )
    with engine, _Progress() as progress:
        report = engine.calibrate(wanted, progress)
    _print_json(report) if json else _print(report)
    if report.out_of_time:
        say("note", f"the search ended after {minutes:g} minutes; --minutes gives it more")
    if report.interrupted:
        say("interrupted", interrupt.sentence())
        return INTERRUPTED
    return DONE


def _questions(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
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


class _Progress:
    """Called with every schedule measured: a status line on a terminal, a line now and then elsewhere."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._live = console.is_terminal
        self._status = console.status("measuring full prefill")
        self._said = time.monotonic()

    def __enter__(self) -> _Progress:
        if self._live:
            self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._status.stop()

    def __call__(self, step: Step) -> None:
        interrupt.expect("the best schedule so far is kept", grace_s=10.0)
        text = (
            f"{step.tried} schedules, best deviation {step.best.deviation:.4g} "
            f"({step.family.schedule}: {step.family.deviation:.4g})"
        )
        if self._live:
            self._status.update(text)
        elif time.monotonic() - self._said >= LINE_EVERY_S:
            self._said = time.monotonic()
            say("progress", text)
