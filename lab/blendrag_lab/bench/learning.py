"""``blendrag bench learning``: an application that keeps its retriever and only swaps its LLM.

Requests over the same passages in other orders follow each other without a pause, each with learning and
without. Each round begins with empty stores. The model was checked before.
"""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple

from blendrag.engine import BlendEngine, Options
from blendrag_lab.bench import options
from blendrag_lab.bench.geometry import TimedModel
from blendrag_lab.bench.rounds import MeasuredNothingError, Tick, Timing, run_rounds, silent
from blendrag_lab.bench.scratch import scratch
from blendrag_lab.bench.serve import corpus_texts
from blendrag_lab.bench.workload import BlendResult, Workload, conditions
from blendrag_lab.tables import ResultTable, times


@dataclass(frozen=True)
class LearningRow:
    request: int
    """Its number in the sequence, from 1."""
    ttft: Timing
    """With learning, in milliseconds."""
    over_before: float
    """TTFT against that without learning, 1.0 being as fast; the median of the rounds' ratios."""
    total_over_before: float
    """The same of the time until the caller has the answer."""
    reused: float
    """Share of the prompt's tokens."""


@dataclass(frozen=True, kw_only=True)
class LearningResult(BlendResult):
    prompt_tokens: int
    new_tokens: int
    rows: tuple[LearningRow, ...]


class _Asked(NamedTuple):
    ttft_s: float
    total_s: float
    reused: float


def learning_table(result: LearningResult) -> ResultTable:
    return ResultTable(
        ("request", "TTFT ms (lowest to highest)", "over without", "last token, over without", "reused"),
        [
            (
                str(row.request), str(row.ttft), times(row.over_before), times(row.total_over_before),
                f"{row.reused:.0%}",
            )
            for row in result.rows
        ],
        f"{result.prompt_tokens:,} tokens, the same passages in other orders, {result.new_tokens} new "
        f"tokens: {result.about}",
    )  # fmt: skip


@options.bench(learning_table, ratio=0.3, encoding=options.OMIT)
def learning(
    timed: TimedModel,
    workload: Workload,
    requests: Annotated[int, options.number("Requests in a sequence.", 3, kind=int)] = 5,
    new_tokens: options.Count = 16,
    tick: Tick = silent,
) -> LearningResult:
    workload.check(timed.adapter)

    def sequence() -> list[tuple[_Asked, _Asked]]:
        with scratch() as root, ExitStack() as opened:
            ways = [
                opened.enter_context(_engine(timed, workload, root / n, n)) for n in ("yes", "no")
            ]
            texts = corpus_texts(ways[0], workload, workload.chunks)
            found = []
            for number in range(requests):
                order = [ways, ways[::-1]][number % 2]
                asked = {one: _ask(one, workload, texts, number, new_tokens) for one in order}
                found.append((asked[ways[0]], asked[ways[1]]))
            return found

    rounds = run_rounds({"sequence": sequence}, workload.rounds, tick, warm_up=False)["sequence"]
    if not any(learns.reused for each in rounds for learns, _ in each):
        raise MeasuredNothingError("no request reused what an earlier one left")
    return LearningResult(
        **conditions(timed.adapter, workload, "memory"),
        prompt_tokens=workload.prompt_tokens,
        new_tokens=new_tokens,
        rows=tuple(_row(n, [each[n] for each in rounds]) for n in range(requests)),
    )


def _engine(timed: TimedModel, workload: Workload, root: Path, learns: str) -> BlendEngine:
    engine = BlendEngine(
        timed.adapter, root, policy=workload.policy, schedule=workload.schedule, ratio=workload.ratio,
        learn=learns == "yes", chunk_tokens=max(64, 2 * workload.chunk_tokens), decode_weights="native",
    )  # fmt: skip
    engine.verify()
    return engine


def _ask(
    engine: BlendEngine, workload: Workload, texts: list[str], number: int, new_tokens: int
) -> _Asked:
    passages = random.Random(number).sample(texts, len(texts))
    question = "what " * (workload.question_tokens - 5) + f"in {number}?"
    began = time.perf_counter()
    metrics = engine.generate(
        "\n\n".join([*passages, f"Question: {question}"]),
        Options(
            max_new_tokens=new_tokens, apply_chat_template=False,
            generate_kwargs={"min_new_tokens": new_tokens},
        ),
    ).metrics  # fmt: skip
    total_s = time.perf_counter() - began
    return _Asked(metrics.ttft_s, total_s, metrics.reused_tokens / metrics.prompt_tokens)


def _row(number: int, found: list[tuple[_Asked, _Asked]]) -> LearningRow:
    return LearningRow(
        number + 1,
        Timing.of([1e3 * learns.ttft_s for learns, _ in found]),
        median(learns.ttft_s / before.ttft_s for learns, before in found),
        median(learns.total_s / before.total_s for learns, before in found),
        median(learns.reused for learns, _ in found),
    )
