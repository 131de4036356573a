"""``blendrag bench schema``: time to first token of prompts of stored modules, as an engine reports it.

Full prefill, blended modules and modules at the positions of their schema (Prompt Cache) answer the same
prompts: modules and a question that is computed. And what a token of a module takes in the store, by
geometry (table 2 of the paper).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from xml.sax.saxutils import escape

from blendrag.engine import Answer, BlendEngine
from blendrag.engine.schemas import POSITIONS
from blendrag.store.encodings import stored_chunk_bytes
from blendrag.store.kv import KVLayout, LayerShape
from blendrag_lab.bench import options
from blendrag_lab.bench.geometry import GEOMETRIES, TimedModel, qwen2_config
from blendrag_lab.bench.rounds import Tick, Timing, silent, time_ways
from blendrag_lab.bench.scratch import scratch
from blendrag_lab.bench.tiers import AMPLE_BYTES, parse_tier
from blendrag_lab.bench.use_cases import UseCase, use_cases
from blendrag_lab.bench.workload import BlendResult, Workload, conditions
from blendrag_lab.tables import Column, ResultTable, table, times

#: Room of the memory tier by tier.
RAM_BYTES = {"memory": AMPLE_BYTES, "disk": 0}
#: Geometries of real models.
SIZED = [name for name in GEOMETRIES if name not in ("deep", "tiny")]
STORED = ("native", "int8")


@dataclass(frozen=True, kw_only=True)
class PromptTimes:
    """One prompt; speedups are against full prefill."""

    name: str
    prompt_tokens: int
    computed_tokens: int
    """Prompt tokens that ``schema`` computes."""
    ms: dict[str, Timing]
    """TTFT by way: ``full``, ``blend``, ``schema``."""
    speedup: dict[str, float]
    kv_bytes: int


@dataclass(frozen=True, kw_only=True)
class SchemaResult(BlendResult):
    prompts: list[PromptTimes]
    token_bytes: dict[str, dict[str, float]]
    """Bytes of KV per token, by geometry and encoding, in modules of :attr:`module_tokens`."""
    module_tokens: int


def schema_table(result: SchemaResult) -> ResultTable:
    def timed(way: str) -> Callable[[PromptTimes], str]:
        return lambda row: f"{row.ms[way]}, {times(row.speedup[way])}"

    columns: list[Column] = [
        ("prompt", lambda row: row.name),
        ("tokens", lambda row: f"{row.prompt_tokens:,}"),
        ("computed by schema", lambda row: str(row.computed_tokens)),
        ("KV, MB", lambda row: f"{row.kv_bytes / 1e6:,.1f}"),
        ("full prefill, ms", lambda row: str(row.ms["full"])),
        (f"blend, r = {result.ratio:.3g}", timed("blend")),
        ("schema", timed("schema")),
    ]
    sizes: list[Column] = [("geometry", lambda row: row[0])]
    for encoding, name in zip(STORED, ("bfloat16", "int8"), strict=True):
        sizes.append((name, partial(_token_bytes, encoding)))
    memory = table(
        sizes,
        result.token_bytes.items(),
        f"Bytes of KV per token, in modules of {result.module_tokens} tokens (int8 with its scales)",
    )
    title = f"TTFT, ms (lowest to highest): {result.about}"
    return table(columns, result.prompts, title, after=[memory])


def _token_bytes(encoding: str, row: tuple[str, dict[str, float]]) -> str:
    return f"{row[1][encoding]:,.0f}"


def token_bytes(geometry: str, encoding: str, module_tokens: int) -> float:
    config = qwen2_config(geometry)
    width = config.hidden_size // config.num_attention_heads
    layer = LayerShape(config.num_key_value_heads, width)
    layout = KVLayout((layer,) * config.num_hidden_layers, "bfloat16", encoding)
    return stored_chunk_bytes(layout, module_tokens) / module_tokens


class Words:
    """Random words: of so many tokens, or a few less, and other ones each time."""

    def __init__(self, length: Callable[[str], int]) -> None:
        self._length = length
        self._drawn = random.Random(0)

    def __call__(self, tokens: int) -> str:
        text = ""
        while self._length(longer := f"{text} {self._drawn.randrange(10**6)}") <= tokens:
            text = longer
        return text


@options.bench(schema_table, schedule=options.OMIT)
def schema(
    timed: TimedModel, workload: Workload, tier: options.Tier = "disk", tick: Tick = silent
) -> SchemaResult:
    adapter = timed.adapter
    workload.check(adapter)
    kept = parse_tier(tier).name
    words = Words(lambda text: len(adapter.tokens.encode_text(text)))
    cases = use_cases(words, workload.chunks, workload.chunk_tokens)
    with (
        scratch() as directory,
        BlendEngine(
            adapter, directory / "store", kv_encoding=workload.encoding,  # type: ignore[arg-type]
            ram_bytes=RAM_BYTES.get(kept, 0), learn=False, decode_weights="native",
        ) as engine,
    ):  # fmt: skip
        prompts = [_times_of(engine, case, words, workload, tick) for case in cases]
    tokens = workload.chunk_tokens
    return SchemaResult(
        **conditions(adapter, workload, kept),
        prompts=prompts,
        token_bytes={
            name: {each: token_bytes(name, each, tokens) for each in STORED} for name in SIZED
        },
        module_tokens=tokens,
    )


def _times_of(
    engine: BlendEngine, case: UseCase, words: Words, workload: Workload, tick: Tick
) -> PromptTimes:
    for name in POSITIONS:
        markup = f'<schema name="{name}">{case.schema}</schema>'
        engine.add_schema(markup, name)

    def answer(name: str, **given: Any) -> Answer:
        asked = escape(words(workload.question_tokens))
        pml = f'<prompt schema="{name}">{case.imports}{asked}</prompt>'
        return engine.generate(pml=pml, max_new_tokens=1, **given)

    tick(f"{case.name}: encoding the modules")
    engine.encode_schema("schema")
    blend: dict[str, Any] = {"ratio": workload.ratio, "policy": workload.policy}
    answer("blend", **blend)
    engine.drain()
    cached = answer("schema").metrics  # promotes to memory
    answer("blend", **blend)
    engine.store.drain()
    ways = {
        "full": lambda: 1e3 * answer("schema", mode="full").metrics.ttft_s,
        "blend": lambda: 1e3 * answer("blend", **blend).metrics.ttft_s,
        "schema": lambda: 1e3 * answer("schema").metrics.ttft_s,
    }
    timings = time_ways(ways, workload.rounds, lambda text: tick(f"{case.name}: {text}"))
    layout = engine.adapter.layout.encoded(workload.encoding)
    return PromptTimes(
        name=case.name,
        prompt_tokens=cached.prompt_tokens,
        computed_tokens=cached.fresh_tokens,
        ms=timings,
        speedup={way: timings["full"].median / ms.median for way, ms in timings.items()},
        kv_bytes=layout.size_bytes(cached.reused_tokens),
    )
