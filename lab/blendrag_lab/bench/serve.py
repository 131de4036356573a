"""``blendrag bench serve``: whole answers to requests of many users, over one corpus.

Arriving together: answered one by one and together, in modes ``full`` and ``blend``, and together without
sharing KV; transformers' continuous batching answers the same prompts. Chunks are chosen with a skew, so that
requests share some of them.

Arriving at random: at the rate at which the mean TTFT of full prefill, one by one, is twice that of a lone
request, and at multiples of it.

In a closed loop: each of so many users asks the next question when the last one is answered; under the policy
of the scheduler, and under the two extremes between which it lies.
"""

from __future__ import annotations

import math
import random
import sys
import time
import typing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any
from unittest import mock

import numpy as np
import typer
from transformers import ContinuousBatchingConfig, GenerationConfig

from blendrag.cli.output import count
from blendrag.config import DecodeWeights, Mode
from blendrag.corpus.documents import Entry
from blendrag.demo import demo_corpus_path
from blendrag.engine import Answer, BlendEngine, Options, exact_prefixes
from blendrag.errors import InvalidInputError
from blendrag.model import ModelAdapter
from blendrag.serving import chunk_pool, scheduler
from blendrag.serving.chunk_pool import ChunkPool, RequestKV
from blendrag.serving.shared_attention import SharedChunk
from blendrag_lab.bench import options
from blendrag_lab.bench.geometry import TimedModel
from blendrag_lab.bench.rounds import MeasuredNothingError, Tick, run_rounds, silent
from blendrag_lab.bench.scratch import scratch
from blendrag_lab.bench.workload import BlendResult, Workload, conditions, whole_numbers
from blendrag_lab.tables import NOTHING, ResultTable, figure, times

#: What the others are compared with.
BASELINE = "blend, one by one"
ARRIVING_BASELINE = "full, one by one"
LOOP_BASELINE = "blend, 1 user"
#: The scheduler's constants where all prefills come first, and where none begins while an answer runs; what
#: came first begins first.
EXTREMES: dict[str, dict[str, Any]] = {
    "prefills first": {"PREFILL_PER_STEP": math.inf, "ANSWERS_SHARE": 0, "MAX_OVERTAKEN": 0},
    "answers first": {"ANSWERS_SHARE": math.inf, "MAX_OVERTAKEN": 0},
}
#: Rates of arrivals for blend, as multiples of the one for full prefill.
RATES = (1, 4)
#: Tokens in a page of transformers' continuous batching, its default.
PAGE_TOKENS = 256
#: Most tokens of its steps, its default if there is memory.
STEP_TOKENS = 8192


@dataclass(frozen=True)
class ServeRow:
    """Medians of the rounds."""

    way: str
    rate: float | None
    """Arrivals per second; ``None``: not at random."""
    seconds: float
    """From the first arrival to the last token."""
    over_baseline: float
    """Requests per second, against that of :attr:`ServeResult.baseline`."""
    ttft_s: float | None = None
    """Mean."""
    p95_ttft_s: float | None = None
    prefill_s: float | None = None
    """TTFT without waiting for earlier requests, mean."""
    token_ms: float | None = None
    """Between two tokens of a request."""
    p95_token_ms: float | None = None
    p95_total_s: float | None = None
    """From the question to the last token."""
    in_time: float | None = None
    """Share of requests whose first token came within twice the TTFT of a lone full prefill."""
    kv_bytes: int | None = None
    """Most KV that requests that decode together held, chunks included; ``None`` if none did."""
    private_kv_bytes: int | None = None
    """Most KV that they would have held with all of it for themselves."""


@dataclass(frozen=True, kw_only=True)
class ServeResult(BlendResult):
    requests: int
    new_tokens: int
    corpus_chunks: int
    contexts: int
    arriving: str
    baseline: str
    rows: tuple[ServeRow, ...]


@dataclass(frozen=True)
class ServedRound:
    seconds: float
    answers: Sequence[Answer] = ()
    kv_bytes: int | None = None
    private_kv_bytes: int | None = None


