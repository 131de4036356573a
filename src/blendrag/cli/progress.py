"""Progress of long commands on stderr: a live line on a terminal, else a line every few seconds."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Self

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from blendrag.cli import interrupt
from blendrag.cli.output import console, count, duration, say
from blendrag.store.durable import readable_size
from blendrag.wording import printable_line

if TYPE_CHECKING:
    from blendrag.engine import IngestReport

#: Between two printed lines.
LINE_EVERY_S = 5.0
#: What an ingest leaves that Ctrl-C ended after its last document: with decode weights measured, or not yet.
ALL_STORED = "every document is stored"
MEASURED_LATER = (
    f"{ALL_STORED}; decode weights are measured between the answers of blendrag chat and serve, "
    "or by blendrag verify MODEL"
)
#: Most steps that are remembered.
MARKS = 256


class StatusLine:
    def __init__(self, text: str = "starting") -> None:
        self._console = console(err=True)
        self._printed = self._console.get_time()
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._time_left = TimeLeft()
        self._task = self._bar.add_task(printable_line(text), total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, text: str, done: float = 0, total: float | None = None) -> None:
        """Replace the line; ``done`` of ``total`` sets the bar and gives an estimate of the time left."""
        now = self._console.get_time()
        left_s = self._time_left.seconds(now, done, (total or 0) - done)
        if left_s is not None and left_s >= 0.05:
            text += f", about {duration(left_s)} left"
        self._bar.update(self._task, completed=done, total=total, description=printable_line(text))
        if self._bar.disable and now - self._printed >= LINE_EVERY_S:
            self._printed = now
            say("progress", text)


class TimeLeft:
    """Estimates the time left from the speed over the last half of the work done.

    So what was slow at the beginning is soon forgotten. The first step, which warms up, counts nothing.
    """

    def __init__(self) -> None:
        self._marks: list[tuple[float, float]] = []
        """Work done, and when: at first, after the first step, then after others."""

    def seconds(self, now: float, done: float, left: float) -> float | None:
        """The time left for ``left`` at time ``now``; ``None`` before it can be told."""
        marks = self._marks
        if not done and marks and marks[-1][0]:  # other work begins
            marks.clear()
        if not marks or done > marks[-1][0]:
            marks.append((done, now))
        if len(marks) < 3 or done <= (first := marks[1][0]):
            return None
        if len(marks) > MARKS:
            del marks[2:-1:2]
        half = (first + done) / 2
        before, began = marks[max(1, bisect_right(marks, (half, now)) - 1)]
        return left * (now - began) / (done - before)


class ByteProgress(StatusLine):
    """Called with the bytes done and their total."""

    def __init__(self, verb: str) -> None:
        super().__init__(verb)
        self._verb = verb

    def __call__(self, done: int, total: int) -> None:
        self.show(f"{readable_size(done)} of {readable_size(total)} {self._verb}", done, total)


class IngestProgress(StatusLine):
    """Called with the running totals after every chunk; names bad files when they are met."""

    _failures = 0

    def __call__(self, totals: IngestReport) -> None:
        self.name_failures(totals.failures)
        if totals.measured is not None:
            is_measured = totals.measured >= 1
            interrupt.expect(ALL_STORED if is_measured else MEASURED_LATER, grace_s=10.0)
            put_off = ", which Ctrl-C puts off" * (not is_measured)
            text = f"{totals.step}{put_off}; {totals.measured:.0%} done"
            self.show(text, totals.measured, 1.0)
            return
        step, of = totals.step, readable_size(totals.total_bytes)
        if not (step or totals.chunks):  # other machines read
            self.show("reading the documents")
            return
        if not (totals.chunks_computed or totals.documents):
            embedded = f"{count(totals.embedded, 'chunk')} embedded, " * bool(totals.embedded)
            self.show(f"{step}; {embedded}{readable_size(totals.read_bytes)} of {of} read")
            return
        speed = f"{count(totals.chunks, 'chunk')}, {totals.tokens_per_s:,.0f} tokens/s"
        if totals.work:
            done = f"{min(1.0, totals.work_done / totals.work):.0%}"
        else:
            done = f"{readable_size(totals.done_bytes)} of {of}"
        text = f"{step}{'; ' * bool(step)}{done} done, {speed}"
        self.show(text, totals.work_done, totals.work)

    def name_failures(self, failures: list[str]) -> None:
        """Name the failures that were not named yet."""
        for failure in failures[self._failures :]:
            line = f"failed: {' '.join(failure.split())}"
            self._console.print(line, soft_wrap=True)
        self._failures = len(failures)
