"""``blendrag bench answer``: time to the first and to the last token of one answer.

The engine answers in modes full, blend and reuse. transformers' ``generate`` answers the same tokens, and so
does llama.cpp, if ``llama-cpp-python`` is installed and a GGUF file of the model is given. A request's time
begins with the tokenised prompt for these two, and with its text for the engine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, cast
from unittest import mock

import torch
import typer
from transformers.generation.streamers import BaseStreamer

from blendrag.config import Mode, settings
from blendrag.corpus.documents import Entry
from blendrag.engine import BlendEngine, Options, exact_prefixes
from blendrag.errors import InvalidInputError
from blendrag_lab.bench import options
from blendrag_lab.bench.geometry import TimedModel
from blendrag_lab.bench.rounds import MeasuredNothingError, Tick, Timing, run_rounds, silent
from blendrag_lab.bench.scratch import scratch
from blendrag_lab.bench.serve import ServeRunner, corpus_texts, prompts_over
from blendrag_lab.bench.workload import BlendResult, Workload, conditions
from blendrag_lab.plots import COLOURS, GREY, STYLE
from blendrag_lab.tables import ResultTable, figure, table, times

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STOCK, LLAMA_CPP = "stock transformers", "llama.cpp"
#: How the names of the engine's ways begin.
ENGINE = "blendrag, "
MODES = cast(tuple[Mode, ...], ("full", "blend", "reuse"))
#: Prompt tokens that llama.cpp computes at a time.
LLAMA_CPP_BATCH = 512


@dataclass(frozen=True)
class AnswerTimes:
    first_s: float
    last_s: float
    weights: str = ""
    """What the engine decoded with."""


@dataclass(frozen=True)
class AnswerRow:
    way: str
    first_ms: Timing
    last_ms: Timing
    token_ms: float
    """Between two tokens; the median of the rounds."""
    fastest_from: int | None
    """Number of new tokens from which this is the fastest way; ``None``: for none up to the context."""
    fastest_to: int | None
    """The last such number; ``None``: up to the context."""
    weights: str = ""
    """What the engine decoded with; empty for the others."""


@dataclass(frozen=True, kw_only=True)
class AnswerResult(BlendResult):
    prompt_tokens: int
    new_tokens: int
    gguf: str | None
    rows: tuple[AnswerRow, ...]


def answer_table(result: AnswerResult) -> ResultTable:
    stock = next(row for row in result.rows if row.way == STOCK)

    def fastest(row: AnswerRow) -> str:
        if row.fastest_from is None:
            return "never"
        if row.fastest_to is None:
            return "always" if row.fastest_from == 1 else f"from {row.fastest_from:,} on"
        return f"{row.fastest_from:,} to {row.fastest_to:,}"

    gguf = f", {result.gguf} in llama.cpp" if result.gguf else ""
    return table(
        [
            ("way", lambda row: row.way + f", {row.weights} weights" * bool(row.weights)),
            ("first token, ms (lowest to highest)", lambda row: str(row.first_ms)),
            ("over stock", lambda row: times(stock.first_ms.median / row.first_ms.median)),
            ("ms per token", lambda row: figure(row.token_ms)),
            (f"{result.new_tokens} tokens, ms (lowest to highest)", lambda row: str(row.last_ms)),
            ("over stock", lambda row: times(stock.last_ms.median / row.last_ms.median)),
            ("fastest for so many tokens", fastest),
        ],
        result.rows,
        f"{result.prompt_tokens:,} + {result.new_tokens} tokens: {result.about}{gguf}",
    )


def answer_figure(result: AnswerResult) -> Figure:
    """A bar of each way: its first token, and then the others."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=(9.0, 0.6 + 0.45 * len(result.rows)), layout="constrained")
        axes = drawn.subplots()
        for lane, row in enumerate(result.rows):
            first_s, last_s = row.first_ms.median / 1e3, row.last_ms.median / 1e3
            ours = row.way.startswith("blendrag")
            colours = (COLOURS[1], COLOURS[4]) if ours else (GREY, "#bdbdbd")
            axes.barh(lane, first_s, 0.7, color=colours[0])
            axes.barh(lane, last_s - first_s, 0.7, left=first_s, color=colours[1])
            axes.annotate(
                f"first token {first_s:.3g} s, {result.new_tokens} tokens {last_s:.3g} s", (last_s, lane),
                (6, 0), textcoords="offset points", va="center",
            )  # fmt: skip
        axes.set_yticks(range(len(result.rows)), [row.way for row in result.rows])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        longest = max(row.last_ms.median for row in result.rows) / 1e3
        axes.set(xlabel="seconds after the question", xlim=(0, 1.4 * longest))
        axes.set_title(f"{result.model}: a prompt of {result.prompt_tokens:,} tokens", loc="left")
    return drawn


