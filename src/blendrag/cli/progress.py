"""Progress of long commands on stderr: a live line on a terminal, else a line every few seconds."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from blendrag.cli import interrupt
from blendrag.cli.output import count, duration, megabytes, say

if TYPE_CHECKING:
    from blendrag.engine import IngestReport
    from blendrag.planning.calibrate import Found

#: Between two printed lines.
LINE_EVERY_S = 5.0
#: Assumed until the first file is done.
TYPICAL_BYTES_PER_TOKEN = 4.0


class TimeLeft:
    """Estimates the remaining time from the mean speed, without the first step, which warms up.

    The mean and not the median: a step that begins a new context pays for encoding it, and so will others.
    """

    #: Steps after the first before an estimate is given.
    MIN_STEPS = 2

    def __init__(self) -> None:
        self._steps = -1
        self._done = -1.0
        self._warm = (0.0, 0.0)

    def __call__(self, done: float, total: float, now: float) -> float | None:
        """Seconds, or ``None`` if too little is known. The first call is before the first found."""
        if done > self._done:
            self._steps, self._done = self._steps + 1, done
            if self._steps == 1:
                self._warm = (done, now)
        if self._steps <= self.MIN_STEPS or done >= total:
            return None
        since_done, since = self._warm
        return (now - since) * (total - done) / (done - since_done)


class StatusLine:
    """One line that says how far a command is."""

    def __init__(self, text: str = "starting") -> None:
        self._console = Console(stderr=True)
        self._live = self._console.is_terminal
        self._printed = time.perf_counter()
        self._time_left = TimeLeft()
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            console=self._console,
            transient=True,
            disable=not self._live,
        )
        self._task = self._bar.add_task(text, total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def show(self, text: str, done: float = 0.0, total: float = 0.0) -> None:
        """Replace the line; ``done`` of ``total`` sets the bar and gives an estimate of the time left."""
        now = time.perf_counter()
        seconds = self._time_left(done, total, now)
        if seconds is not None:
            text += f", about {duration(seconds)} left"
        self._bar.update(self._task, description=text, completed=done, total=total or None)
        if not self._live and now - self._printed >= LINE_EVERY_S:
            self._printed = now
            say("progress", text)


class IngestProgress(StatusLine):
    """Called with the running totals after every chunk; names bad files when they are met."""

    _failures = 0

    def __call__(self, totals: IngestReport) -> None:
        self.name_failures(totals.failures)
        done = self._done_bytes(totals)
        self.show(
            f"{count(totals.chunks, 'chunk')}, {totals.tokens_per_s:,.0f} tokens/s, "
            f"{megabytes(done)} of {megabytes(totals.total_bytes)}",
            done,
            totals.total_bytes,
        )

    def name_failures(self, failures: list[str]) -> None:
        """Name the failures that were not named yet."""
        for failure in failures[self._failures :]:
            self._console.print(f"failed: {failure}", markup=False, highlight=False, soft_wrap=True)
        self._failures = len(failures)

    @staticmethod
    def _done_bytes(totals: IngestReport) -> float:
        """Bytes of input done; of the current file, an estimate from its tokens so far."""
        if totals.done_bytes >= totals.total_bytes:
            return totals.done_bytes
        by_tokens = TYPICAL_BYTES_PER_TOKEN * totals.tokens
        return min(max(totals.done_bytes, by_tokens), 0.99 * totals.total_bytes)


class ByteProgress(StatusLine):
    """Called with the bytes done and their total."""

    def __init__(self, verb: str) -> None:
        super().__init__(verb)
        self._verb = verb

    def __call__(self, done: int, total: int) -> None:
        self.show(f"{megabytes(done)} of {megabytes(total)} {self._verb}", done, total)


class QuestionProgress(StatusLine):
    """Called with the questions done and their total."""

    def __call__(self, done: int, total: int) -> None:
        self.show(f"{done} of {total} questions", done, total)


class StepProgress(StatusLine):
    """Called with what is measured, the steps done and their total."""

    def __call__(self, what: str, done: int, total: int) -> None:
        self.show(f"{what}, {done} of {total} steps done", done, total)


class SearchProgress(StatusLine):
    """Called with every schedule measured."""

    def __call__(self, found: Found) -> None:
        interrupt.expect("the best schedule so far is kept", grace_s=10.0)
        self.show(
            f"{found.tried} schedules, best deviation {found.best.deviation:.4g} "
            f"({found.family.schedule}: {found.family.deviation:.4g})"
        )
