"""``blendrag bench serve``: whole answers to requests that arrive together or at random, over one corpus.

One engine answers them one by one and together, in modes ``full`` and ``blend``, and together without sharing
KV; transformers' continuous batching answers the same prompts. Chunks are chosen with a skew, so that
requests share some of them.

Arrivals at random: at the rate at which the mean TTFT of full prefill, one by one, is twice that of a lone
request, and at multiples of it.
"""

from __future__ import annotations

import math
import random
import sys
import time
import typing
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Annotated
from unittest import mock

import numpy as np
import typer
from transformers import ContinuousBatchingConfig, GenerationConfig

from blendrag.cli.output import count
from blendrag.config import Mode
from blendrag.corpus.documents import Entry
from blendrag.demo import demo_corpus_path
from blendrag.engine import Answer, BlendEngine, Options, exact_prefixes
from blendrag.errors import InvalidInputError
from blendrag.lab.bench import options
from blendrag.lab.bench.geometry import TimedModel
from blendrag.lab.bench.rounds import MeasuredNothingError, Tick, run_rounds, silent
from blendrag.lab.bench.scratch import scratch
from blendrag.lab.bench.workload import BlendResult, Workload, conditions
from blendrag.lab.tables import NOTHING, ResultTable, figure, times
from blendrag.serving import chunk_pool

#: What the others are compared with.
BASELINE = "blend, one by one"
ARRIVING_BASELINE = "full, one by one"
#: Rates of arrivals for blend, as multiples of the one for full prefill.
RATES = (1, 4)
#: Of the paged cache of transformers' continuous batching, its default.
PAGE_TOKENS = 256


@dataclass(frozen=True)
class ServeRow:
    """Medians of the rounds."""

    way: str
    rate: float | None
    """Arrivals per second; ``None``: all at once."""
    seconds: float
    """From the first arrival to the last token."""
    over_baseline: float
    """Requests per second, against :data:`BASELINE` or, at random arrivals, :data:`ARRIVING_BASELINE`."""
    ttft_s: float | None
    """Mean."""
    p95_ttft_s: float | None
    token_ms: float | None
    """Between two tokens of a request."""
    in_time: float | None
    """Share of requests whose first token came within twice the TTFT of a lone full prefill."""


@dataclass(frozen=True, kw_only=True)
class ServeResult(BlendResult):
    requests: int
    new_tokens: int
    corpus_chunks: int
    contexts: int
    rows: tuple[ServeRow, ...]


@dataclass(frozen=True)
class Served:
    seconds: float
    answers: Sequence[Answer] = ()


def serve_table(result: ServeResult) -> ResultTable:
    arriving = "together" if result.rows[0].rate is None else "at random"
    baseline = BASELINE if result.rows[0].rate is None else ARRIVING_BASELINE

    def shown(value: float | None) -> str:
        return NOTHING if value is None else figure(value)

    def cells(row: ServeRow) -> tuple[str, ...]:
        rate = () if row.rate is None else (f"{row.rate:.3g}",)
        in_time = () if row.in_time is None else (f"{row.in_time:.0%}",)
        return (
            row.way, *rate, f"{result.requests / row.seconds:.3g}", times(row.over_baseline),
            shown(row.ttft_s), shown(row.p95_ttft_s), *in_time, shown(row.token_ms),
        )  # fmt: skip

    head: tuple[str, ...] = ("way", "arrivals/s", "answers/s", f"over {baseline}", "TTFT s", "95% of TTFT s",
            "in time", "ms per token")  # fmt: skip
    if arriving == "together":
        head = tuple(name for name in head if name not in ("arrivals/s", "in time"))
    return ResultTable(
        head,
        [cells(row) for row in result.rows],
        f"{result.requests} requests arriving {arriving}, {result.new_tokens} tokens each, "
        f"{count(result.contexts, 'context')} over {result.corpus_chunks} chunks: {result.about}",
    )


