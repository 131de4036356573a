"""``blendrag calibrate``: find the policy and the ratio that suit a model and a corpus."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blendrag.cli import interrupt, options
from blendrag.cli.lifecycle import DONE, begin, interrupted, reporting
from blendrag.cli.output import count, duration, echo, print_json, say
from blendrag.cli.progress import StatusLine
from blendrag.errors import InvalidInputError
from blendrag.store.regular_files import MIB
from blendrag.text.json_records import Record, records_in

if TYPE_CHECKING:
    from blendrag.planning.calibrate import Race

#: Size limit of ``--questions``.
MAX_QUESTIONS_BYTES = 16 * MIB
FORMS = "one question a line, or JSON records of {question, …}"


@reporting
@options.takes(*options.ENGINE, "top_k")
def calibrate(
    context: typer.Context,
    ratio: Annotated[
        float | None,
        options.number("Largest ratio; smaller ones are taken if as close. [default: 0.3]", 0, 1),
    ] = None,
    samples: Annotated[int, options.number("Prompts to measure.", 1, kind=int)] = 32,
    minutes: Annotated[float, options.number("Time limit.", 0)] = 10.0,
    questions: Annotated[
        Path | None,
        options.optional(
            "File with one question, or one JSON record with a question, a line. "
            "[default: questions about chunks]"
        ),
    ] = None,
    undo: Annotated[
        bool, typer.Option("--undo", help="Forget what was found for this model and store.")
    ] = False,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Measure which tokens to recompute for this model and corpus.

    Compares selection policies and ratios, from 0 on, by how far answers are from a full prefill's. Requests
    that name no --policy and no --ratio take the smallest ratio that is as close as the largest one, with the
    policy that gained at it on prompts that did not choose it.
    """
    begin(verbose, "nothing was calibrated yet")
    from blendrag.config import settings
    from blendrag.engine import CalibrationOptions
    from blendrag.engine.calibration import largest_ratio

    defaults = settings()
    if undo:
        with options.engine_for(context) as engine:
            had = engine.forget_calibration()
        found = "what was calibrated is forgotten"
        if not had.had_result:
            found = f"nothing was calibrated{' yet' * bool(had)} for this model"
        measured = f"; {count(had.prompts, 'measured prompt')} of an unfinished calibration removed"
        echo(found + measured * (had.prompts > 0))
        return DONE
    sample = CalibrationOptions(
        ratio=largest_ratio(defaults) if ratio is None else ratio,
        samples=samples,
        minutes=minutes,
        top_k=context.params["top_k"] or defaults.top_k,
        questions=_questions(questions),
    )
    options.require_documents(context.params["store"])
    with options.engine_for(context) as engine:
        with StatusLine("measuring the first prompt") as line:

            def show(race: Race, done: float) -> None:
                interrupt.expect(
                    "the prompts measured so far were used; the same command goes on from there",
                    grace_s=10.0,
                )
                measured = (trial for trial in race.trials if trial in race.rows[-1])
                left = "; ".join(f"{trial} {race.kl(trial):.3g}" for trial in measured)
                what = f"prompt {len(race.rows)} of {race.prompts}, KL at {left}"
                line.show(what, round(100 * done), 100)

            report = engine.calibrate(sample, show)
        if json:
            print_json(report.as_dict())
        else:
            echo(*report.conclusion.splitlines())
            measured = f"{len(report.race.rows)} of {report.race.prompts} prompts"
            earlier = f", {report.before} of them in an earlier run" * bool(report.before)
            echo(f"{measured}{earlier}; {duration(report.seconds)}")
            if report.found and defaults.ratio is not None:
                say("note", f"BLENDRAG_RATIO={defaults.ratio} goes before the ratio that was found")
    return interrupted() if report.interrupted else DONE


def _questions(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ()
    text = options.read_text("--questions", path, MAX_QUESTIONS_BYTES, FORMS)
    if text.lstrip()[0] not in "[{":
        return tuple(line.strip() for line in text.splitlines() if line.strip())
    records = records_in(text, f"--questions {path}", FORMS)
    return tuple(_question_of(record, path, number) for number, record in enumerate(records, 1))


def _question_of(record: Record, path: Path, number: int) -> str:
    question = record.get("question")
    if not isinstance(question, str) or not question.strip():
        raise InvalidInputError(
            f"record {number} of --questions {path} has no question; expected {FORMS}"
        )
    return question.strip()
