"""What a tier counted since it was opened. Knows no tier; counts from any thread."""

from __future__ import annotations

import os
import threading
from collections import Counter


class Tally:
    """Named counters. A child process starts with its parent's counts and a lock of its own."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._renew()

    def _renew(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def add(self, name: str, amount: int = 1) -> None:
        """Count ``amount`` more. Calls nothing that could block or fail."""
        if self._pid != os.getpid():  # whoever held the lock at the fork is not here to release it
            self._renew()
        with self._lock:
            self._counts[name] += amount

    def __getitem__(self, name: str) -> int:
        return self._counts[name]
