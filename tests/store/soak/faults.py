"""Every system call of an operation fails once, one by one; and the same for kills and power cuts.

Owns which errors fit which call. After each: what was acknowledged is there bit-exact, the error
was one of ours, the same store object and a new one can be used.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from soak.audit import PATIENCE_S, Verdict, audit
from soak.line import Heard
from soak.power import Disk, outcomes
from soak.report import Report
from soak.scenarios import FRESH, NUMBERS, Scenario
from soak.tracer import Call, Stuck, Traced

#: Calls that take room on the disk or make something durable.
_WRITING = ("write", "pwrite", "writev", "pwritev", "ftruncate", "fallocate", "mkdir", "rename")
_SYNCING = ("fsync", "fdatasync")
_MOVING = ("read", "pread", "preadv", "write", "pwrite")
#: Moving half of what was asked for is no error.
SHORT = 0
KILL = -1


@dataclass(frozen=True)
class Fault:
    """What happens at one call: an error number, :data:`SHORT` or :data:`KILL`."""

    call: Call
    what: int

    def __str__(self) -> str:
        name = {SHORT: "half", KILL: "kill"}.get(self.what) or errno.errorcode[self.what]
        return f"{name} at {self.call}"


def faults_of(call: Call) -> list[Fault]:
    """All that can happen at a call."""
    if call.name == "unlock":  # of a descriptor that is open: that does not fail
        return [Fault(call, KILL)]
    kinds = [errno.EIO, KILL]
    if call.name in (*_WRITING, *_SYNCING) or call.creates:
        kinds.append(errno.ENOSPC)
    if call.name == "open":
        kinds.append(errno.EMFILE)
    if call.name == "mmap":
        kinds.append(errno.ENOMEM)
    if call.name in _MOVING:
        kinds.append(SHORT)
    return [Fault(call, kind) for kind in kinds]


class Bench:
    """Runs scenarios in a directory of its own."""

    def __init__(self, place: Path) -> None:
        self._here = place / "here"
        self._root = self._here / "store"
        self._original = place / "original"

    def calls(self, scenario: Scenario) -> list[Call]:
        """The system calls of a scenario on its store, undisturbed."""
        self._build(scenario)
        traced, heard, pipe = self._start(scenario, attempts=1)
        calls = list(traced.calls())
        self._end(traced, heard, pipe)
        if heard.errors or heard.complaints:
            raise AssertionError(f"{scenario.name} fails in peace: {heard}")
        return calls

    def run(self, scenario: Scenario, fault: Fault) -> Verdict:
        """One fault. :meth:`calls` of this scenario came before."""
        traced, heard, pipe = self._start(scenario, attempts=2)
        for call in traced.calls():
            if call.number == fault.call.number:
                if fault.what == KILL:
                    traced.kill()
                elif fault.what == SHORT:
                    traced.shorten()
                else:
                    traced.fail(fault.what)
                break
        failure = self._end(traced, heard, pipe)
        complaints = [*heard.complaints, *([failure] if failure else [])]
        if fault.what != KILL and heard.attempts < 2 and not failure:
            complaints.append(f"crash: {heard.attempts} of 2 attempts came to an end")
        seen = self._audit(scenario, heard)
        lost = seen.lost if len(seen.lost) > (scenario.may_lose if fault.what > 0 else 0) else ()
        return Verdict(lost, seen.wrong, (*complaints, *seen.complaints), seen.found)

    def cuts(
        self, scenario: Scenario, chance: random.Random, mixtures: int, stride: int = 1
    ) -> Iterator[tuple[str, Verdict]]:
        """Cut the power before every ``stride``-th call that changes something, and at the end."""
        self._build(scenario)
        traced, heard, pipe = self._start(scenario, attempts=1)
        disk, steps = Disk(self._here), itertools.count()
        try:
            for call in traced.calls():
                changes = call.name in (*_WRITING, *_SYNCING, "unlink") or call.creates
                if changes and next(steps) % stride == 0:
                    heard.hear(pipe)
                    yield from self._cut(scenario, disk, heard, chance, mixtures, str(call))
                if call.name in _SYNCING and traced.finish() == 0:
                    disk.sync(self._here / call.path)
            heard.hear(pipe)
            yield from self._cut(scenario, disk, heard, chance, mixtures, "the end")
        finally:
            self._end(traced, heard, pipe)

    def _cut(
        self,
        scenario: Scenario,
        disk: Disk,
        heard: Heard,
        chance: random.Random,
        mixtures: int,
        where: str,
    ) -> Iterator[tuple[str, Verdict]]:
        after = self._here.with_name("after")
        for survives in outcomes(chance, mixtures):
            _remove(after)
            disk.cut(after, survives)
            yield f"power cut before {where}", self._audit(scenario, heard, after / self._root.name)

    def _audit(self, scenario: Scenario, heard: Heard, root: Path | None = None) -> Verdict:
        required = scenario.required(heard.acknowledged)
        return audit(root or self._root, required, NUMBERS, scenario.limit_bytes, FRESH)

    def _build(self, scenario: Scenario) -> None:
        """Make what the scenario begins with, to be copied as often as need be."""
        _remove(self._original)
        self._original.mkdir()
        scenario.build(self._original / self._root.name)

    def _start(self, scenario: Scenario, attempts: int) -> tuple[Traced, Heard, int]:
        _remove(self._here)
        shutil.copytree(self._original, self._here)
        source, sink = os.pipe()
        os.set_blocking(source, False)
        traced = Traced(self._here, partial(scenario.prepare, self._root, sink, attempts))
        os.close(sink)
        return traced, Heard(), source

    @staticmethod
    def _end(traced: Traced, heard: Heard, pipe: int) -> str | None:
        """Let the child end, and hear the last of it."""
        failure = None
        try:
            status = traced.wait(PATIENCE_S)
            if status not in (0, -9):
                failure = f"crash: the child ended with status {status}"
        except Stuck as exc:
            failure = f"hang: {exc}"
        heard.hear(pipe)
        os.close(pipe)
        return failure


def fail_everything(
    place: Path, scenarios: tuple[Scenario, ...], report: Report, most: int | None = None
) -> None:
    """Every fault of these scenarios, or about so many of each, evenly spread."""
    bench = Bench(place)
    for scenario in scenarios:
        faults = [fault for call in bench.calls(scenario) for fault in faults_of(call)]
        for fault in faults[:: 1 if most is None else -(-len(faults) // most)]:
            report.note("faults", f"{scenario.name}, {fault}", bench.run(scenario, fault))


def cut_everywhere(
    place: Path,
    scenarios: tuple[Scenario, ...],
    report: Report,
    mixtures: int,
    seed: int,
    stride: int = 1,
) -> None:
    """Power cuts at every ``stride``-th step of these scenarios."""
    bench, chance = Bench(place), random.Random(seed)
    for scenario in scenarios:
        for where, verdict in bench.cuts(scenario, chance, mixtures, stride):
            report.note("power cuts", f"{scenario.name}, {where}", verdict)


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)
