"""``blendrag bench newcomer``: a request that arrives while others decode.

Its time to first token against the one it has alone, and how long the others wait for a token meanwhile. All
prompts have the same chunks, each in another order. Each round asks the same newcomer with every number of
running requests, on one engine, which answers nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from queue import SimpleQueue
from statistics import median
from typing import Annotated
from unittest import mock

import torch
import typer

from blendrag.corpus.documents import Entry
from blendrag.engine import BlendEngine
from blendrag.engine.stream import AnswerStream
from blendrag_lab.bench import options
from blendrag_lab.bench.geometry import TimedModel
from blendrag_lab.bench.rounds import MeasuredNothingError, Tick, Timing, run_rounds, silent
from blendrag_lab.bench.scratch import scratch
from blendrag_lab.bench.serve import ServeRunner, corpus_texts, prompts_over
from blendrag_lab.bench.workload import BlendResult, Workload, conditions, whole_numbers
from blendrag_lab.tables import NOTHING, ResultTable, times

#: Each running request gets so many tokens before the next one is asked.
STEADY = 5
#: The newcomer's; with the last ones the others have decoded, too.
NEWCOMER_TOKENS = 3
ENDED = "a running request ended before the newcomer had its first token"
#: Longest answer of the running requests, which are stopped before.
RUNNING_TOKENS = 512


@dataclass(frozen=True)
class NewcomerRow:
    running: int
    """Requests that decode when the newcomer arrives."""
    ttft: Timing
    """The newcomer's time to first token."""
    over_alone: float
    """TTFT against that without running requests, 1.0 being as fast; the median of the rounds' ratios."""
    token: Timing | None
    """Time between two tokens of a running request before the newcomer arrives; ``None``: there is none."""
    longest: Timing | None
    """The longest time between two tokens of a running request while the newcomer begins."""


@dataclass(frozen=True, kw_only=True)
class NewcomerResult(BlendResult):
    prompt_tokens: int
    rows: tuple[NewcomerRow, ...]


@dataclass(frozen=True)
class Arrival:
    """One newcomer; times in milliseconds."""

    ttft: float
    token: float | None = None
    longest: float | None = None


def newcomer_table(result: NewcomerResult) -> ResultTable:
    return ResultTable(
        (
            "requests that run", "TTFT ms (lowest to highest)", "over alone",
            "of the others: ms per token before", "longest wait for a token, ms",
        ),
        [
            (
                str(row.running), str(row.ttft), times(row.over_alone), str(row.token or NOTHING),
                str(row.longest or NOTHING),
            )
            for row in result.rows
        ],
        f"{result.prompt_tokens:,} tokens, the same chunks in other orders: {result.about}",
    )  # fmt: skip


@options.bench(newcomer_table, ratio=0.3, encoding=options.OMIT)
def newcomer(
    timed: TimedModel,
    workload: Workload,
    running: Annotated[
        str, typer.Option(help="Requests that run, comma-separated; 0 is measured, too.")
    ] = "1,2,4",
    tick: Tick = silent,
) -> NewcomerResult:
    adapter, counts = timed.adapter, sorted(set(whole_numbers(running, "running", "1,2,4")))
    workload.check(adapter)
    most = counts[-1]
    with scratch() as root:
        asking = ServeRunner(adapter, workload, root / "store", RUNNING_TOKENS)
        with asking.engine(most + 1) as engine, _TokenTimes().noted() as tokens:
            tick("storing the chunks")
            texts = corpus_texts(engine, workload, workload.chunks)
            engine.library.add([Entry(str(i), text) for i, text in enumerate(texts)], embed=False)
            engine.open()
            asked = replace(asking, prompts=prompts_over(texts, workload, most + 1, most + 1))
            arriving = {n: partial(_arrival, asked, engine, tokens, n) for n in (0, *counts)}
            found = run_rounds(arriving, workload.rounds, tick)
    return NewcomerResult(
        **conditions(adapter, workload, "memory"),
        prompt_tokens=workload.prompt_tokens,
        rows=tuple(_row(count, found[count], found[0]) for count in found),
    )


class _TokenTimes:
    """When requests got their tokens."""

    def __init__(self) -> None:
        self.times: dict[AnswerStream, list[float]] = {}
        """By request, in the order in which they began."""
        self._ended: SimpleQueue[bool] = SimpleQueue()
        """Whether a request has ended; else it got a token."""

    def clear(self) -> None:
        self.times.clear()
        self._ended = SimpleQueue()

    def wait(self, requests: int) -> None:
        """Until the last of so many has :data:`STEADY` tokens. Raises :class:`MeasuredNothingError`."""
        while len(self.times) < requests or len([*self.times.values()][-1]) < STEADY:
            if self._ended.get():
                raise MeasuredNothingError(ENDED)

    @contextmanager
    def noted(self) -> Iterator[_TokenTimes]:
        """Within this context, of all requests."""
        put, finish = AnswerStream.put, AnswerStream.finish

        def noting_put(stream: AnswerStream, value: torch.Tensor) -> None:
            self.times.setdefault(stream, []).append(time.perf_counter())
            self._ended.put(False)
            put(stream, value)

        def noting_finish(stream: AnswerStream) -> None:
            self._ended.put(True)
            finish(stream)

        with (
            mock.patch.object(AnswerStream, "put", noting_put),
            mock.patch.object(AnswerStream, "finish", noting_finish),
        ):
            yield self


def _arrival(
    asking: ServeRunner, engine: BlendEngine, tokens: _TokenTimes, running: int
) -> Arrival:
    """The first prompt arrives while so many others decode."""
    tokens.clear()
    others = []
    try:
        for number, prompt in enumerate(asking.prompts[1 : running + 1], start=1):
            others.append(engine.stream(prompt, asking.options("blend")))
            tokens.wait(number)
        arrived = time.perf_counter()
        briefly = replace(asking, new_tokens=NEWCOMER_TOKENS)
        metrics = engine.generate(asking.prompts[0], briefly.options("blend")).metrics
    finally:
        for other in others:
            other.close()
        engine.drain()
    *before, own = tokens.times.values()
    came = own[0]
    if any(one[-1] < came for one in before):
        raise MeasuredNothingError(ENDED)
    if not metrics.reused_tokens:
        raise MeasuredNothingError("the newcomer reused no KV")
    if not before:
        return Arrival(1e3 * metrics.ttft_s)
    steady = [high - low for low, high in pairwise(before[-1][:STEADY])]
    waits = [
        high - low for one in before for low, high in pairwise(one) if high > arrived and low < came
    ]
    return Arrival(1e3 * metrics.ttft_s, 1e3 * median(steady), 1e3 * max(waits))


def _row(running: int, found: list[Arrival], alone: list[Arrival]) -> NewcomerRow:
    tokens = [each.token for each in found if each.token is not None]
    longest = [each.longest for each in found if each.longest is not None]
    return NewcomerRow(
        running,
        Timing.of([each.ttft for each in found]),
        median(each.ttft / one.ttft for each, one in zip(found, alone, strict=True)),
        Timing.of(tokens) if tokens else None,
        Timing.of(longest) if longest else None,
    )