def serve_table(result: ServeResult) -> ResultTable:
    at_random = result.rows[0].rate is not None
    in_loop = result.baseline == LOOP_BASELINE

    def shown(value: float | None) -> str:
        return NOTHING if value is None else figure(value)

    def cells(row: ServeRow) -> tuple[str, ...]:
        rate = () if row.rate is None else (f"{row.rate:.3g}",)
        in_time = () if row.in_time is None else (f"{row.in_time:.0%}",)
        of_users = (shown(row.p95_token_ms), shown(row.p95_total_s)) if in_loop else ()
        kv = (NOTHING, NOTHING)
        if row.kv_bytes is not None and row.private_kv_bytes is not None:
            kv = figure(row.kv_bytes / 2**20), f"{row.kv_bytes / row.private_kv_bytes:.0%}"
        return (
            row.way, *rate, f"{result.requests / row.seconds:.3g}", times(row.over_baseline),
            shown(row.ttft_s), shown(row.p95_ttft_s), *in_time, shown(row.prefill_s), shown(row.token_ms),
            *of_users, *kv,
        )  # fmt: skip

    head: tuple[str, ...] = (
        "way", "arrivals/s", "answers/s", f"over {result.baseline}", "TTFT s", "95% of TTFT s", "in time",
        "prefill s", "ms per token", "95% of ms per token", "95% of answers s", "KV MiB",
        "of private copies",
    )  # fmt: skip
    left_out: tuple[str, ...] = () if at_random else ("arrivals/s", "in time")
    left_out += () if in_loop else ("95% of ms per token", "95% of answers s")
    head = tuple(name for name in head if name not in left_out)
    return ResultTable(
        head,
        [cells(row) for row in result.rows],
        f"{result.requests} requests {result.arriving}, {result.new_tokens} tokens each, "
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
        int, options.number("Different contexts of the questions; 0: each its own.", 0, kind=int)
    ] = 0,
    poisson: Annotated[
        bool, typer.Option("--poisson", help="Arrivals at random, not all at once.")
    ] = False,
    users: Annotated[
        str,
        typer.Option(
            help="A closed loop with so many users, such as 1,4, who ask when they have an answer."
        ),
    ] = "",
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
    if poisson and users:
        raise InvalidInputError("--poisson and --users, expected one of them")
    loops = whole_numbers(users, "users", "1,4") if users else []
    with scratch() as root:
        asking = ServeRunner(adapter, workload, root / "store", new_tokens)
        with asking.engine() as engine:
            tick("storing the corpus")
            texts = corpus_texts(engine, workload, corpus_chunks)
            engine.library.add([Entry(str(i), text) for i, text in enumerate(texts)], embed=False)
        asking = replace(asking, prompts=prompts_over(texts, workload, requests, contexts))
        rates: dict[str, float] = {}
        in_time_s: float | None = None
        if poisson:
            arriving, baseline = "arriving at random", ARRIVING_BASELINE
            ways, rates, in_time_s = _at_random(asking, tick)
        elif loops:
            arriving, baseline = "in a closed loop", LOOP_BASELINE
            ways = _in_loops(asking, loops)
        else:
            arriving, baseline = "arriving together", BASELINE
            ways = _at_once(asking)
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
        corpus_chunks=corpus_chunks, contexts=contexts, arriving=arriving, baseline=baseline, rows=rows,
    )  # fmt: skip


Ways = dict[str, Callable[[], ServedRound]]


