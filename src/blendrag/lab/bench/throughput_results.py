"""What ``blendrag bench throughput`` measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ThroughputRow:
    """One way at one batch size."""

    way: str
    batch_size: int
    first_tokens_per_s: float
    """Of the median round."""
    spread: tuple[float, float]
    """Lowest and highest."""
    batch_ms: float
    """Until a batch has its first tokens, all of them at once."""
    over_full: float
    """Against stock prefill one by one."""
    over_alone: float
    """Against the same way one by one."""


@dataclass(frozen=True)
class ThroughputResult:
    """One run."""

    model: str
    dtype: str
    device: str
    threads: int
    requests: int
    prompt_tokens: tuple[int, int]
    """Of the shortest and the longest prompt."""
    policy: str
    ratio: float
    tier: str
    encoding: str
    rounds: int
    rows: tuple[ThroughputRow, ...]
