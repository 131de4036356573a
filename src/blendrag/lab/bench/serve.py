"""``blendrag bench serve``: whole answers to requests that arrive together or at random, over one corpus.

One engine answers them one by one and together, in modes ``full`` and ``blend``; transformers' continuous
batching answers the same prompts. Chunks are chosen with a skew, so that requests share some of them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Annotated

import numpy as np
import typer
from transformers import ContinuousBatchingConfig, GenerationConfig

from blendrag.corpus.documents import Entry
from blendrag.demo import demo_corpus_path
from blendrag.engine import Answer, BlendEngine, Options
from blendrag.errors import InvalidInputError
from blendrag.lab.bench import options
from blendrag.lab.bench.geometry import TimedModel
from blendrag.lab.bench.rounds import MeasuredNothingError, Tick, run_rounds, silent
from blendrag.lab.bench.scratch import scratch
from blendrag.lab.bench.workload import BlendResult, Workload, conditions
from blendrag.lab.tables import NOTHING, ResultTable, figure, times

#: What the others are compared with.
BASELINE = "blend, one by one"
#: Of the paged cache of transformers' continuous batching, its default.
PAGE_TOKENS = 256


@dataclass(frozen=True)
class ServeRow:
    """Medians of the rounds."""

    way: str
    seconds: float
    """From the first arrival to the last token."""
    over_baseline: float
    """Requests per second, against :data:`BASELINE`."""
    ttft_s: float | None
    p95_ttft_s: float | None
    token_ms: float | None
    """Between two tokens of a request."""


@dataclass(frozen=True, kw_only=True)
class ServeResult(BlendResult):
    requests: int
    new_tokens: int
    corpus_chunks: int
    rate: float
    rows: tuple[ServeRow, ...]


@dataclass(frozen=True)
class Served:
    seconds: float
    answers: Sequence[Answer] = ()


def serve_table(result: ServeResult) -> ResultTable:
    arriving = f"arriving at {result.rate:g} per s" if result.rate else "arriving together"

    def seconds(value: float | None) -> str:
        return NOTHING if value is None else figure(value)

    return ResultTable(
        ("way", "requests/s", f"over {BASELINE}", "TTFT s", "95% of TTFT s", "ms per token"),
        [
            (row.way, figure(result.requests / row.seconds), times(row.over_baseline),
             seconds(row.ttft_s), seconds(row.p95_ttft_s), seconds(row.token_ms))
            for row in result.rows
        ],
        f"{result.requests} requests {arriving}, {result.new_tokens} tokens each, over "
        f"{result.corpus_chunks} chunks: {result.about}",
    )  # fmt: skip


@options.bench(serve_table, rounds=1, ratio=0.3, encoding=options.OMIT)
def serve(
    timed: TimedModel,
    workload: Workload,
    requests: options.Count = 16,
    new_tokens: options.Count = 64,
    corpus_chunks: options.Count = 20,
    rate: Annotated[
        float, typer.Option(help="Requests per second, at random; 0: all at once.", min=0)
    ] = 0.0,
    tick: Tick = silent,
) -> ServeResult:
    adapter = timed.adapter
    workload.check(adapter)
    if corpus_chunks < workload.chunks:
        raise InvalidInputError(
            f"{corpus_chunks} chunks in the corpus, expected at least the {workload.chunks} of a prompt"
        )
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
        prompts = _prompts(texts, workload, requests)
        gaps = np.random.default_rng(0).exponential(1 / rate if rate else 0.0, requests)
        arrivals = np.cumsum(gaps) - gaps[0]
        asked = partial(Options, max_new_tokens=new_tokens, apply_chat_template=False,
                        generate={"min_new_tokens": new_tokens})  # fmt: skip
        ways: dict[str, Callable[[], Served]] = {}
        for mode in ("full", "blend"):
            given = asked(mode=mode)
            ways[f"{mode}, one by one"] = partial(_served, engine, prompts, given, arrivals, 1)
            ways[f"{mode}, together"] = partial(_served, engine, prompts, given, arrivals, requests)
        if not rate:
            ways["transformers' continuous batching"] = partial(_stock, engine, prompts, new_tokens)
        found = run_rounds(ways, workload.rounds, tick, warm_up=False)
    base = median(one.seconds for one in found[BASELINE])
    rows = tuple(_row(way, served, base) for way, served in found.items())
    return ServeResult(
        **conditions(adapter, workload, "disk"), requests=requests, new_tokens=new_tokens,
        corpus_chunks=corpus_chunks, rate=rate, rows=rows,
    )  # fmt: skip


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


def _prompts(texts: Sequence[str], workload: Workload, count: int) -> list[str]:
    generator = np.random.default_rng(1)
    weights = 1 / np.arange(1, len(texts) + 1)
    prompts = []
    for number in range(count):
        chosen = generator.choice(
            len(texts), workload.chunks, replace=False, p=weights / weights.sum()
        )
        question = "what " * (workload.question_tokens - 5) + f"in {number}?"
        prompts.append("\n\n".join([*(texts[i] for i in chosen), f"Question: {question}"]))
    return prompts


def _served(
    engine: BlendEngine,
    prompts: Sequence[str],
    asked: Options,
    arrivals: Sequence[float],
    running: int,
) -> Served:
    """Answer all, of which at most ``running`` run at the same time."""
    engine.settings = engine.settings.model_copy(update={"max_running": running})
    began = time.perf_counter()

    def answer(prompt: str, at: float) -> Answer:
        time.sleep(max(0.0, began + at - time.perf_counter()))
        return engine.generate(prompt, asked)

    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(answer, prompts, arrivals))
    seconds = time.perf_counter() - began
    for answered in answers:
        reuses = bool(answered.metrics.reused_tokens)
        if answered.metrics.new_tokens != asked.max_new_tokens or reuses == (asked.mode == "full"):
            raise MeasuredNothingError("an answer is too short, or its KV was not used as asked")
    return Served(seconds, answers)


def _stock(engine: BlendEngine, prompts: Sequence[str], new_tokens: int) -> Served:
    """Tokens by ``generate_batch``, which shares prefixes of prompts."""
    asked = Options(apply_chat_template=False)
    ids = [list(engine.segments(prompt, asked).ids) for prompt in prompts]
    config = GenerationConfig(
        max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    longest = max(map(len, ids)) + new_tokens
    batching = ContinuousBatchingConfig(
        page_size=PAGE_TOKENS, num_blocks=len(ids) * (longest // PAGE_TOKENS + 2)
    )
    began = time.perf_counter()
    found = engine.adapter.model.generate_batch(
        ids, config, continuous_batching_config=batching, warmup=False
    )
    seconds = time.perf_counter() - began
    if any(len(one.generated_tokens) != new_tokens for one in found.values()):
        raise MeasuredNothingError("transformers' continuous batching gave too short an answer")
    return Served(seconds)


def _row(way: str, served: Sequence[Served], base: float) -> ServeRow:
    seconds = median(one.seconds for one in served)
    metrics = [answer.metrics for one in served for answer in one.answers]
    if not metrics:
        return ServeRow(way, seconds, base / seconds, None, None, None)
    ttft = [each.ttft_s for each in metrics]
    between = [(m.total_s - m.ttft_s) / max(1, m.new_tokens - 1) for m in metrics]
    return ServeRow(
        way, seconds, base / seconds, median(ttft), float(np.quantile(ttft, 0.95)),
        1e3 * median(between),
    )  # fmt: skip
