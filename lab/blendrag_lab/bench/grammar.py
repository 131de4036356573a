"""``blendrag bench grammar``: what a token costs more if the answer must follow a JSON schema.

Answers of one length with and without the schema, alone and in joint steps, on one engine. The schema admits
no end before that length; answers without it may not end before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean, median
from typing import Annotated

import typer

from blendrag.cli.output import count
from blendrag.engine import BlendEngine, Options
from blendrag_lab.bench import options
from blendrag_lab.bench.geometry import TimedModel
from blendrag_lab.bench.options import machine_of
from blendrag_lab.bench.rounds import MeasuredNothingError, Tick, Timing, run_rounds, silent
from blendrag_lab.bench.scratch import scratch
from blendrag_lab.bench.workload import whole_numbers
from blendrag_lab.tables import ResultTable, times

QUESTION = "Write a long list of the things that one sees in a harbour town."
_THING = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3, "maxLength": 30},
        "kind": {"enum": ["ship", "house", "person"]},
        "number": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "kind", "number"],
}


@dataclass(frozen=True)
class GrammarRow:
    at_once: int
    """Answers that are decoded together."""
    free: Timing
    """Milliseconds per token of each answer without the schema."""
    formed: Timing
    """The same with it."""
    over_free: float
    """``formed`` against ``free``; the median of the rounds' ratios."""


@dataclass(frozen=True)
class GrammarResult:
    machine: str
    model: str
    tokens: int
    """Tokens of each answer."""
    rounds: int
    rows: tuple[GrammarRow, ...]


def grammar_table(result: GrammarResult) -> ResultTable:
    return ResultTable(
        ("answers at once", "ms per token", "with a JSON schema", "over without"),
        [
            (str(row.at_once), str(row.free), str(row.formed), times(row.over_free))
            for row in result.rows
        ],
        f"{result.model}, {result.tokens} tokens each, {count(result.rounds, 'round')}",
    )


@options.bench(grammar_table)
def grammar(
    timed: TimedModel,
    tokens: options.Count = 64,
    at_once: Annotated[
        str, typer.Option(help="Answers that are decoded together, comma-separated.")
    ] = "1,4",
    rounds: options.Rounds = 5,
    tick: Tick = silent,
) -> GrammarResult:
    adapter, counts = timed.adapter, sorted(set(whole_numbers(at_once, "at-once", "1,4")))
    things = {"type": "array", "items": _THING, "minItems": tokens}
    form = {"type": "json_schema", "json_schema": {"schema": things}}
    asked: dict[bool, Options] = {
        False: Options(
            mode="full", max_new_tokens=tokens, generate_kwargs={"min_new_tokens": tokens}
        ),
        True: Options(mode="full", max_new_tokens=tokens, response_format=form),
    }
    with (
        scratch() as root,
        BlendEngine(adapter, root / "store", learn=False, decode_weights="native") as engine,
    ):
        engine.open()
        ways = {
            (number, formed): lambda number=number, formed=formed: _token_ms(
                engine, asked[formed], number
            )
            for number in counts
            for formed in (False, True)
        }
        found = run_rounds(ways, rounds, tick)
    return GrammarResult(
        machine=machine_of(adapter),
        model=adapter.model_id,
        tokens=tokens,
        rounds=rounds,
        rows=tuple(_row(number, found[number, False], found[number, True]) for number in counts),
    )


def _token_ms(engine: BlendEngine, asked: Options, number: int) -> float:
    """Milliseconds from token to token of ``number`` answers that run together, their mean."""
    answers = engine.batch([QUESTION] * number, asked)
    metrics = [answer.metrics for answer in answers]
    if any(each.new_tokens != asked.max_new_tokens for each in metrics):
        raise MeasuredNothingError(
            f"an answer ended before its {asked.max_new_tokens} tokens; measure with a model that writes on"
        )
    return mean(1e3 * (each.total_s - each.ttft_s) / (each.new_tokens - 1) for each in metrics)


def _row(number: int, free: list[float], formed: list[float]) -> GrammarRow:
    ratios = [with_form / without for with_form, without in zip(formed, free, strict=True)]
    return GrammarRow(number, Timing.of(free), Timing.of(formed), median(ratios))
