"""Checks that a store still holds what it must, and counts the failures of a run.

The store is read in a child, so that a crash or a hang is noticed. Chunks are numbered and made in the
parent, because a forked child runs no torch operator.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from blendrag.errors import StoreError
from blendrag.store.disk import DiskStore
from blendrag.store.kv import ChunkKV
from lab.soak.store.children import Child, Teller
from store.kv_lab import Lab

#: A limit that is never reached.
PLENTY = 1 << 30

_kvs: dict[int, ChunkKV] = {}


def make_chunks(numbers: Iterable[int]) -> None:
    """Make these chunks once. Call it before a fork."""
    for number in numbers:
        if number not in _kvs:
            _kvs[number] = Lab.kv(number)


def put(store: DiskStore, number: int, teller: Teller | None = None) -> None:
    """Put a chunk and acknowledge it."""
    store.put(Lab.namespace, Lab.key(number), _kvs[number])
    if teller is not None:
        teller.say("acknowledged", number)


def read(store: DiskStore, number: int) -> bool | None:
    """Whether an entry has exactly the bytes that were put; ``None`` is a miss.

    Raises :class:`CorruptKVError` for bytes in doubt.
    """
    reader = Lab.open(store, number)
    return None if reader is None else Lab.gives(reader, _kvs[number])


@dataclass(frozen=True)
class Verdict:
    """What was found in one store."""

    lost: tuple[int, ...] = ()
    """Acknowledged chunks that are missing."""
    wrong: tuple[int, ...] = ()
    """Chunks read with bytes that were never put."""
    complaints: tuple[str, ...] = ()
    """All other faults, hangs and crashes included."""

    @property
    def is_good(self) -> bool:
        return not (self.lost or self.wrong or self.complaints)


def audit(
    root: Path,
    required: Collection[int],
    candidates: Collection[int],
    limit_bytes: int = PLENTY,
    fresh: int | None = None,
) -> Verdict:
    """Open the store at ``root``, read all chunks, and put one more.

    ``required`` must be there; the other ``candidates`` may be; ``fresh`` is put and must be readable
    afterwards. No other process uses the store.
    """
    numbers = sorted({*candidates, *required})
    make_chunks([*numbers, *([] if fresh is None else [fresh])])
    heard = Child(lambda teller: _inspect(root, numbers, limit_bytes, fresh, teller)).wait()
    states: dict[str, bool | None] = heard.answer or {}
    return Verdict(
        tuple(n for n in sorted(required) if states and states[str(n)] is None),
        tuple(int(n) for n, state in states.items() if state is False),
        tuple(heard.complaints),
    )


def _inspect(
    root: Path, numbers: list[int], limit_bytes: int, fresh: int | None, teller: Teller
) -> None:
    complain = partial(teller.say, "complaints")
    with contextlib.closing(DiskStore(root, limit_bytes)) as store:
        if left := os.listdir(root / "tmp"):
            complain(f"temporaries left after opening: {left}")
        states: dict[int, bool | None] = {}
        for number in numbers:
            states[number] = None
            try:
                states[number] = read(store, number)
            except StoreError as exc:
                complain(f"chunk {number}: {exc}")
        for complaint in _mismatches(store, states, limit_bytes):
            complain(complaint)
        if fresh is not None:
            put(store, fresh)
            if read(store, fresh) is not True:
                complain("a chunk put afterwards cannot be read")
    teller.say("answer", states)


def _mismatches(store: DiskStore, states: dict[int, bool | None], limit_bytes: int) -> list[str]:
    """Disagreements between index, files and counters."""
    found = {Lab.key(number) for number, state in states.items() if state is not None}
    files = Lab.payloads(store.root)
    size_bytes = sum(path.stat().st_size for path in files)
    stats = store.stats()
    pairs = {
        "keys": (set(store.keys(Lab.namespace)), found),
        "keys of files": (sorted(path.name[:64] for path in files), sorted(found)),
        "files": (len(files), stats.entries),
        "bytes": (stats.size_bytes, size_bytes),
        "quarantined": (stats.quarantined, 0),
        "bytes over the limit": (max(0, size_bytes - limit_bytes), 0),
    }
    return [f"{what}: {is_}, expected {must}" for what, (is_, must) in pairs.items() if is_ != must]


class SoakReport:
    """Counts of one run: what was done to stores, and what they did not survive."""

    #: Failures described in words; all are counted.
    MAX_DETAILS = 20
    FAILURES = ("acknowledged lost", "wrong KV", "hangs", "reader crashes", "other failures")

    def __init__(self, progress: TextIO | None = None) -> None:
        """Prints to ``progress`` every few seconds."""
        self.done: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.details: list[str] = []
        self._progress = progress
        self._started = self._printed = time.monotonic()

    def note(self, kind: str, circumstances: str, verdict: Verdict, count: int = 1) -> None:
        """``count`` events of this ``kind`` happened to a store, with this result."""
        self.done[kind] += count
        self.failed["acknowledged lost"] += len(verdict.lost)
        self.failed["wrong KV"] += len(verdict.wrong)
        for complaint in verdict.complaints:
            category = {"hang": "hangs", "crash": "reader crashes"}.get(complaint.split(":")[0])
            self.failed[category or "other failures"] += 1
        if not verdict.is_good and len(self.details) < self.MAX_DETAILS:
            self.details.append(f"{circumstances}: {verdict}")
            self.say(f"FAILED {self.details[-1]}")
        if time.monotonic() - self._printed > 2.0:
            self._printed = time.monotonic()
            self.say(self.line())

    @property
    def is_good(self) -> bool:
        return not self.failed.total()

    def check(self) -> None:
        """Raise ``AssertionError`` unless everything was survived."""
        if not self.is_good:
            raise AssertionError("\n".join([self.line(), *self.details]))

    def line(self) -> str:
        """All counts in one line."""
        done = ", ".join(f"{count:,} {kind}" for kind, count in self.done.items())
        failed = ", ".join(f"{self.failed[name]} {name}" for name in self.FAILURES)
        return f"{done} | {failed} | {time.monotonic() - self._started:.0f} s"

    def as_json(self) -> dict[str, Any]:
        return {
            "done": dict(self.done),
            **{name.lower().replace(" ", "_"): self.failed[name] for name in self.FAILURES},
            "details": self.details,
            "elapsed_s": round(time.monotonic() - self._started, 1),
        }

    def say(self, line: str) -> None:
        if self._progress is not None:
            print(line, file=self._progress, flush=True)
