"""``blendrag bench overhead --decode``: what a decoded token costs besides the model's own products.

A step decodes a token of each request. The time outside of the model is that of ``generate``, of the
scheduler, and of what chooses and takes a token; within it are attention and all of the decoder layers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from blendrag.cli.output import count
from blendrag.model import ModelAdapter
from blendrag_lab.bench.options import machine_of
from blendrag_lab.bench.rounds import MeasuredNothingError, Tick, Timing, run_rounds
from blendrag_lab.bench.scratch import scratch
from blendrag_lab.bench.serve import ServeRunner, corpus_texts
from blendrag_lab.bench.workload import Workload
from blendrag_lab.tables import ResultTable, figure, table

#: Requests that decode together.
REQUESTS = (1, 4, 16)
NEW_TOKENS = 24
#: Tokens that a request may decode until all decode together.
MOST_TOKENS = 1000
STOCK = "transformers' generate"


@dataclass(frozen=True)
class DecodeRow:
    way: str
    requests: int
    ms: Timing
    """From the beginning of one step to that of the next."""
    host_ms: float
    """Median CPU time of the computing thread."""
    outside_ms: float
    """The part of ``host_ms`` outside of the model."""


@dataclass(frozen=True)
class DecodeOverheadResult:
    machine: str
    model: str
    layers: int
    prompt_tokens: int
    new_tokens: int
    rounds: int
    rows: tuple[DecodeRow, ...]


def decode_table(result: DecodeOverheadResult) -> ResultTable:
    return table(
        [
            ("way", lambda row: row.way),
            ("requests", lambda row: str(row.requests)),
            ("ms per step (lowest to highest)", lambda row: str(row.ms)),
            ("host ms", lambda row: figure(row.host_ms)),
            ("outside of the model", lambda row: figure(row.outside_ms)),
            ("outside, per token", lambda row: figure(row.outside_ms / row.requests)),
        ],
        result.rows,
        f"{result.model}, {result.layers} layers, {result.new_tokens} tokens behind "
        f"{result.prompt_tokens:,}, {count(result.rounds, 'round')}",
    )


@dataclass
class Step:
    """A forward that decodes, in seconds of the clock and of CPU time of its thread."""

    rows: int
    began: tuple[float, float]
    ended: tuple[float, float] = (0.0, 0.0)


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.thread_time()


class Steps:
    """The forwards of a model that decode a token of each row."""

    def __init__(self) -> None:
        self._seen: list[Step | None] = []

    @classmethod
    @contextmanager
    def watching(cls, adapter: ModelAdapter) -> Iterator[Steps]:
        """Within this context, watch forwards from the decoder to the LM head."""
        steps = cls()
        head: Any = adapter.model.get_output_embeddings()
        hooks = (
            adapter.stack.base.register_forward_pre_hook(steps._begin, with_kwargs=True),
            head.register_forward_hook(steps._end),
        )
        try:
            yield steps
        finally:
            for hook in hooks:
                hook.remove()

    def _begin(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        rows, tokens = kwargs["input_ids"].shape
        self._seen.append(Step(rows, _now()) if tokens == 1 else None)

    def _end(self, *_: Any) -> None:
        if self._seen and (step := self._seen[-1]) is not None:
            step.ended = _now()

    def count(self, rows: int) -> int:
        """Steps that decoded a token of so many requests."""
        return sum(step is not None and step.rows == rows for step in self._seen)

    def medians(self, rows: int) -> tuple[float, float, float]:
        """Milliseconds from one step of so many rows to the next, of their CPU time, and of its part outside
        of the model."""
        pairs = [
            (one, other)
            for one, other in zip(self._seen, self._seen[1:], strict=False)
            if one is not None and other is not None and one.rows == other.rows == rows
        ]
        if not pairs:
            raise MeasuredNothingError(f"no step decoded a token of {count(rows, 'request')}")
        found = [
            (other.began[0] - one.began[0], other.began[1] - one.began[1], other.began[1] - one.ended[1])
            for one, other in pairs
        ]  # fmt: skip
        clock, host, outside = (1e3 * statistics.median(each) for each in zip(*found, strict=True))
        return clock, host, outside


def decode_overhead(
    adapter: ModelAdapter, prompt_tokens: int, rounds: int, tick: Tick
) -> DecodeOverheadResult:
    workload = Workload(max(REQUESTS), prompt_tokens, rounds=rounds)
    with scratch() as root:
        asking = ServeRunner(adapter, workload, root / "store", NEW_TOKENS)
        ways = _ways(asking, tick)
        samples = run_rounds(ways, rounds, tick)
    rows = []
    for (way, requests), found in samples.items():
        clock, host, outside = zip(*found, strict=True)
        medians = statistics.median(host), statistics.median(outside)
        rows.append(DecodeRow(way, requests, Timing.of(clock), *medians))
    return DecodeOverheadResult(
        machine=machine_of(adapter), model=adapter.model_id, layers=len(adapter.stack.layers),
        prompt_tokens=prompt_tokens, new_tokens=NEW_TOKENS, rounds=rounds, rows=tuple(rows),
    )  # fmt: skip


Ways = dict[tuple[str, int], Callable[[], tuple[float, float, float]]]


def _ways(asking: ServeRunner, tick: Tick) -> Ways:
    adapter = asking.adapter
    with asking.engine() as engine:
        tick("writing prompts")
        texts = corpus_texts(engine, asking.workload, max(REQUESTS))
        ids = engine.segments(texts[0], asking.options("full")).ids
        most = min(MOST_TOKENS, engine.context_tokens - len(ids) - NEW_TOKENS)

    def stock() -> tuple[float, float, float]:
        prompt = torch.tensor([ids], device=adapter.device)
        with Steps.watching(adapter) as steps:
            adapter.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0,
            )  # fmt: skip
        return steps.medians(1)

    def engine_steps(prompts: Sequence[str]) -> tuple[float, float, float]:
        """Each prompt is different, so that nothing is shared. The first ones decode while the others are
        prefilled, so all go on until they have decoded together for long enough."""
        number = len(prompts)
        options = replace(
            asking.options("full"), max_new_tokens=most, generate_kwargs={"min_new_tokens": most}
        )

        def answer(prompt: str) -> None:
            with closing(engine.stream(prompt, options)) as pieces:
                for _ in pieces:
                    if steps.count(number) > NEW_TOKENS:
                        return

        with (
            asking.engine(number) as engine,
            Steps.watching(adapter) as steps,
            ThreadPoolExecutor(number) as pool,
        ):
            engine.open()
            list(pool.map(answer, prompts))
        return steps.medians(number)

    ways: Ways = {(STOCK, 1): stock}
    for number in REQUESTS:
        ways["engine", number] = partial(engine_steps, texts[:number])
    return ways
