"""A clock for tests."""

from __future__ import annotations


class Clock:
    """Time that passes only when a test says so, in seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now
