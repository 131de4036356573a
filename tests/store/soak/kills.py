"""Two processes at work on one store, one of them killed at a random moment, then the other.

Owns what the two do (put, put under eviction, recover, open and close) and when they die. What the
store must be afterwards is :mod:`soak.audit`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import select
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from kv_lab import Lab

from blendrag.store import DiskStore
from soak.audit import PATIENCE_S, PLENTY, Verdict, audit, make_chunks, put, summary
from soak.line import Heard, Teller
from soak.report import Report

#: Rounds on one store before a fresh one.
ROUNDS_PER_STORE = 8
_NUMBERS_PER_ROUND = 12
_ALL = range(ROUNDS_PER_STORE * _NUMBERS_PER_ROUND)
#: Put and pinned before the first kill; put and deleted all the time; put by whoever looks.
_PINNED, _COMING_AND_GOING, _FRESH = 1000, range(1001, 1005), 1010
_FEW = 6 * Lab.entry_bytes
_LONGEST_S = 0.04

Work = Callable[[Path, int, list[int], Teller], None]


def _putting(root: Path, limit_bytes: int, numbers: list[int], teller: Teller) -> None:
    """Put everything, then go on putting and deleting a few."""
    with contextlib.closing(DiskStore(root, limit_bytes)) as store:
        for number in numbers:
            teller.put(store, number)
        for number in itertools.cycle(_COMING_AND_GOING):
            put(store, number)
            store.delete(Lab.namespace, Lab.key(number))
            teller.say("alive", None)


def _evicting(root: Path, limit_bytes: int, numbers: list[int], teller: Teller) -> None:
    """Put more than there is room for, over and over."""
    with contextlib.closing(DiskStore(root, limit_bytes)) as store:
        for number in itertools.cycle(numbers):
            put(store, number)
            teller.say("alive", None)


def _recovering(root: Path, limit_bytes: int, numbers: list[int], teller: Teller) -> None:
    """Recover, every other time without an index."""
    with contextlib.closing(DiskStore(root, limit_bytes)) as store:
        for turn in itertools.count():
            if turn % 2:
                with store._index.exclusive():
                    store._index.set_aside()
            store.recover()
            teller.say("alive", None)


def _opening(root: Path, limit_bytes: int, numbers: list[int], teller: Teller) -> None:
    """Open, put one, close."""
    for number in itertools.cycle(numbers):
        with contextlib.closing(DiskStore(root, limit_bytes)) as store:
            teller.put(store, number)


class Worker:
    """A child at work."""

    def __init__(self, work: Callable[[Teller], None], interruptible: bool = False) -> None:
        self._pipe, sink = os.pipe()
        os.set_blocking(self._pipe, False)
        self.heard = Heard()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._pipe)
            _live(work, Teller(sink), interruptible)
        os.close(sink)

    def lives_on(self) -> bool:
        """Wait until it has told of something more; whether it does."""
        before, deadline = self.heard.beats, time.monotonic() + PATIENCE_S
        while self.heard.beats == before:
            left_s = max(0.0, deadline - time.monotonic())
            if not select.select([self._pipe], [], [], left_s)[0]:
                self.heard.complaints.append(f"hang: nothing done within {PATIENCE_S} s")
                return False
            self.heard.hear(self._pipe)
            if self.heard.beats == before and self._has_ended():
                self.heard.complaints.append("a writer ended by itself")
                return False
        return True

    def interrupt(self, times: int, chance: random.Random) -> None:
        """A storm of SIGINT, after which it has ended cleanly."""
        for _ in range(times):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGINT)
            time.sleep(chance.random() * 0.003)
        deadline = time.monotonic() + PATIENCE_S
        while not self._has_ended():
            if time.monotonic() > deadline:
                self.heard.complaints.append(f"hang: not interrupted within {PATIENCE_S} s")
                return
            time.sleep(0.001)

    def kill(self) -> Heard:
        """End it at once, wherever it is, and hear the last of it."""
        if not self._has_ended():
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0
        self.heard.hear(self._pipe)
        os.close(self._pipe)
        return self.heard

    def _has_ended(self) -> bool:
        if self.pid and os.waitpid(self.pid, os.WNOHANG)[0]:
            self.pid = 0
        return not self.pid


def _live(work: Callable[[Teller], None], teller: Teller, interruptible: bool) -> None:
    """A worker's whole life. Unless interrupted, it ends only by being killed."""
    signal.signal(signal.SIGINT, _interrupted if interruptible else signal.SIG_IGN)
    signal.signal(signal.SIGALRM, _interrupted)
    try:
        _in_the_storm(work, teller)
    except KeyboardInterrupt:
        pass
    except BaseException as exc:
        teller.say("complaint", f"a writer failed: {summary(exc)}")
    finally:
        os._exit(0)


