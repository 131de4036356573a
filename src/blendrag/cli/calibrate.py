"""``blendrag calibrate``: find the policy that suits a model and a corpus."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blendrag.cli import interrupt, options
from blendrag.cli.lifecycle import DONE, begin, interrupted, reporting
from blendrag.cli.output import duration, echo, print_json
from blendrag.cli.progress import StatusLine
from blendrag.store.regular_files import MIB

if TYPE_CHECKING:
    from blendrag.planning.calibrate import Race

#: Size limit of ``--questions``.
MAX_QUESTIONS_BYTES = 16 * MIB


@reporting
@options.takes(*options.ENGINE, "top_k")
def calibrate(
    context: typer.Context,
    ratio: options.FixedRatio = None,
    samples: Annotated[int, options.number("Prompts to measure.", 1, kind=int)] = 32,
    minutes: Annotated[float, options.number("Time limit.", 0)] = 10.0,
    questions: Annotated[
        Path | None,
        options.optional("Text file, one question a line. [default: questions about chunks]"),
    ] = None,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Choose the tokens to recompute as suits the model, measured on a sample of the corpus.

    Compares selection policies by how far answers are from a full prefill's. The best one is used by every
    request that names no --policy, if it also gains on prompts that did not choose it.
    """
    begin(verbose, "nothing was calibrated yet")
    from blendrag.config import settings
    from blendrag.engine import CalibrationOptions

    defaults = settings()
    sample = CalibrationOptions(
        ratio=defaults.fixed_ratio if ratio is None else ratio,
        samples=samples,
        minutes=minutes,
        top_k=context.params["top_k"] or defaults.top_k,
        questions=_questions(questions),
    )
    with options.engine_for(context) as engine:
        with StatusLine("measuring the first prompt") as line:

            def show(race: Race, done: float) -> None:
                interrupt.expect("the prompts measured so far were used", grace_s=10.0)
                left = ", ".join(f"{name} {race.kl(name):.3g}" for name in race.policies)
                line.show(f"prompt {len(race.kls)}, KL: {left}", round(100 * done), 100)

            report = engine.calibrate(sample, show)
        if json:
            print_json(report.as_dict())
        else:
            echo(*report.conclusion.splitlines())
            echo(f"{len(report.race.kls)} prompts in {duration(report.seconds)}")
    return interrupted() if report.interrupted else DONE


def _questions(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ()
    text = options.read_text("--questions", path, MAX_QUESTIONS_BYTES, "one question a line")
    return tuple(line.strip() for line in text.splitlines() if line.strip())
