"""Two processes work on one store; one is killed at a random moment, then the other."""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from blendrag.store.disk import DiskStore
from lab.soak.store.audit import PLENTY, SoakReport, Verdict, audit, make_chunks, put
from lab.soak.store.children import Child, Teller
from store.kv_lab import Lab

#: Rounds on one store before it is replaced by a new one.
ROUNDS_PER_STORE = 8
_NUMBERS_PER_ROUND = 12
_ALL = range(ROUNDS_PER_STORE * _NUMBERS_PER_ROUND)
#: Put and pinned before the first kill; put and deleted all the time; put by the audit.
_PINNED, _COMING_AND_GOING, _FRESH = 1000, range(1001, 1005), 1010
_FEW = 6 * Lab.entry_bytes
_LONGEST_S = 0.04

Work = Callable[[DiskStore, list[int], Teller], None]


def _putting(store: DiskStore, numbers: list[int], teller: Teller) -> None:
    """Put everything, then put and delete a few chunks again and again."""
    for number in numbers:
        put(store, number, teller)
    for number in itertools.cycle(_COMING_AND_GOING):
        put(store, number)
        store.delete(Lab.namespace, Lab.key(number))
        teller.say("about")


def _evicting(store: DiskStore, numbers: list[int], teller: Teller) -> None:
    """Put more than fits, again and again."""
    for number in itertools.cycle(numbers):
        put(store, number)
        teller.say("about")


def _recovering(store: DiskStore, numbers: list[int], teller: Teller) -> None:
    """Recover, every other time without an index."""
    for turn in itertools.count():
        if turn % 2:
            with store._index.exclusive():
                store._index.set_aside()
        store.recover()
        teller.say("about")


def _opening(store: DiskStore, numbers: list[int], teller: Teller) -> None:
    """Open, put one chunk, close."""
    store.close()
    for number in itertools.cycle(numbers):
        with contextlib.closing(DiskStore(store.root, store.limit_bytes)) as opened:
            put(opened, number, teller)


class Killing:
    """Rounds of kills. The same seed gives the same rounds, except for the moments of the kills."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._root = directory / "killed"
        self._chance = random.Random(seed)
        self._rounds = 0
        self._limit_bytes, self._required = PLENTY, {_PINNED}
        make_chunks([*_ALL, *_COMING_AND_GOING, _PINNED, _FRESH])

    def run(self, report: SoakReport, kills: int) -> None:
        """At least so many kills."""
        until = report.done["kills"] + kills
        while report.done["kills"] < until:
            self._round(report)

    def _round(self, report: SoakReport) -> None:
        turn = self._rounds % ROUNDS_PER_STORE
        self._rounds += 1
        if turn == 0:
            self._new_store()
        is_small = self._limit_bytes == _FEW
        choices = [_evicting, _recovering] if is_small else [_putting, _opening, _recovering]
        work = self._chance.choices(choices, [2, 1] if is_small else [2, 1, 1], k=2)
        numbers = list(_ALL[turn * _NUMBERS_PER_ROUND :][:_NUMBERS_PER_ROUND])
        interrupted = self._chance.random() < 0.2
        children = [
            self._child(action, numbers, interrupted and i == 0) for i, action in enumerate(work)
        ]
        complaints = self._end(children, interrupted)
        candidates = [*_ALL, *_COMING_AND_GOING, _FRESH]
        seen = audit(self._root, self._required, candidates, self._limit_bytes, _FRESH)
        verdict = Verdict(seen.lost, seen.wrong, (*complaints, *seen.complaints))
        names = " and ".join(action.__name__.strip("_") for action in work)
        report.note("kills", f"{names}, round {self._rounds}", verdict, 1 if interrupted else 2)
        report.done["interrupts"] += interrupted
        if not is_small:
            self._required.add(_FRESH)

    def _new_store(self) -> None:
        """Every third one has room for a few chunks only, one of them pinned."""
        shutil.rmtree(self._root, ignore_errors=True)
        self._limit_bytes = _FEW if self._chance.random() < 1 / 3 else PLENTY
        with contextlib.closing(DiskStore(self._root, self._limit_bytes)) as store:
            store.pin(Lab.namespace, Lab.key(_PINNED))
            put(store, _PINNED)
        self._required = {_PINNED}

    def _child(self, work: Work, numbers: list[int], interruptible: bool) -> Child:
        order = self._chance.sample(numbers, len(numbers))
        root, limit_bytes = self._root, self._limit_bytes

        def act(teller: Teller) -> None:
            with contextlib.closing(DiskStore(root, limit_bytes)) as store:
                work(store, order, teller)

        return Child(act, interruptible)

    def _end(self, children: list[Child], interrupted: bool) -> list[str]:
        """End one at a random moment, see that the other goes on, end that; complaints."""
        try:
            for child in children:
                child.goes_on()
            time.sleep(self._chance.random() * _LONGEST_S)
            if interrupted:
                children[0].interrupt(self._chance.randint(1, 20), self._chance)
            else:
                self._chance.shuffle(children)
        finally:
            first = children[0].kill()
            with contextlib.suppress(Exception):
                children[1].goes_on()
                time.sleep(self._chance.random() * _LONGEST_S / 4)
            second = children[1].kill()
        if self._limit_bytes == PLENTY:
            self._required.update(first.acknowledged, second.acknowledged)
        return [*first.complaints, *second.complaints]