@options.bench(serve_table, rounds=1, ratio=0.3, encoding=options.OMIT)
def serve(
    timed: TimedModel,
    workload: Workload,
    requests: options.Count = 16,
    new_tokens: options.Count = 64,
    corpus_chunks: options.Count = 20,
    contexts: Annotated[
        int, typer.Option(help="Different contexts of the questions; 0: each its own.", min=0)
    ] = 0,
    poisson: Annotated[
        bool, typer.Option("--poisson", help="Arrivals at random, not all at once.")
    ] = False,
    only: Annotated[
        str, typer.Option(help="Only the ways whose names begin so, such as blend.")
    ] = "",
    tick: Tick = silent,
) -> ServeResult:
    adapter = timed.adapter
    workload.check(adapter)
    if corpus_chunks < workload.chunks:
        raise InvalidInputError(
            f"{corpus_chunks} chunks in the corpus, expected at least the {workload.chunks} of a prompt"
        )
    contexts = min(contexts or requests, requests)
    with (
        scratch() as root,
        BlendEngine(
            adapter, root / "store", policy=workload.policy, schedule=workload.schedule,
            ratio=workload.ratio, chunk_tokens=max(64, workload.chunk_tokens), learn=False,
        ) as engine,
    ):  # fmt: skip
        tick("storing the corpus")
        texts = _texts(engine, workload, corpus_chunks)
        engine.library.add([Entry(str(i), text) for i, text in enumerate(texts)], embed=False)
        prompts = _prompts(texts, workload, requests, contexts)
        ways, rates, in_time_s = (_at_random if poisson else _at_once)(
            _Asking(engine, prompts, new_tokens), tick
        )
        baseline = ARRIVING_BASELINE if poisson else BASELINE
        ways = {way: run for way, run in ways.items() if way.startswith(only)}
        if baseline not in ways:
            raise InvalidInputError(
                f"only {only!r} leaves out {baseline!r}, with which the others are compared; use a "
                "beginning of its name, or nothing"
            )
        found = run_rounds(ways, workload.rounds, tick, warm_up=False)
    base = median(one.seconds for one in found[baseline])
    rows = tuple(_row(way, found[way], base, rates.get(way), in_time_s) for way in ways)
    return ServeResult(
        **conditions(adapter, workload, "disk"), requests=requests, new_tokens=new_tokens,
        corpus_chunks=corpus_chunks, contexts=contexts, rows=rows,
    )  # fmt: skip


Ways = dict[str, Callable[[], Served]]