def _in_the_storm(work: Callable[[Teller], None], teller: Teller) -> None:
    """Interrupts are raised below here only: outside, they would end up in the code of the parent,
    of which the child is a copy."""
    work(teller)


def _interrupted(number: int, frame: FrameType | None) -> None:
    is_swallowed = False
    while frame is not None:
        if frame.f_code is _in_the_storm.__code__:
            if not is_swallowed:
                raise KeyboardInterrupt
            signal.setitimer(signal.ITIMER_REAL, 0.001)  # once more, a little later
        is_swallowed |= _swallows(frame)
        frame = frame.f_back


def _swallows(frame: FrameType) -> bool:
    """Whether Python prints what is raised there and goes on: callbacks of weak references and
    ``__del__``."""
    file = Path(frame.f_code.co_filename).name
    return frame.f_code.co_name == "__del__" or file in ("weakref.py", "_weakrefset.py")


class Killing:
    """Rounds of kills on stores at one place, by chance, the same for the same seed but for time."""

    def __init__(self, place: Path, seed: int) -> None:
        self._root = place / "killed"
        self._chance = random.Random(seed)
        self._round = 0
        make_chunks([*_ALL, *_COMING_AND_GOING, _PINNED, _FRESH])

    def run(self, report: Report, kills: int) -> None:
        """At least so many kills."""
        before = report.done["kills"]
        while report.done["kills"] - before < kills:
            self._next(report)

    def _next(self, report: Report) -> None:
        turn = self._round % ROUNDS_PER_STORE
        self._round += 1
        if turn == 0:
            self._begin()
        numbers = list(_ALL[turn * _NUMBERS_PER_ROUND :][:_NUMBERS_PER_ROUND])
        work = [self._work(), self._work()]
        names = " and ".join(action.__name__.strip("_") for action in work)
        interrupted = self._chance.random() < 0.2
        workers = [
            self._worker(action, numbers, interrupted and i == 0) for i, action in enumerate(work)
        ]
        kills, complaints = self._end(workers, interrupted)
        seen = audit(
            self._root,
            self._required,
            [*_ALL, *_COMING_AND_GOING, _FRESH],
            self._limit_bytes,
            _FRESH,
        )
        verdict = Verdict(seen.lost, seen.wrong, (*complaints, *seen.complaints), seen.found)
        report.note("kills", f"{names}, round {self._round}", verdict, kills)
        if interrupted:
            report.done["interrupts"] += 1
        if self._limit_bytes == PLENTY:
            self._required.add(_FRESH)

    def _begin(self) -> None:
        """A fresh store. Every third one has room for a few chunks only, one of them pinned."""
        shutil.rmtree(self._root, ignore_errors=True)
        self._limit_bytes = _FEW if self._chance.random() < 1 / 3 else PLENTY
        store = DiskStore(self._root, self._limit_bytes)
        store.pin(Lab.namespace, Lab.key(_PINNED))
        put(store, _PINNED)
        store.close()
        self._required = {_PINNED}

    def _work(self) -> Work:
        if self._limit_bytes == _FEW:
            return self._chance.choice([_evicting, _evicting, _recovering])
        return self._chance.choice([_putting, _putting, _opening, _recovering])

    def _worker(self, work: Work, numbers: list[int], interruptible: bool) -> Worker:
        order = self._chance.sample(numbers, len(numbers))
        root, limit_bytes = self._root, self._limit_bytes
        return Worker(lambda teller: work(root, limit_bytes, order, teller), interruptible)

    def _end(self, workers: list[Worker], interrupted: bool) -> tuple[int, list[str]]:
        """End one at a random moment, see that the other goes on, end that; kills, complaints."""
        try:
            for worker in workers:
                worker.lives_on()
            time.sleep(self._chance.random() * _LONGEST_S)
            if interrupted:
                workers[0].interrupt(self._chance.randint(1, 20), self._chance)
            else:
                self._chance.shuffle(workers)
        finally:
            first = workers[0].kill()
            with contextlib.suppress(Exception):
                workers[1].lives_on()
                time.sleep(self._chance.random() * _LONGEST_S / 4)
            second = workers[1].kill()
        if self._limit_bytes == PLENTY:
            self._required.update(first.acknowledged, second.acknowledged)
        return 1 if interrupted else 2, [*first.complaints, *second.complaints]
