"""What one request measured, and its timeline.

Definitions (CacheBlend's, or ours where the paper has none):

* ``prompt_tokens = reused_tokens + fresh_tokens``.
* ``reused_tokens``: tokens whose stored KV was loaded, exact prefix and chunks, including those that the
  fusor recomputed afterwards.
* ``prefix_tokens``: those of ``reused_tokens`` before the first chunk, which no chunk report counts.
* ``recomputed_tokens = round(ratio × blended chunk tokens)``.
* ``ratio`` r: mean share of blended chunk tokens recomputed in layers 1…L-1.
* ``charged_ratio = Σ_l |chunk tokens computed in layer l| / (L · N_chunk)``: the cost, with the entry
  layer and any fully computed check layer.

A chunk directly after the prefix it was encoded with is *exact*: it is loaded as part of the exact prefix
and is neither a candidate for recompute nor part of ``N_chunk``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

ChunkOutcome = Literal["exact", "blended", "reused", "computed"]


@dataclass(frozen=True)
class ChunkReport:
    """What happened to one chunk found in a prompt.

    ``outcome``: ``exact`` (loaded, needs no recompute), ``blended`` (loaded, some tokens
    recomputed), ``reused`` (loaded, nothing recomputed), ``computed`` (its KV was not used).
    """

    chunk_id: str
    source: str
    tokens: int
    outcome: ChunkOutcome
    recomputed_tokens: int
    reason: str
    tier: str = ""
    """Where it was loaded from; empty with a salt or a tenant, as others' requests decide it."""


@dataclass(frozen=True)
class RequestMetrics:
    """Times in seconds, sizes in tokens, ratios in [0, 1]."""

    mode: str
    """That of the request, or ``schema``: modules at the positions of their schema."""
    ttft_s: float
    """Request received to first new token sampled: search, planning, loading, prefill; without
    ``opening_s``."""
    load_s: float
    """Time the loader spent reading and verifying; overlaps compute."""
    total_s: float
    """Request received to last token, without ``opening_s``."""
    prompt_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    fresh_tokens: int
    new_tokens: int
    ratio: float
    charged_ratio: float
    policy: str = ""
    schedule: str = ""
    chunks: tuple[ChunkReport, ...] = field(default_factory=tuple)
    notes: tuple[str, ...] = field(default_factory=tuple)
    """Sentences for the user: why nothing was reused, what was changed or refused."""
    predicted_ttft_s: float | None = None
    """``ttft_s`` as the loading controller predicted it; ``None`` without a profile of this machine."""
    predicted_load_s: float | None = None
    """The predicted ``load_s``."""
    predicted_compute_s: float | None = None
    """The predicted time of computing, which overlaps loading."""
    decision: str = ""
    """Why this ratio and these loads, if the ratio was ``auto``."""
    batch_size: int = 1
    """Prompts prefilled in the same forward; more than one only in a batch. ``ttft_s`` still ends with this
    request's first token, which comes after the answers before it."""
    opening_s: float = 0.0
    """Opening the tokenizer, the model and the embedder, and checking that stored KV is theirs: about 0 but
    for the first request of an engine."""
    prefix_tokens: int = 0
    """The part of ``reused_tokens`` before the first chunk."""
    queued_s: float = 0.0
    """The part of ``ttft_s`` that the request waited for those before it."""
    retrieval_s: float = 0.0
    """The part of ``ttft_s`` in which chunks were searched; 0 if the prompt brought its texts."""
    learned_tokens: int = 0
    """Tokens of passages that were learned from this prompt, because an earlier one had them, too."""
    decode_weights: str = "native"
    """Weights that the tokens behind the first were decoded with: the model's own, or packed copies of all
    layers (``int8``, ``int4``) or of the LM head (``head``, whose other layers are the model's own)."""

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON-ready dictionary."""
        return asdict(self)


#: Reading, verifying and decoding a layer's chunks.
LOAD = "load"
#: Waiting for the layer's chunks.
WAIT = "wait"
#: Moving stored keys to their positions in the prompt.
REPOSITION = "re-position"
#: Choosing the next layer's tokens; a peek's projections count as computing.
SELECT = "select"
#: One decoder layer from entry to end, with all of the above except loading.
LAYER = "layer"
#: A layer without waiting, re-positioning and selecting.
COMPUTE = "compute"
_NOTHING = nullcontext()


@dataclass(frozen=True)
class Span:
    """Seconds from the timeline's start."""

    what: str
    layer: int
    began_s: float
    ended_s: float
    pass_name: str = ""
    """``"scout"`` in a scout pass, else empty."""

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s


class Timeline:
    """Records spans from several threads, each thread's in the order in which they end."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._started = time.perf_counter()
        self._open: dict[int, float] = {}
        self.pass_name = ""

    def now(self) -> float:
        return time.perf_counter() - self._started

    @contextmanager
    def span(self, what: str, layer: int) -> Iterator[None]:
        """Record the time of the body, also if it raises."""
        began = self.now()
        try:
            yield
        finally:
            self._note(what, layer, began)

    def enter(self, layer: int) -> None:
        """A decoder layer is entered."""
        self._open[layer] = self.now()

    def leave(self, layer: int) -> None:
        """A decoder layer is left; ignored if it was not entered."""
        began = self._open.pop(layer, None)
        if began is not None:
            self._note(LAYER, layer, began)

    def _note(self, what: str, layer: int, began: float) -> None:
        self.spans.append(Span(what, layer, began, self.now(), self.pass_name * (what != LOAD)))

    def computing(self) -> list[Span]:
        """Every layer without waiting, re-positioning and selecting."""
        within = [s for s in self.spans if s.what in (WAIT, REPOSITION, SELECT)]
        left: list[Span] = []
        for layer in (s for s in self.spans if s.what == LAYER):
            at = layer.began_s
            for inner in sorted(within, key=lambda s: s.began_s):
                if layer.began_s <= inner.began_s and inner.ended_s <= layer.ended_s:
                    left.append(Span(COMPUTE, layer.layer, at, inner.began_s, layer.pass_name))
                    at = inner.ended_s
            left.append(Span(COMPUTE, layer.layer, at, layer.ended_s, layer.pass_name))
        return left

    def all_spans(self) -> list[Span]:
        """Spans that do not overlap within a thread: loading, and the parts of layers."""
        parts = [s for s in self.spans if s.what != LAYER]
        return sorted([*parts, *self.computing()], key=lambda s: s.began_s)


def noted(timeline: Timeline | None, what: str, layer: int) -> AbstractContextManager[None]:
    """A span of ``timeline``, or a null context if there is none."""
    return _NOTHING if timeline is None else timeline.span(what, layer)