@options.bench(answer_table, answer_figure, rounds=3, ratio=0.3, encoding=options.OMIT)
def answer(
    timed: TimedModel,
    workload: Workload,
    new_tokens: Annotated[int, options.number("Tokens of the answer.", 2, kind=int)] = 64,
    tier: Annotated[str, typer.Option(help="memory or disk.")] = "disk",
    decode_weights: Annotated[
        str | None, typer.Option(help="auto, native, int8 or int4.", show_default=False)
    ] = None,
    gguf: Annotated[
        Path | None, typer.Option(help="GGUF file of the model, for llama.cpp.", show_default=False)
    ] = None,
    tick: Tick = silent,
) -> AnswerResult:
    if tier not in ("memory", "disk"):
        raise InvalidInputError(f"tier {tier!r} is not one of memory, disk; choose one of them")
    llama = None if gguf is None else llama_class()
    adapter = timed.adapter
    workload.check(adapter)
    with scratch() as root, ExitStack() as stack:
        ram_bytes = None if tier == "memory" else 0
        asking = ServeRunner(
            adapter, workload, root / "store", new_tokens,
            ram_bytes=ram_bytes, decode_weights=cast(Any, decode_weights or settings().decode_weights),
        )  # fmt: skip
        engine = stack.enter_context(asking.engine())
        tick("storing the chunks")
        texts = corpus_texts(engine, workload, workload.chunks)
        engine.library.add([Entry(str(i), text) for i, text in enumerate(texts)], embed=False)
        (prompt,) = prompts_over(texts, workload, 1, 1)
        ids = list(engine.segments(prompt, asking.options("full")).ids)
        ways: dict[str, Callable[[], AnswerTimes]] = {}
        for mode in MODES:
            shown = f"blend, r = {workload.ratio:g}" if mode == "blend" else mode
            ways[f"{ENGINE}{shown}"] = partial(_engine, engine, prompt, asking.options(mode))
        ways[STOCK] = partial(_stock, adapter.model, ids, new_tokens)
        if llama is not None and gguf is not None:
            tick("loading the GGUF file")
            ways[LLAMA_CPP] = stack.enter_context(LlamaCpp(llama, gguf, ids, new_tokens))
        samples = run_rounds(ways, workload.rounds, tick)
    return AnswerResult(
        **conditions(adapter, workload, tier), prompt_tokens=len(ids), new_tokens=new_tokens,
        gguf=None if gguf is None else gguf.name,
        rows=answer_rows(samples, new_tokens, adapter.context_tokens - len(ids)),
    )  # fmt: skip


def answer_rows(
    samples: Mapping[str, Sequence[AnswerTimes]], new_tokens: int, most_tokens: int
) -> tuple[AnswerRow, ...]:
    """The ways with their medians, and for how many tokens, of at most ``most_tokens``, each is fastest."""
    firsts = {way: median(one.first_s for one in found) for way, found in samples.items()}
    steps = {
        way: median((one.last_s - one.first_s) / (new_tokens - 1) for one in found)
        for way, found in samples.items()
    }
    # The engine decodes alike in all modes: differences between them are noise, and would decide the ranges.
    engines = [way for way in samples if way.startswith(ENGINE)]
    alike = dict.fromkeys(engines, median(steps[way] for way in engines)) if engines else {}
    ranges = fastest_ranges(
        {way: (firsts[way], (steps | alike)[way]) for way in samples}, most_tokens
    )
    return tuple(
        AnswerRow(
            way=way,
            first_ms=Timing.of([1e3 * one.first_s for one in found]),
            last_ms=Timing.of([1e3 * one.last_s for one in found]),
            token_ms=1e3 * steps[way],
            fastest_from=ranges.get(way, (None, None))[0],
            fastest_to=ranges.get(way, (None, None))[1],
            weights=found[-1].weights,
        )
        for way, found in samples.items()
    )


