"""What computing costs: stock prefill by length, and one layer through the fusor by rows and context.

Every figure is taken from a whole ``generate`` of one token, as a request runs it, with the clock read
where its decoder layers begin and end; what lies outside of them is a figure of its own. Stored KV is in
place before the clock starts, so that no loading is in these times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from blendrag.errors import InvalidInputError
from blendrag.fusor import BlendRequest, Fusor
from blendrag.fusor.gate import HeldKV
from blendrag.fusor.loader import LoadedSpan
from blendrag.fusor.selection import Schedule, make_policy
from blendrag.model.adapter import ModelAdapter
from blendrag.model.sharing import in_this_thread
from blendrag.planning.curve import Point
from blendrag.store.kv import ChunkKV

SHORTEST = 64
#: What is noted of a pass.
BEGIN, LAST, END = "begin", "last", "end"


@dataclass(frozen=True)
class Timed:
    """One kind of prefill: seconds of its passes through the layers, and outside of them."""

    passes: tuple[float, ...]
    lasts: tuple[float, ...]
    """What the last layer took of each pass."""
    outside_s: float

    @property
    def total_s(self) -> float:
        return sum(self.passes) + self.outside_s


@dataclass(frozen=True)
class Shape:
    """A prompt to time: equal chunks, then ``fresh`` tokens."""

    chunks: int
    chunk_tokens: int
    fresh: int

    @property
    def candidates(self) -> int:
        return self.chunks * self.chunk_tokens

    @property
    def tokens(self) -> int:
        return self.candidates + self.fresh

    def point(self, chosen: float, placed: float, seconds: float) -> Point:
        """Of the fresh tokens and ``chosen`` ones spread over the chunks."""
        rows = self.fresh + chosen
        fresh_keys = self.fresh * (self.candidates + (self.fresh + 1) / 2)
        chosen_keys = chosen * (self.candidates + 1) / 2
        return Point(rows, (fresh_keys + chosen_keys) / rows, placed, seconds)


class ModelTimes:
    """Times prefills of one model. The caller holds the model's lock."""

    def __init__(self, adapter: ModelAdapter, fusor: Fusor, prefix_ids: Sequence[int]) -> None:
        self._adapter = adapter
        self._fusor = fusor
        self._prefix_ids = tuple(prefix_ids)
        self._kv: dict[int, ChunkKV] = {}
        self._events: list[tuple[str, float]] = []

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt that can be blended with a token after it."""
        limit = min(
            self._adapter.context_tokens,
            self._adapter.blend_limit_tokens or self._adapter.context_tokens,
        )
        longest = limit - len(self._prefix_ids) - 2
        if longest < SHORTEST:
            raise InvalidInputError(
                f"{self._adapter.model_id} takes {limit} tokens, {longest} of them in a prompt behind the "
                f"corpus's prefix, expected {SHORTEST} or more to measure anything by; ingest behind a "
                "shorter prefix, or take a model of a longer context"
            )
        return longest

    def chunk(self, tokens: int) -> ChunkKV:
        """KV of a chunk of random ids behind the corpus's prefix, the same for as many tokens."""
        if tokens not in self._kv:
            ids = self._ids(tokens)[0].tolist()
            self._kv[tokens] = self._adapter.encode(self._prefix_ids, ids)
        return self._kv[tokens]

    def stock(self, tokens: int) -> Timed:
        """A stock prefill and its first token."""
        ids = self._ids(tokens)
        return self._timed(lambda: self._generate(ids, None))

    def blended(self, shape: Shape, policy: str, ratio: float) -> Timed:
        """A blended prefill over loaded KV, which is in place when the clock starts."""
        kv = self.chunk(shape.chunk_tokens)
        ids = self._ids(shape.tokens)
        spans = tuple(
            LoadedSpan(
                i * kv.tokens, (i + 1) * kv.tokens, HeldKV(kv), len(self._prefix_ids), exact=False
            )
            for i in range(shape.chunks)
        )
        asked = BlendRequest(
            shape.tokens, spans, make_policy(policy), Schedule.parse("constant"), ratio
        )

        def run() -> float:
            began = time.perf_counter()
            cache = self._fusor.new_cache(shape.tokens, 1)
            with self._fusor.fuse(cache, asked, last_row_only=True) as fusion:
                prepared_s = time.perf_counter() - began
                fusion.loader.synchronize(len(self._adapter.layout.layers) - 1)
                return prepared_s + self._generate(ids, cache)

        return self._timed(run)

    # -- one prefill --------------------------------------------------------------------------

    def _ids(self, tokens: int) -> torch.Tensor:
        vocab = self._adapter.model.get_input_embeddings().num_embeddings
        generator = torch.Generator().manual_seed(tokens)
        return torch.randint(0, vocab, (1, tokens), generator=generator).to(self._adapter.device)

    def _generate(self, ids: torch.Tensor, cache: Any) -> float:
        """Seconds of ``generate`` to its first token; the layers report to the events."""
        began = self._now()
        more = {} if cache is None else {"past_key_values": cache}
        self._adapter.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=1,
            do_sample=False,
            pad_token_id=0,
            **more,
        )
        return self._now() - began

    def _now(self) -> float:
        if self._adapter.device.type == "cuda":
            torch.cuda.synchronize(self._adapter.device)
        return time.perf_counter()

    def _timed(self, run: Callable[[], float]) -> Timed:
        with self._watched(), torch.inference_mode():
            self._events.clear()
            total_s = run()
        begins, lasts, ends = (self._at(event) for event in (BEGIN, LAST, END))
        passes = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        in_last = tuple(end - last for last, end in zip(lasts, ends, strict=True))
        return Timed(passes, in_last, max(0.0, total_s - sum(passes)))

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Note when the first layer is entered, and the last one entered and left."""
        layers = self._adapter.decoder_layers
        handles = [
            layers[0].register_forward_pre_hook(in_this_thread(lambda *_: self._note(BEGIN))),
            layers[-1].register_forward_pre_hook(in_this_thread(lambda *_: self._note(LAST))),
            layers[-1].register_forward_hook(in_this_thread(lambda *_: self._note(END))),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, event: str) -> None:
        self._events.append((event, self._now()))

    def _at(self, event: str) -> list[float]:
        return [at for what, at in self._events if what == event]


def usual(runs: Sequence[Timed]) -> Timed:
    """Of several runs, the medians: what a request may expect of this machine as it is."""
    passes = _medians([run.passes for run in runs])
    lasts = _medians([run.lasts for run in runs])
    return Timed(passes, lasts, statistics.median(run.outside_s for run in runs))


def _medians(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(statistics.median(column) for column in zip(*rows, strict=True))
