"""Which entries may not be evicted now. Counts only; knows no files."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from blendrag.store.forking import renew_after_fork


class Scope:
    """One open :meth:`Pins.scope`; see :class:`blendrag.store.base.PinScope`."""

    def __init__(self, pins: Pins) -> None:
        self._pins = pins
        self.held: set[tuple[str, str]] = set()

    def protect(self, namespace: str, key: str) -> None:
        self._pins.hold(self, (namespace, key))


class Pins:
    """Entries held by at least one open scope. Thread-safe; of this process only."""

    def __init__(self) -> None:
        self._scopes: list[Scope] = []
        self._counts: Counter[tuple[str, str]] = Counter()
        self.renew_locks()
        renew_after_fork(self)

    def renew_locks(self) -> None:
        """See :mod:`forking`."""
        self._lock = threading.Lock()

    @contextmanager
    def scope(self) -> Iterator[Scope]:
        """Hold every entry noted from here to the end of the block."""
        scope = Scope(self)
        with self._lock:
            self._scopes.append(scope)
        try:
            yield scope
        finally:
            with self._lock:
                self._scopes.remove(scope)
                self._counts -= Counter(scope.held)

    def hold(self, scope: Scope, entry: tuple[str, str]) -> None:
        with self._lock:
            self._hold(scope, entry)

    def note_put(self, entry: tuple[str, str]) -> None:
        """An entry was put: every open scope holds it."""
        with self._lock:
            for scope in self._scopes:
                self._hold(scope, entry)

    def _hold(self, scope: Scope, entry: tuple[str, str]) -> None:
        if entry not in scope.held:
            scope.held.add(entry)
            self._counts[entry] += 1

    def __contains__(self, entry: tuple[str, str]) -> bool:
        with self._lock:
            return self._counts.get(entry, 0) > 0
