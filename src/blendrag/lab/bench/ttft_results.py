"""What ``blendrag bench ttft`` measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TtftResult:
    """One run; times in milliseconds, sizes in bytes, speedups against ``full_ms``."""

    model: str
    dtype: str
    device: str
    prompt_tokens: int
    ratio: float
    charged_ratio: float
    full_ms: float
    prefix_ms: float
    """The faster of the two below."""
    prefix_stock_ms: float
    """Stock forward over a stock cache."""
    prefix_fused_ms: float
    """Through the fusor, as the engine's mode ``prefix`` goes."""
    reuse_ms: float
    blend_ms: float
    speedup: float
    reuse_speedup: float
    prefix_speedup: float
    floor_speedup: float
    kv_bytes: int
    peak_bytes: dict[str, int | None]
    """By mode, over its own start; ``None`` where the system does not say."""
    spread_ms: dict[str, tuple[float, float]]
    """Lowest and highest, by mode."""
    policy: str
    schedule: str
    rounds: int
    threads: int
    tier: str
    encoding: str
    full_compiled_ms: float | None = None
    """Stock prefill through ``torch.compile``; ``None`` where it was not asked for or not possible."""
    compile_s: float | None = None
    """Outside of that time."""
    notes: tuple[str, ...] = ()
