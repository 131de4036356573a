"""``blendrag bench attention``: decode attention of one layer over private copies and over shared chunks.

Every request has the chunks in another order, then tokens of its own. K, V and queries are random. Other data
goes through the caches before each call, as the rest of a model does. One thread computes; its CPU time is
measured, because other processes would delay such short calls.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
import transformers
import typer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding, apply_rotary_pos_emb

from blendrag.cli.output import count
from blendrag.fusor.attention import decode_attention
from blendrag.fusor.fusor import keep_freed_blocks
from blendrag.model.positions import Repositioner
from blendrag.planning.machine import cores
from blendrag.serving import shared_attention as sharing
from blendrag.store.kv import KVLayout, LayerShape
from blendrag_lab.bench import options
from blendrag_lab.bench.geometry import qwen2_config
from blendrag_lab.bench.rounds import (
    MeasuredNothingError,
    Tick,
    Timing,
    silent,
    time_ways,
)
from blendrag_lab.bench.workload import parse_ratios, whole_numbers
from blendrag_lab.tables import ResultTable, table, times

STOCK, GROUPED, SHARED = "SDPA", "grouped heads", "shared chunks"
#: More than the caches of a CPU hold.
OTHER_BYTES = 64 << 20
#: Largest difference between the ways, in bfloat16.
CLOSE = 0.02


@dataclass(frozen=True)
class AttentionRow:
    requests: int
    tokens: int
    """Tokens of each request in chunks; its other tokens are never shared."""
    shared: int
    """Those of them in chunks that all requests share."""
    ms: dict[str, Timing]
    kv_share: float
    """KV of all requests over that of private copies."""


@dataclass(frozen=True)
class AttentionResult:
    machine: str
    about: str
    rows: tuple[AttentionRow, ...]


def attention_table(result: AttentionResult) -> ResultTable:
    def over(row: AttentionRow, way: str) -> str:
        return times(row.ms[way].median / row.ms[SHARED].median)

    return table(
        [
            ("requests", lambda row: str(row.requests)),
            ("tokens, shared", lambda row: f"{row.tokens:,}, {row.shared:,}"),
            (f"{STOCK}: CPU ms (lowest to highest)", lambda row: str(row.ms[STOCK])),
            (GROUPED, lambda row: str(row.ms[GROUPED])),
            (SHARED, lambda row: str(row.ms[SHARED])),
            (f"over {STOCK}", lambda row: over(row, STOCK)),
            (f"over {GROUPED}", lambda row: over(row, GROUPED)),
            ("KV", lambda row: f"{row.kv_share:.0%}"),
        ],
        result.rows,
        result.about,
    )


@options.bench(attention_table)
@torch.inference_mode()
def attention(
    geometry: Annotated[str, typer.Option(help="Shape of the layer.")] = "qwen2.5-0.5b",
    requests: Annotated[str, typer.Option(help="Comma-separated.")] = "1,4,16,32",
    tokens: Annotated[str, typer.Option(help="Of each request.")] = "1024,2048,4096",
    shared: Annotated[str, typer.Option(help="Shares of them in shared chunks.")] = "1",
    chunk_tokens: options.Count = 512,
    own_tokens: options.Count = 64,
    ratio: options.Ratio = 0.0,
    rounds: options.Rounds = 9,
    tick: Tick = silent,
) -> AttentionResult:
    config = qwen2_config(geometry)
    keep_freed_blocks()
    rows, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)
    for number in whole_numbers(requests, "numbers of requests", "1,4,16,32"):
        for length in whole_numbers(tokens, "numbers of tokens", "1024,2048"):
            for share in parse_ratios(shared):
                in_chunks = round(share * length)
                whole, rest = divmod(in_chunks, chunk_tokens)
                sizes = [chunk_tokens] * whole + [rest] * (rest > 0)
                own = length - in_chunks + own_tokens
                layer = SharedLayer(config, number, sizes, own, ratio)
                ms = time_ways(layer.ways, rounds, tick)
                rows.append(AttentionRow(number, length, in_chunks, ms, layer.kv_share))
    torch.set_num_threads(threads)
    cpu = torch.cpu.get_capabilities().get("cpu_name", "a CPU")
    return AttentionResult(
        machine=f"bfloat16 on {cpu}, 1 of {cores()} CPU cores; torch {torch.__version__}, transformers "
        f"{transformers.__version__}",
        about=f"{geometry}, chunks of {chunk_tokens} tokens, {own_tokens} own tokens per request, "
        f"{ratio:.0%} of the chunks' recomputed, {count(rounds, 'round')}",
        rows=tuple(rows),
    )


class SharedLayer:
    """Requests over chunks of these ``sizes``, and the ways to attend a token of each."""

    def __init__(self, config: Any, requests: int, sizes: list[int], own: int, ratio: float):
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        width = config.hidden_size // heads
        rotary = Qwen2RotaryEmbedding(config)
        moves = Repositioner(("rotary",), ("",), rotary, apply_rotary_pos_emb)
        order, generator = random.Random(0), torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).bfloat16()

        chunks = [sharing.SharedChunk([normal(2, kv_heads, size, width)], 0) for size in sizes]
        layout = KVLayout((LayerShape(kv_heads, width),), "bfloat16")
        overlays = sharing.Overlays(layout, requests * (sum(sizes) + own + 1))
        running = []
        for _ in range(requests):
            held, positions, at = [], [], 0
            for chunk in order.sample(chunks, len(chunks)):
                stale = torch.rand(chunk.tokens, generator=generator) < ratio
                held.append(sharing.HeldChunk(chunk, at, stale))
                positions += (at + stale.nonzero()[:, 0]).tolist()
                at += chunk.tokens
            running.append(overlays.join(held, [*positions, *range(at, at + own)], room=1))
            view = overlays.view(0, running[-1])
            view.copy_(normal(*view.shape))
        shared = sharing.SharedAttention(running, overlays, moves)
        shared.advance()
        query, key, value = (normal(requests, n, width) for n in (heads, kv_heads, kv_heads))
        attend = partial(shared.attend, 0, query, key, value, width**-0.5)
        self._expected = attend()
        copies = [sharing.private_kv(each, 0, overlays, moves)[0][:, None] for each in running]
        kept = [chunk.layers[0] for chunk in chunks] + [overlays.view(0, each) for each in running]
        self.kv_share = sum(kv.nbytes for kv in kept) / sum(kv.nbytes for kv in copies)
        module: Any = torch.nn.Module()
        module.num_key_value_groups, module.is_causal = heads // kv_heads, True

        def over_copies(forward: Callable[..., Any]) -> torch.Tensor:
            """[R, H, D]"""
            outs = []
            for q, (k, v) in zip(query[:, None, :, None], copies, strict=True):
                outs.append(forward(module, q, k, v, None, scaling=width**-0.5)[0])  # [1, 1, H, D]
            return torch.cat(outs)[:, 0]

        self.ways = {
            STOCK: partial(self._ms, partial(over_copies, sdpa_attention_forward)),
            GROUPED: partial(self._ms, partial(over_copies, decode_attention)),
            SHARED: partial(self._ms, attend),
        }

    def _ms(self, way: Callable[[], torch.Tensor]) -> float:
        """CPU time of one call with cold caches."""
        torch.zeros(OTHER_BYTES, dtype=torch.uint8).add_(1)
        began = time.thread_time()
        out = way()
        ms = 1e3 * (time.thread_time() - began)
        error = float((out - self._expected).abs().max())
        if not error <= CLOSE:
            raise MeasuredNothingError(
                f"the ways differ by {error:.3g}, expected at most {CLOSE}; this installation cannot "
                "be trusted"
            )
        return ms