@dataclass(frozen=True)
class _Asking:
    """Answers all prompts."""

    engine: BlendEngine
    prompts: Sequence[str]
    new_tokens: int

    def options(self, mode: Mode) -> Options:
        return Options(
            mode=mode, max_new_tokens=self.new_tokens, apply_chat_template=False,
            generate={"min_new_tokens": self.new_tokens},
        )  # fmt: skip

    def one_by_one(self, mode: Mode, arrivals: Sequence[float] = ()) -> Served:
        with mock.patch.object(exact_prefixes, "MARGIN", math.inf):
            return self._served(mode, arrivals, 1)

    def together(self, mode: Mode, arrivals: Sequence[float] = ()) -> Served:
        return self._served(mode, arrivals, len(self.prompts))

    def unshared(self, mode: Mode) -> Served:
        """Together, each request with KV of its own."""
        with (
            mock.patch.object(chunk_pool, "MIN_SHARED_TOKENS", sys.maxsize),
            mock.patch.object(exact_prefixes, "MARGIN", math.inf),
        ):
            return self.together(mode)

    def _served(self, mode: Mode, arrivals: Sequence[float], running: int) -> Served:
        """Answer all, of which at most ``running`` run at the same time."""
        engine, asked = self.engine, self.options(mode)
        engine._prefixes.close()  # what another way has left there
        engine.settings = engine.settings.model_copy(update={"max_running": running})
        began = time.perf_counter()

        def answer(prompt: str, at: float) -> Answer:
            time.sleep(max(0.0, began + at - time.perf_counter()))
            return engine.generate(prompt, asked)

        with ThreadPoolExecutor(len(self.prompts)) as pool:
            answers = list(pool.map(answer, self.prompts, arrivals or [0.0] * len(self.prompts)))
        seconds = time.perf_counter() - began
        for answered in answers:
            reuses = bool(answered.metrics.reused_tokens)
            if answered.metrics.new_tokens != self.new_tokens or reuses == (mode == "full"):
                raise MeasuredNothingError(
                    "an answer is too short, or its KV was not used as asked"
                )
        return Served(seconds, answers)

    def stock(self) -> Served:
        """Tokens by ``generate_batch``, which shares prefixes of prompts."""
        asked = Options(apply_chat_template=False)
        ids = [list(self.engine.segments(prompt, asked).ids) for prompt in self.prompts]
        config = GenerationConfig(
            max_new_tokens=self.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        longest = max(map(len, ids)) + self.new_tokens
        batching = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS, num_blocks=len(ids) * (longest // PAGE_TOKENS + 2)
        )
        began = time.perf_counter()
        found = self.engine.adapter.model.generate_batch(
            ids, config, continuous_batching_config=batching, warmup=False
        )
        seconds = time.perf_counter() - began
        if any(len(one.generated_tokens) != self.new_tokens for one in found.values()):
            raise MeasuredNothingError("transformers' continuous batching gave too short an answer")
        return Served(seconds)


def _at_once(asking: _Asking, tick: Tick) -> tuple[Ways, dict[str, float], float | None]:
    ways: Ways = {}
    for mode in typing.cast(tuple[Mode, ...], ("full", "blend")):
        ways[f"{mode}, one by one"] = partial(asking.one_by_one, mode)
        ways[f"{mode}, together"] = partial(asking.together, mode)
    ways["blend, together, nothing shared"] = partial(asking.unshared, "blend")
    ways["transformers' continuous batching"] = asking.stock
    return ways, {}, None


def _at_random(asking: _Asking, tick: Tick) -> tuple[Ways, dict[str, float], float | None]:
    """The ways, the rates of their arrivals, and twice the TTFT of a lone full prefill."""
    tick("a full prefill alone")
    alone = asking.engine.generate(asking.prompts[0], asking.options("full")).metrics
    gaps = np.random.default_rng(0).exponential(size=len(asking.prompts))
    arrivals = np.cumsum(gaps) - gaps[0]  # at rate 1
    rate = doubling_rate(arrivals, alone.ttft_s, alone.total_s)
    ways: Ways = {ARRIVING_BASELINE: partial(asking.one_by_one, "full", list(arrivals / rate))}
    rates = {ARRIVING_BASELINE: rate}
    for more in RATES:
        way = f"blend, together, {more} × the rate"
        ways[way] = partial(asking.together, "blend", list(arrivals / (more * rate)))
        rates[way] = more * rate
    return ways, rates, 2 * alone.ttft_s


def doubling_rate(arrivals: Sequence[float], ttft_s: float, total_s: float) -> float:
    """The rate per second at which requests that are answered one by one have a mean TTFT of twice
    ``ttft_s``; ``arrivals`` are those at a rate of 1."""

    def mean_wait(rate: float) -> float:
        free, waited = 0.0, []
        for at in arrivals:
            waited.append(max(0.0, free - at / rate))
            free = max(free, at / rate) + total_s
        return float(np.mean(waited))

    low, high = 1e-3 / total_s, 100 / total_s
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_wait(middle) <= ttft_s else (low, middle)
    return low


def _texts(engine: BlendEngine, workload: Workload, count: int) -> list[str]:
    """Chunks of words in random order."""
    read = (path.read_text(encoding="utf-8") for path in demo_corpus_path().rglob("*.txt"))
    words = sorted(set(" ".join(read).split()))
    decode = engine.resources.tokens.tokenizer.decode
    texts = []
    for number in range(count):
        drawn = random.Random(number).choices(words, k=workload.chunk_tokens)
        texts.append(
            decode(engine.resources.text_ids(" ".join(drawn))[: workload.chunk_tokens - 4])
        )
    return [text.strip() for text in texts]


def _prompts(texts: Sequence[str], workload: Workload, requests: int, contexts: int) -> list[str]:
    """Questions over ``contexts`` sequences of chunks, which are chosen by Zipf's law."""
    generator = np.random.default_rng(1)
    weights = 1 / np.arange(1, len(texts) + 1)
    weights /= weights.sum()
    chosen = [
        generator.choice(len(texts), workload.chunks, replace=False, p=weights)
        for _ in range(contexts)
    ]
    prompts = []
    for number in range(requests):
        question = "what " * (workload.question_tokens - 5) + f"in {number}?"
        context = (texts[i] for i in chosen[number % contexts])
        prompts.append("\n\n".join([*context, f"Question: {question}"]))
    return prompts


def _row(
    way: str, served: Sequence[Served], base: float, rate: float | None, in_time_s: float | None
) -> ServeRow:
    seconds = median(one.seconds for one in served)
    metrics = [answer.metrics for one in served for answer in one.answers]
    if not metrics:
        return ServeRow(way, rate, seconds, base / seconds, None, None, None, None)
    ttft = [each.ttft_s for each in metrics]
    between = [(m.total_s - m.ttft_s) / max(1, m.new_tokens - 1) for m in metrics]
    in_time = None if in_time_s is None else float(np.mean([s <= in_time_s for s in ttft]))
    return ServeRow(
        way, rate, seconds, base / seconds, float(np.mean(ttft)), float(np.quantile(ttft, 0.95)),
        1e3 * median(between), in_time,
    )  # fmt: skip