@dataclass(frozen=True)
class ServeRunner:
    """Answers all prompts, each time by a new engine, in which others have left nothing."""

    adapter: ModelAdapter
    workload: Workload
    store: Path
    new_tokens: int
    prompts: Sequence[str] = ()
    ram_bytes: int | None = None
    """Limit of the memory tier; ``None``: the default."""
    decode_weights: DecodeWeights = "native"

    @contextmanager
    def engine(self, running: int = 1) -> Iterator[BlendEngine]:
        """At most ``running`` requests run at the same time."""
        workload = self.workload
        with BlendEngine(
            self.adapter, self.store, policy=workload.policy, schedule=workload.schedule,
            ratio=workload.ratio, chunk_tokens=max(64, workload.chunk_tokens), learn=False,
            ram_bytes=self.ram_bytes, decode_weights=self.decode_weights,
        ) as engine:  # fmt: skip
            engine.scheduler.max_running = running
            yield engine

    def options(self, mode: Mode) -> Options:
        return Options(
            mode=mode, max_new_tokens=self.new_tokens, apply_chat_template=False,
            generate_kwargs={"min_new_tokens": self.new_tokens},
        )  # fmt: skip

    def one_by_one(self, mode: Mode, arrivals: Sequence[float] = ()) -> ServedRound:
        with mock.patch.object(exact_prefixes, "MARGIN", math.inf):
            return self._served(mode, arrivals, running=1)

    def together(self, mode: Mode, arrivals: Sequence[float] = ()) -> ServedRound:
        return self._served(mode, arrivals)

    def loop(self, mode: Mode, users: int, extreme: str = "") -> ServedRound:
        """Under the policy of the scheduler, or under one of :data:`EXTREMES`."""
        with mock.patch.multiple(scheduler, **EXTREMES[extreme]) if extreme else nullcontext():
            return self._served(mode, users=users)

    def unshared(self, mode: Mode) -> ServedRound:
        """Together, each request with KV of its own."""
        with (
            mock.patch.object(chunk_pool, "MIN_SHARED_TOKENS", sys.maxsize),
            mock.patch.object(exact_prefixes, "MARGIN", math.inf),
        ):
            return self.together(mode)

    def _served(
        self,
        mode: Mode,
        arrivals: Sequence[float] = (),
        running: int | None = None,
        users: int | None = None,
    ) -> ServedRound:
        """Answer all, of which at most ``running`` run at the same time and ``users`` have been asked."""
        count, asked = len(self.prompts), self.options(mode)
        with self.engine(running or count) as engine, _kv_of_steps() as tokens:
            engine.open()
            began = time.perf_counter()

            def answer(prompt: str, at: float) -> Answer:
                time.sleep(max(0.0, began + at - time.perf_counter()))
                return engine.generate(prompt, asked)

            with ThreadPoolExecutor(users or count) as pool:
                answers = list(pool.map(answer, self.prompts, arrivals or [0.0] * count))
            seconds = time.perf_counter() - began
        for answered in answers:
            reuses = bool(answered.metrics.reused_tokens)
            if answered.metrics.new_tokens != self.new_tokens or reuses == (mode == "full"):
                raise MeasuredNothingError(
                    "an answer is too short, or its KV was not used as asked"
                )
        if not tokens:
            return ServedRound(seconds, answers)
        held, private = map(self.adapter.layout.size_bytes, map(max, zip(*tokens, strict=True)))
        return ServedRound(seconds, answers, held, private)

    def stock(self) -> ServedRound:
        """Tokens by ``generate_batch``, which shares prefixes of prompts."""
        asked = Options(apply_chat_template=False)
        with self.engine() as engine:
            ids = [list(engine.segments(prompt, asked).ids) for prompt in self.prompts]
        config = GenerationConfig(
            max_new_tokens=self.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        longest = max(map(len, ids)) + self.new_tokens
        batching = ContinuousBatchingConfig(
            num_blocks=len(ids) * (longest // PAGE_TOKENS + 2),
            max_batch_tokens=min(STEP_TOKENS, sum(map(len, ids))),
        )
        began = time.perf_counter()
        found = self.adapter.model.generate_batch(
            ids, config, continuous_batching_config=batching, warmup=False
        )
        seconds = time.perf_counter() - began
        if any(len(one.generated_tokens) != self.new_tokens for one in found.values()):
            raise MeasuredNothingError("transformers' continuous batching gave too short an answer")
        return ServedRound(seconds)


def _kv_tokens(requests: Sequence[RequestKV]) -> tuple[int, int]:
    """For how many tokens ``requests`` hold KV, and for how many they would if each had its own. Both count
    the room for new tokens."""
    held = private = 0
    chunks: set[SharedChunk] = set()
    for one in requests:
        if one.running is None:
            own, shared = one.cache.get_seq_length() + one.cache.room, 0
        else:
            own, shared = one.running.room, sum(each.visible for each in one.running.held)
            chunks.update(each.chunk for each in one.running.held)
        held += own
        private += own + shared
    return held + sum(chunk.tokens for chunk in chunks), private


@contextmanager
def _kv_of_steps() -> Iterator[list[tuple[int, int]]]:
    """A list that gets :func:`_kv_tokens` of each joint step, before newcomers share their chunks."""
    tokens: list[tuple[int, int]] = []
    stock = ChunkPool.share

    def share(pool: ChunkPool, requests: Sequence[RequestKV]) -> None:
        if len(requests) > 1:
            tokens.append(_kv_tokens(requests))
        stock(pool, requests)

    with mock.patch.object(ChunkPool, "share", share):
        yield tokens


def _at_once(asking: ServeRunner) -> Ways:
    ways: Ways = {}
    for mode in typing.cast(tuple[Mode, ...], ("full", "blend")):
        ways[f"{mode}, one by one"] = partial(asking.one_by_one, mode)
        ways[f"{mode}, together"] = partial(asking.together, mode)
    ways["blend, together, nothing shared"] = partial(asking.unshared, "blend")
    ways["transformers' continuous batching"] = asking.stock
    return ways


def _in_loops(asking: ServeRunner, loops: Sequence[int]) -> Ways:
    ways: Ways = {LOOP_BASELINE: partial(asking.loop, "blend", 1)}
    for users in loops:
        if users > 1:
            way = f"blend, {count(users, 'user')}"
            ways[way] = partial(asking.loop, "blend", users)
            for extreme in EXTREMES:
                ways[f"{way}, {extreme}"] = partial(asking.loop, "blend", users, extreme)
    return ways


def _at_random(asking: ServeRunner, tick: Tick) -> tuple[Ways, dict[str, float], float]:
    """The ways, the rates of their arrivals, and twice the TTFT of a lone full prefill."""
    tick("a full prefill alone")
    with asking.engine() as engine:
        alone = engine.generate(asking.prompts[0], asking.options("full")).metrics
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


def corpus_texts(engine: BlendEngine, workload: Workload, count: int) -> list[str]:
    """Chunks of words in random order."""
    read = (path.read_text(encoding="utf-8") for path in demo_corpus_path().rglob("*.txt"))
    words = sorted(set(" ".join(read).split()))
    decode = engine.tokens.tokenizer.decode
    texts = []
    for number in range(count):
        drawn = random.Random(number).choices(words, k=workload.chunk_tokens)
        texts.append(
            decode(engine.tokens.encode_text(" ".join(drawn))[: workload.chunk_tokens - 4])
        )
    return [text.strip() for text in texts]


def prompts_over(
    texts: Sequence[str], workload: Workload, requests: int, contexts: int
) -> list[str]:
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
    way: str,
    served: Sequence[ServedRound],
    base: float,
    rate: float | None,
    in_time_s: float | None,
) -> ServeRow:
    seconds = median(one.seconds for one in served)
    metrics = [answer.metrics for one in served for answer in one.answers]
    if not metrics:
        return ServeRow(way, rate, seconds, base / seconds)
    ttft = [each.ttft_s for each in metrics]
    between = [(m.total_s - m.ttft_s) / max(1, m.new_tokens - 1) for m in metrics]
    in_time = None if in_time_s is None else float(np.mean([s <= in_time_s for s in ttft]))
    return ServeRow(
        way, rate, seconds, base / seconds, float(np.mean(ttft)), float(np.quantile(ttft, 0.95)),
        float(np.mean([each.ttft_s - each.queued_s for each in metrics])), 1e3 * median(between),
        1e3 * float(np.quantile(between, 0.95)),
        float(np.quantile([each.total_s for each in metrics], 0.95)), in_time,
        max((one.kv_bytes for one in served if one.kv_bytes), default=None),
        max((one.private_kv_bytes for one in served if one.private_kv_bytes), default=None),
    )  # fmt: skip
