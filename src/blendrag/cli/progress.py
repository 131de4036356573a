"""Progress of long commands on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)

from blendrag.cli import interrupt
from blendrag.cli.output import count, duration, megabytes
from blendrag.cli.status import say

if TYPE_CHECKING:
    from blendrag.engine.ingest import Totals
    from blendrag.planning.search import Step

#: Between two lines where there is no terminal.
LINE_EVERY_S = 5.0
#: Until the first file is done, what a token of text is taken to be.
TYPICAL_BYTES_PER_TOKEN = 4.0


class IngestProgress:
    """Called with the running totals after every chunk; names bad files as they are met."""

    def __init__(self, quiet: bool = False) -> None:
        console = Console(stderr=True)
        self._live = console.is_terminal and not quiet
        self._quiet = quiet
        self._failures = 0
        self._said = time.perf_counter()
        self._first: tuple[float, float] | None = None
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not self._live,
        )
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> IngestProgress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def __call__(self, totals: Totals) -> None:
        self._name_failures(totals)
        done = done_bytes(totals)
        text = f"{count(totals.chunks, 'chunk')}, {totals.tokens_per_s:,.0f} tokens/s"
        self._bar.update(
            self._task, description=text, completed=done, total=totals.total_bytes or None
        )
        now = time.perf_counter()
        self._first = self._first or (now, done)
        if not self._live and not self._quiet and now - self._said >= LINE_EVERY_S:
            self._said = now
            say("progress", f"{text}, {self._of_bytes(done, totals.total_bytes, now)}")

    def _of_bytes(self, done: float, total: float, now: float) -> str:
        """How far, and the time left by the rate since the first chunk was there."""
        text = f"{megabytes(done)} of {megabytes(total)}"
        assert self._first is not None
        since, at_first = self._first
        if at_first < done < total:
            seconds = (now - since) * (total - done) / (done - at_first)
            text += f", about {duration(seconds)} left"
        return text

    def _name_failures(self, totals: Totals) -> None:
        for failure in totals.failures[self._failures :]:
            self._bar.console.print(
                f"failed: {failure}", markup=False, highlight=False, soft_wrap=True
            )
        self._failures = len(totals.failures)

    def finish(self, failures: tuple[str, ...]) -> None:
        """Name the failures met since the last call."""
        for failure in failures[self._failures :]:
            say("failed", failure)
        self._failures = len(failures)


def done_bytes(totals: Totals) -> float:
    """Bytes of input done, the file at hand included by its tokens so far (an estimate)."""
    if not totals.total_bytes or totals.done_bytes >= totals.total_bytes:
        return totals.done_bytes
    by_tokens = TYPICAL_BYTES_PER_TOKEN * totals.tokens
    return min(max(totals.done_bytes, by_tokens), 0.99 * totals.total_bytes)


class TimeLeft:
    """How long a rest takes, by the mean of the steps so far but the first, which warms up.

    The mean and not the median: a step that begins a context pays for encoding it, and so will others.
    """

    #: Steps after the first before a guess is made.
    LEAST = 2

    def __init__(self) -> None:
        self._at_start: int | None = None
        self._warm: tuple[int, float] | None = None

    def __call__(self, done: int, total: int, now: float) -> float | None:
        """Seconds; ``None`` while too little is known. The first call is before the first step."""
        if self._at_start is None:
            self._at_start = done
        if self._warm is None and done > self._at_start:
            self._warm = (done, now)
        if self._warm is None or done >= total:
            return None
        since_done, since = self._warm
        steps = done - since_done
        return (now - since) * (total - done) / steps if steps >= self.LEAST else None


class QuestionProgress:
    """Called with how many questions are done, and of how many."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._live = console.is_terminal
        self._said = time.perf_counter()
        self._time_left = TimeLeft()
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("questions"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            transient=True,
            disable=not self._live,
        )
        self._task = self._bar.add_task("questions", total=None, left="")

    def __enter__(self) -> QuestionProgress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        now = time.perf_counter()
        seconds = self._time_left(done, total, now)
        left = "" if seconds is None else f"about {duration(seconds)} left"
        self._bar.update(self._task, completed=done, total=total, left=left)
        if not self._live and now - self._said >= LINE_EVERY_S:
            self._said = now
            say("progress", ", ".join([f"{done} of {total} questions", *([left] if left else [])]))


class ByteProgress:
    """Called with how many bytes are done, and of how many."""

    def __init__(self, verb: str) -> None:
        console = Console(stderr=True)
        self._verb = verb
        self._live = console.is_terminal
        self._said = time.perf_counter()
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn(verb),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not self._live,
        )
        self._task = self._bar.add_task(verb, total=None)

    def __enter__(self) -> ByteProgress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)
        now = time.perf_counter()
        if not self._live and now - self._said >= LINE_EVERY_S:
            self._said = now
            say("progress", f"{megabytes(done)} of {megabytes(total)} {self._verb}")


class SearchProgress:
    """Called with every schedule measured: a status line on a terminal, a line now and then elsewhere."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._live = console.is_terminal
        self._status = console.status("measuring full prefill")
        self._said = time.perf_counter()

    def __enter__(self) -> SearchProgress:
        if self._live:
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._status.stop()

    def __call__(self, step: Step) -> None:
        interrupt.expect("the best schedule so far is kept", grace_s=10.0)
        text = (
            f"{step.tried} schedules, best deviation {step.best.deviation:.4g} "
            f"({step.family.schedule}: {step.family.deviation:.4g})"
        )
        if self._live:
            self._status.update(text)
        elif time.perf_counter() - self._said >= LINE_EVERY_S:
            self._said = time.perf_counter()
            say("progress", text)
