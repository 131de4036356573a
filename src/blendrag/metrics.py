"""What one request measured.

Definitions (CacheBlend's words, ours where the paper is silent):

* ``prompt_tokens = reused_tokens + fresh_tokens``; every prompt token is one or the other.
* ``reused_tokens``: tokens whose stored KV was loaded, exact prefix and chunks alike, whether or
  not the fusor recomputed some of them afterwards.
* ``recomputed_tokens = round(ratio × blended chunk tokens)``.
* ``ratio`` r: mean share of blended chunk tokens recomputed in layers 1…L-1.
* ``charged_ratio = Σ_l |chunk tokens computed in layer l| / (L · N_chunk)``: what was paid, the entry
  layer and any fully computed check layer included.

A chunk that stands exactly behind the prefix it was encoded with is *exact*: it is loaded as part of
the exact prefix and is neither a candidate for recompute nor part of ``N_chunk``.
"""

from __future__ import annotations

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


@dataclass(frozen=True)
class RequestMetrics:
    """Times in seconds, sizes in tokens, ratios in [0, 1]."""

    mode: str
    ttft_s: float
    """Request received to first new token sampled: planning, loading, prefill."""
    load_s: float
    """Time the loader spent reading and verifying; overlaps compute."""
    total_s: float
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
    """Sentences a user should see: why nothing was reused, what was switched or refused."""
    predicted_ttft_s: float | None = None
    """What the loading controller expected ``ttft_s`` to be when it had planned the loads; ``None`` without
    a profile of this machine."""
    predicted_load_s: float | None = None
    """Of that, what ``load_s`` was expected to be."""
    predicted_compute_s: float | None = None
    """Of that, computing; the two overlap."""
    decision: str = ""
    """Why this ratio and these loads, where the ratio was ``auto``."""
    batch_size: int = 1
    """Prompts that were prefilled in the same forward; more than one only in a batch. ``ttft_s`` then ends
    with this request's own first token all the same, which comes after the answers before it."""

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON-ready dictionary."""
        return asdict(self)
