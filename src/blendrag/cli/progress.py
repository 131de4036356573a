"""Progress of long commands on stderr: a live line on a terminal, else a line every few seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from blendrag.cli.output import count, duration, megabytes, say

if TYPE_CHECKING:
    from blendrag.engine import IngestReport

#: Between two printed lines.
LINE_EVERY_S = 5.0
#: Assumed until the first file is done.
TYPICAL_BYTES_PER_TOKEN = 4


class StatusLine:
    def __init__(self, text: str = "starting") -> None:
        self._console = Console(stderr=True)
        self._printed = self._console.get_time()
        # rich estimates the time left from the mean speed in a period, without the first step, which warms
        # up. A long period, because steps that begin a new context take longer, and more of them will come.
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
            speed_estimate_period=3600.0,
        )
        self._task = self._bar.add_task(text, total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, text: str, done: int = 0, total: int | None = None) -> None:
        """Replace the line; ``done`` of ``total`` sets the bar and gives an estimate of the time left."""
        (task,) = self._bar.tasks
        if task.total is None and total is not None:
            # what is done already took no time of this run
            self._bar.reset(self._task, total=total, completed=done)
        self._bar.update(self._task, completed=done, total=total)
        if task.time_remaining:
            text += f", about {duration(task.time_remaining)} left"
        self._bar.update(self._task, description=text)
        now = self._console.get_time()
        if self._bar.disable and now - self._printed >= LINE_EVERY_S:
            self._printed = now
            say("progress", text)


class ByteProgress(StatusLine):
    """Called with the bytes done and their total."""

    def __init__(self, verb: str) -> None:
        super().__init__(verb)
        self._verb = verb

    def __call__(self, done: int, total: int) -> None:
        self.show(f"{megabytes(done)} of {megabytes(total)} {self._verb}", done, total)


class IngestProgress(StatusLine):
    """Called with the running totals after every chunk; names bad files when they are met."""

    _failures = 0

    def __call__(self, totals: IngestReport) -> None:
        self.name_failures(totals.failures)
        done, total = totals.done_bytes, totals.total_bytes
        if done < total:  # of the current file, an estimate from its tokens so far
            by_tokens = TYPICAL_BYTES_PER_TOKEN * totals.tokens
            done = min(max(done, by_tokens), int(0.99 * total))
        speed = f"{count(totals.chunks, 'chunk')}, {totals.tokens_per_s:,.0f} tokens/s"
        self.show(f"{speed}, {megabytes(done)} of {megabytes(total)}", done, total)

    def name_failures(self, failures: list[str]) -> None:
        """Name the failures that were not named yet."""
        for failure in failures[self._failures :]:
            self._console.print(f"failed: {failure}", markup=False, highlight=False, soft_wrap=True)
        self._failures = len(failures)
