"""``blendrag bench schema``: time to first token of a prompt of stored modules, as an engine reports it.

Full prefill, blended modules and modules at the positions of their schema (Prompt Cache) answer the same
prompt: random words as modules, and a question that is computed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any
from xml.sax.saxutils import escape

from blendrag.engine import Answer, BlendEngine
from blendrag.lab.bench import options
from blendrag.lab.bench.geometry import TimedModel
from blendrag.lab.bench.rounds import Tick, Timing, silent, time_ways
from blendrag.lab.bench.scratch import scratch
from blendrag.lab.bench.tiers import AMPLE_BYTES, parse_tier
from blendrag.lab.bench.workload import BlendResult, Workload, conditions
from blendrag.lab.tables import ResultTable, times

#: Room of the memory tier by tier.
RAM_BYTES = {"memory": AMPLE_BYTES, "disk": 0}


@dataclass(frozen=True, kw_only=True)
class SchemaResult(BlendResult):
    """One run; speedups are against full prefill."""

    prompt_tokens: int
    computed_tokens: int
    """Of the prompt, with ``schema``."""
    ms: dict[str, Timing]
    """TTFT by way: ``full``, ``blend``, ``schema``."""
    speedup: dict[str, float]
    kv_bytes: int


def schema_table(result: SchemaResult) -> ResultTable:
    names = {
        "full": "full: stock prefill",
        "blend": f"blend, r = {result.ratio:.3g}",
        "schema": f"schema: {result.computed_tokens} tokens computed",
    }
    rows = [(names[way], str(ms), times(result.speedup[way])) for way, ms in result.ms.items()]
    return ResultTable(
        ("way", "TTFT ms (lowest to highest)", "speedup"),
        rows,
        f"{result.prompt_tokens:,} tokens, {result.kv_bytes / 1e6:,.1f} MB of KV: {result.about}",
    )


def words_of(tokens: int, length: Callable[[str], int], seed: int) -> str:
    """Random words of ``tokens`` tokens, or a few less."""
    drawn, text = random.Random(seed), ""
    while length(longer := f"{text} {drawn.randrange(10**6)}") <= tokens:
        text = longer
    return text


@options.bench(schema_table, schedule=options.OMIT)
def schema(
    timed: TimedModel, workload: Workload, tier: options.Tier = "disk", tick: Tick = silent
) -> SchemaResult:
    adapter = timed.adapter
    workload.check(adapter)
    kept = parse_tier(tier).name

    def length(text: str) -> int:
        return len(adapter.tokens.encode_text(text))

    numbers = range(workload.chunks)
    modules = "".join(
        f'<module name="m{i}">{escape(words_of(workload.chunk_tokens, length, i))}</module>'
        for i in numbers
    )
    imports = "".join(f"<m{i}/>" for i in numbers)
    asked = (escape(words_of(workload.question_tokens, length, -i)) for i in count(1))
    with (
        scratch() as directory,
        BlendEngine(
            adapter, directory / "store", encoding=workload.encoding,  # type: ignore[arg-type]
            ram_bytes=RAM_BYTES.get(kept, 0), learn=False,
        ) as engine,
    ):  # fmt: skip
        for name, positions in (("schema", "schema"), ("blend", "blend")):
            engine.add_schema(f'<schema name="{name}">{modules}</schema>', positions)  # type: ignore[arg-type]

        def answer(name: str, **given: Any) -> Answer:
            pml = f'<prompt schema="{name}">{imports}{next(asked)}</prompt>'
            return engine.generate(pml=pml, max_new_tokens=1, **given)

        tick("encoding the modules")
        engine.encode_schema("schema")
        blend: dict[str, Any] = {"ratio": workload.ratio, "policy": workload.policy}
        answer("blend", **blend)
        engine.drain()
        cached = answer("schema").metrics  # promotes to memory
        answer("blend", **blend)
        engine.resources.store.drain()
        ways = {
            "full": lambda: 1e3 * answer("schema", mode="full").metrics.ttft_s,
            "blend": lambda: 1e3 * answer("blend", **blend).metrics.ttft_s,
            "schema": lambda: 1e3 * answer("schema").metrics.ttft_s,
        }
        timings = time_ways(ways, workload.rounds, tick)
    return SchemaResult(
        **conditions(adapter, workload, kept),
        prompt_tokens=cached.prompt_tokens,
        computed_tokens=cached.fresh_tokens,
        ms=timings,
        speedup={way: timings["full"].median / ms.median for way, ms in timings.items()},
        kv_bytes=adapter.layout.encoded(workload.encoding).size_bytes(cached.reused_tokens),
    )
