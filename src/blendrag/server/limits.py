"""What one server takes; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What one server takes."""

    max_requests: int = 256
    """Waiting and running at once; more are refused with 429."""
    max_body_bytes: int = 8 * 1024**2
    max_tokens: int | None = None
    """Longest answer that a request may ask for; ``None``: what fits the model's context."""
