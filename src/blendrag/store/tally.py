"""What a tier counted since it was opened. Knows no tier; counts from any thread."""

from __future__ import annotations

import threading
from collections import Counter

from blendrag.store.forking import renew_after_fork


class Tally:
    """Named counters. A child process starts with its parent's counts."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self.renew_locks()
        renew_after_fork(self)

    def renew_locks(self) -> None:
        """See :mod:`forking`."""
        self._lock = threading.Lock()

    def add(self, name: str, amount: int = 1) -> None:
        """Count ``amount`` more. Calls nothing that could block or fail."""
        with self._lock:
            self._counts[name] += amount

    def __getitem__(self, name: str) -> int:
        return self._counts[name]
