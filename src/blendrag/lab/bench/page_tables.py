"""Results of benches as Markdown: a line on what was measured, and tables of medians with their spread.

Owns columns and how numbers are written. Equal results give equal text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from blendrag.lab.bench.auto_results import AutoResult
from blendrag.lab.bench.load import LoadResult
from blendrag.lab.bench.overhead import OverheadResult
from blendrag.lab.bench.sweep import SweepResult
from blendrag.lab.bench.throughput_results import ThroughputResult
from blendrag.lab.bench.trace import TraceResult
from blendrag.lab.bench.ttft_results import TtftResult

NOTHING = "–"
TTFT = "TTFT ms (lowest to highest)"


def ttft(result: TtftResult) -> str:
    """A row for each mode."""
    blend = f"blend, r = {result.ratio:.3g} (charged {result.charged_ratio:.3f})"
    modes = {
        "full": "full: stock prefill",
        "full_compiled": "full, compiled",
        "prefix_stock": "prefix: first chunk cached, over a stock cache",
        "prefix_fused": "prefix, through the fusor",
        "blend": blend,
        "reuse": "reuse",
    }
    rows = []
    for way, name in modes.items():
        ms = getattr(result, f"{way}_ms")
        if ms is None:
            continue
        peak = result.peak_bytes.get(way)
        floor = f" (floor {_times(result.floor_speedup)})" if way == "blend" else ""
        rows.append(
            (
                name,
                _spread(ms, result.spread_ms[way]),
                _times(result.full_ms / ms) + floor,
                NOTHING if peak is None else f"{peak / 1e6:,.0f}",
            )
        )
    about = (
        f"`{result.model}`, {result.prompt_tokens:,} tokens, policy `{result.policy}`, schedule "
        f"`{result.schedule}`, {result.encoding} KV from {result.tier}, {result.kv_bytes / 1e6:,.1f} MB; "
        f"{_rounds(result.rounds)}."
    )
    notes = [*result.notes]
    if result.compile_s is not None:
        notes.append(f"Compiled in {result.compile_s:,.0f} s, before the clock started.")
    head = ("mode", TTFT, "speedup", "peak memory over the start, MB")
    return "\n\n".join([about, _table(head, rows), *notes])


def sweep(result: SweepResult) -> str:
    """A row for each value of the factor."""
    rows = [
        (
            row.label,
            f"{row.prompt_tokens:,}",
            f"{row.charged_ratio:.3f}",
            _spread(row.ms, row.spread_ms),
            f"{_times(row.speedup)} (floor {_times(row.floor_speedup)})",
            _spread(row.reuse_ms, row.reuse_spread_ms),
            _spread(row.full_ms, row.full_spread_ms),
        )
        for row in result.rows
    ]
    head = (result.factor, "tokens", "charged", "blend: " + TTFT, "speedup", "reuse", "full")
    return "\n\n".join(
        [f"{', '.join(result.about)}; {_rounds(result.rounds)}.", _table(head, rows)]
    )


def throughput(result: ThroughputResult) -> str:
    """A row for each batch size."""
    low, high = result.prompt_tokens
    ways = list(dict.fromkeys(row.way for row in result.rows))
    found = {(row.way, row.batch_size): row for row in result.rows}
    rows = []
    for size in dict.fromkeys(row.batch_size for row in result.rows):
        cells = (found[way, size] for way in ways)
        rows.append(
            (
                str(size),
                *(
                    f"{_figure(cell.first_tokens_per_s)} ({_figure(cell.spread[0])} to "
                    f"{_figure(cell.spread[1])}), {_times(cell.over_alone)}"
                    for cell in cells
                ),
            )
        )
    about = (
        f"`{result.model}`, {result.requests} prompts of {low:,} to {high:,} tokens, policy "
        f"`{result.policy}` at r = {result.ratio:g}, {result.encoding} KV from {result.tier}; "
        f"{_rounds(result.rounds)}. First tokens per second (lowest to highest), and over what the same way "
        "gives one by one."
    )
    return "\n\n".join([about, _table(("batch size", *ways), rows)])


def overhead(result: OverheadResult) -> str:
    """A row for each way and number of chunks."""
    rows = [
        (
            row.way,
            str(row.chunks),
            f"{row.operators:,}",
            _times(row.over_stock),
            _spread(row.ms, row.spread_ms),
            _figure(row.host_ms),
            f"{row.layer_us:,.0f}",
        )
        for row in result.rows
    ]
    about = (
        f"`{result.model}`, {result.layers} layers, chunks of {result.chunk_tokens} tokens and a question of "
        f"{result.question_tokens}, r = {result.ratio:g}, KV from memory; {_rounds(result.rounds)}."
    )
    head = (
        "way",
        "chunks",
        "operators",
        "of stock's",
        "ms (lowest to highest)",
        "host ms",
        "µs a layer",
    )
    return "\n\n".join([about, _table(head, rows)])


def trace(result: TraceResult) -> str:
    """A row for each of the three times, and what the request could take at best; the overlap."""
    names = {"wall": "the request", "load": "loading alone", "compute": "computing alone"}
    rows = [
        (name, _spread(getattr(result, f"{key}_ms"), result.spread_ms[key]))
        for key, name in names.items()
    ]
    about = (
        f"`{result.model}`, {result.prompt_tokens:,} tokens, policy `{result.policy}` at r = "
        f"{result.ratio:g}, schedule `{result.schedule}`, {result.encoding} KV from {result.tier}, "
        f"{result.kv_bytes / 1e6:,.1f} MB; {_rounds(result.rounds)}."
    )
    hint = (
        "" if result.comparable else "; one of loading and computing is more than twice the other"
    )
    rows.append(("bound: the longer of the two", _figure(result.bound_ms)))
    overlap = (
        f"Overlap **{result.overlap:.2f}**{hint}. Bound over request **{result.bound_share:.2f}**."
    )
    return "\n\n".join([about, _table(("what", "ms (lowest to highest)"), rows), overlap])


def load(result: LoadResult) -> str:
    """What each way takes and sustains; TTFT and throughput by rate."""
    names = [way.way for way in result.ways]
    ways = [
        (
            way.way,
            _figure(way.service_ms),
            f"{way.reused:.0%}",
            f"{way.equal_ttft_per_s:.3g}",
        )
        for way in result.ways
    ]
    found = {(row.requests_per_s, row.way): row for row in result.rows}
    rates = [
        (
            f"{rate:.3g}",
            *(
                f"{_figure(row.mean_ttft_ms)} ({_figure(row.p95_ttft_ms)}), {row.throughput_per_s:.3g}/s"
                for row in (found[rate, name] for name in names)
            ),
        )
        for rate in dict.fromkeys(row.requests_per_s for row in result.rows)
    ]
    about = (
        f"`{result.model}`, {result.requests} requests, policy `{result.policy}` at r = {result.ratio:g}, "
        f"{result.encoding} KV from {result.tier}, room for {result.limit_bytes / 1e6:,.0f} MB. Where full "
        f"prefill's mean TTFT has doubled, blend sustains {_times(result.blend_rate_ratio)} its rate, prefix "
        f"{_times(result.prefix_rate_ratio)}."
    )
    sustained = f"requests/s at {_figure(result.doubled_ttft_ms)} ms"
    head = ("way", "median TTFT ms without load", "tokens reused", sustained)
    by_rate = "Mean TTFT in ms (95th percentile) and first tokens per second, by rate:"
    return "\n\n".join([about, _table(head, ways), by_rate, _table(("requests/s", *names), rates)])


def auto(result: AutoResult) -> str:
    """Every ratio on every tier; and by tier, the automatic one beside the best fixed one."""
    rows = [
        (
            tier.tier,
            row.asked,
            f"{row.ratio:.2f}",
            str(row.loaded),
            _spread(row.ms, row.spread_ms),
            _figure(row.predicted_ms),
        )
        for tier in result.tiers
        for row in tier.rows
    ]
    tiers = [
        (
            tier.tier,
            f"{tier.relative:.2f}",
            f"{tier.best_ratio:.2f}",
            f"{tier.close:.0%}",
            f"{tier.auto_close:.0%}",
        )
        for tier in result.tiers
    ]
    about = (
        f"`{result.model}`, {result.prompt_tokens:,} tokens, policy `{result.policy}`, {result.encoding} KV, "
        f"never less than r = {result.min_ratio:g}; {_rounds(result.rounds)}. {result.close:.0%} of "
        f"{result.requests} predictions are within 15%, {result.auto_close:.0%} of those at ratio auto."
    )
    summary = (
        "tier",
        "auto's time over the best fixed ratio's",
        "best ratio",
        "within 15%",
        "of auto",
    )
    head = ("tier", "asked", "r", "chunks loaded", TTFT, "predicted ms")
    return "\n\n".join([about, _table(summary, tiers), _table(head, rows)])


#: Benches → how their results are written.
TEXTS: dict[str, Callable[[Any], str]] = {
    "ttft": ttft,
    "sweep": sweep,
    "trace": trace,
    "throughput": throughput,
    "load": load,
    "auto": auto,
    "overhead": overhead,
}


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _spread(ms: float, of: tuple[float, float]) -> str:
    low, high = of
    return f"{_figure(ms)} ({_figure(low)} to {_figure(high)})"


def _figure(value: float) -> str:
    """Three digits, or all of those before the point."""
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:#.3g}"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}×"


def _rounds(count: int) -> str:
    return f"{count} round{'s' if count > 1 else ''}"