def fastest_ranges(
    lines: Mapping[str, tuple[float, float]], most: int
) -> dict[str, tuple[int, int | None]]:
    """The numbers of tokens for which each way is the fastest: from, and to (``None``: up to ``most``).

    ``lines``: seconds to the first token, and per further token.
    """
    ranges: dict[str, tuple[int, int | None]] = {}
    tokens = 1
    while tokens <= most:
        way = min(lines, key=lambda name: (_at(lines[name], tokens), lines[name][1]))
        first, step = lines[way]
        # each way with a smaller step overtakes this one after so many tokens
        overtaken = [
            int((other_first - first) / (step - other_step)) + 2
            for other_first, other_step in lines.values()
            if other_step < step
        ]
        following = min((n for n in overtaken if n > tokens), default=most + 1)
        ranges[way] = (
            ranges.get(way, (tokens, None))[0],
            None if following > most else following - 1,
        )
        tokens = following
    return ranges


def _at(line: tuple[float, float], tokens: int) -> float:
    return line[0] + (tokens - 1) * line[1]


# -- the ways ---------------------------------------------------------------------------------------


def _engine(engine: BlendEngine, prompt: str, asked: Options) -> AnswerTimes:
    with mock.patch.object(exact_prefixes, "MARGIN", math.inf):  # nothing from earlier answers
        metrics = engine.generate(prompt, asked).metrics
    if bool(metrics.reused_tokens) == (asked.mode == "full"):
        raise MeasuredNothingError("stored KV was not used as asked")
    if metrics.new_tokens != asked.max_new_tokens:
        raise MeasuredNothingError("the engine gave too short an answer")
    return AnswerTimes(metrics.ttft_s, metrics.total_s, metrics.decode_weights)


class FirstToken(BaseStreamer):
    """Notes when ``generate`` has its first new token."""

    def __init__(self) -> None:
        self._puts = 0
        self.at_s = 0.0

    def put(self, value: torch.Tensor) -> None:
        self._puts += 1
        if self._puts == 2:  # the first are the prompt's
            self.at_s = time.perf_counter()

    def end(self) -> None:
        """Nothing is held back."""


def _stock(model: Any, ids: Sequence[int], new_tokens: int) -> AnswerTimes:
    given = torch.tensor([ids], device=model.device)
    first, began = FirstToken(), time.perf_counter()
    out = model.generate(
        given, attention_mask=torch.ones_like(given), streamer=first, do_sample=False,
        min_new_tokens=new_tokens, max_new_tokens=new_tokens, pad_token_id=0,
    )  # fmt: skip
    ended = time.perf_counter()
    if out.shape[1] != len(ids) + new_tokens:
        raise MeasuredNothingError("transformers gave too short an answer")
    return AnswerTimes(first.at_s - began, ended - began)


def llama_class() -> Any:
    """``llama_cpp.Llama``; raises :class:`InvalidInputError` if it is not installed."""
    try:
        from llama_cpp import Llama
    except ImportError as exc:
        raise InvalidInputError(
            "--gguf needs llama-cpp-python, which is not installed; pip install llama-cpp-python"
        ) from exc
    return Llama


class LlamaCpp:
    """llama.cpp over the same ids, with flash attention and as many threads as torch."""

    def __init__(self, llama: Any, file: Path, ids: Sequence[int], new_tokens: int) -> None:
        if not file.is_file():
            raise InvalidInputError(
                f"--gguf {file} is not a file; expected a GGUF file of the model"
            )
        threads = torch.get_num_threads()
        self._ids, self._new_tokens = list(ids), new_tokens
        self._llama = llama(
            model_path=str(file), n_ctx=len(ids) + new_tokens, n_batch=LLAMA_CPP_BATCH,
            n_threads=threads, n_threads_batch=threads, flash_attn=True, verbose=False,
        )  # fmt: skip
        if self._llama.n_vocab() <= max(ids):
            raise InvalidInputError(
                f"--gguf {file.name} has {self._llama.n_vocab()} tokens in its vocabulary, expected a file "
                "of the same model"
            )

    def __enter__(self) -> LlamaCpp:
        return self

    def __exit__(self, *exc: object) -> None:
        self._llama.close()

    def __call__(self) -> AnswerTimes:
        llama = self._llama
        llama.reset()
        began = time.perf_counter()
        llama.eval(self._ids)
        token = llama.sample(temp=0.0)
        first = time.perf_counter()
        for _ in range(self._new_tokens - 1):
            llama.eval([token])
            token = llama.sample(temp=0.0)
        return AnswerTimes(first - began, time.perf_counter() - began)
