"""The counts: what was done to stores, and what of it they did not survive."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any, TextIO

from soak.audit import Verdict

#: Failures whose circumstances are kept; the rest is counted.
MAX_DETAILS = 20
_INTERVAL_S = 2.0


class Report:
    """Counts of one run. Prints progress now and then if it is given somewhere to print."""

    def __init__(self, progress: TextIO | None = None, targets: dict[str, int] | None = None):
        self.done: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.details: list[str] = []
        self._progress = progress
        self._targets = targets or {}
        self._started = self._printed = time.monotonic()

    def note(self, kind: str, circumstances: str, verdict: Verdict, count: int = 1) -> None:
        """``count`` things of this ``kind`` were done to a store, and this was found then."""
        self.done[kind] += count
        self.failed["acknowledged lost"] += len(verdict.lost)
        self.failed["wrong KV"] += len(verdict.wrong)
        for complaint in verdict.complaints:
            self.failed[_category(complaint)] += 1
        if not verdict.is_good and len(self.details) < MAX_DETAILS:
            self.details.append(f"{circumstances}: {verdict}")
            self.say(f"FAILED {self.details[-1]}")
        if time.monotonic() - self._printed > _INTERVAL_S:
            self._printed = time.monotonic()
            self.say(self.line())

    @property
    def is_good(self) -> bool:
        return not self.failed.total()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def line(self) -> str:
        """All counts in one line."""
        done = {**dict.fromkeys(self._targets, 0), **self.done}
        parts = [
            f"{count:,} of {self._targets[kind]:,} {kind}"
            if kind in self._targets
            else f"{count:,} {kind}"
            for kind, count in done.items()
        ]
        return f"{', '.join(parts)} | {', '.join(self._failures())} | {self.elapsed_s:.0f} s"

    def _failures(self) -> list[str]:
        always = ("acknowledged lost", "wrong KV", "hangs", "reader crashes", "other failures")
        return [f"{self.failed[name]} {name}" for name in always]

    def as_json(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            "done": dict(self.done),
            "acknowledged_lost": self.failed["acknowledged lost"],
            "wrong_kv": self.failed["wrong KV"],
            "hangs": self.failed["hangs"],
            "reader_crashes": self.failed["reader crashes"],
            "other_failures": self.failed["other failures"],
            "details": self.details,
            "elapsed_s": round(self.elapsed_s, 1),
        }

    def say(self, line: str) -> None:
        """Print a line, if there is somewhere to print."""
        if self._progress is not None:
            print(line, file=self._progress, flush=True)


def _category(complaint: str) -> str:
    kind = complaint.split(":", 1)[0]
    return {"hang": "hangs", "crash": "reader crashes"}.get(kind, "other failures")


def checked(report: Report) -> None:
    """Raise ``AssertionError`` unless all was survived: for tests."""
    if not report.is_good:
        raise AssertionError("\n".join([report.line(), *report.details]))
