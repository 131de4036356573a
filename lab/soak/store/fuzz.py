"""Damages a store and reads it: exact bytes or a miss, in bounded time, and no crash.

Damage is done and read in a child, which says beforehand what comes next.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import unpickling
from blendrag.errors import CorruptKVError, StoreError
from blendrag.store.disk import DiskStore
from lab.soak.store.audit import PLENTY, SoakReport, Verdict, make_chunks, put, read
from lab.soak.store.children import Child, Teller
from lab.soak.store.damage import (
    INDEX,
    PAYLOAD,
    REFUSABLE,
    WHILE_OPEN,
    DamageTarget,
    damage_payload,
    restore,
)
from store.kv_lab import Lab

#: Mutations per child.
BATCH = 500
#: Every so many batches one is on the index, which takes that much longer.
INDEX_EVERY = 20
_NUMBERS = range(6)
_FRESH = 50
_OTHERS = range(60, 64)
_WRONG = "wrong KV"

#: Is given chance, how many mutations to make, and the line to the parent.
Mutate = Callable[[random.Random, int, Teller], None]


class StoreFuzzing:
    """Batches of damage. The same seed gives the same damage."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._directory = directory
        self._seed = seed
        self._batches = 0
        self._about = ""
        make_chunks([*_NUMBERS, _FRESH, *_OTHERS])
        self._make_originals()

    def run(self, report: SoakReport, mutations: int) -> None:
        """So many mutations, most of them of payloads."""
        until = report.done["mutations"] + mutations
        while (left := until - report.done["mutations"]) > 0:
            on_index = self._batches % INDEX_EVERY == 1
            mutate = self.mutate_index if on_index else self.mutate_payloads
            self.run_batch(report, min(BATCH, left), mutate)

    def run_batch(self, report: SoakReport, count: int, mutate: Mutate) -> None:
        seed = f"{self._seed}/{self._batches}"
        self._batches += 1
        heard = Child(lambda teller: mutate(random.Random(seed), count, teller)).wait()
        wrong = tuple(1 for text in heard.complaints if text.startswith(_WRONG))
        others = tuple(text for text in heard.complaints if not text.startswith(_WRONG))
        circumstances = f"mutations with seed {seed}, {heard.about}: {heard.complaints[:3]}"
        done = count if not others else max(1, heard.done)
        report.note("mutations", circumstances, Verdict((), wrong, others), done)

    # -- payloads --------------------------------------------------------------------------------

    def mutate_payloads(self, chance: random.Random, count: int, teller: Teller) -> None:
        """Damage one file after the other; read each, put it again and read it again."""
        target = self._fresh("closed", chance)
        store = DiskStore(target.root, PLENTY)
        for i in range(count):
            number, name = chance.choice(_NUMBERS), chance.choice(PAYLOAD)
            self._note(teller, f"number {i}, {name}")
            path = Lab.file(store, number)
            data = path.read_bytes()
            damage_payload(name, target, path)
            if chance.random() < 0.02:
                store.recover()
            self._read(store, number, teller)
            put(store, number)
            paths = list((store.root / "kv").rglob(f"{Lab.key(number)}.*.kv"))
            if paths == [path]:  # unharmed, or harmed where no reader looks
                restore(path, data)
            elif len(paths) != 1:
                self._complain(teller, f"{len(paths)} files of one chunk")
            if not self._read(store, number, teller):
                self._complain(teller, "a chunk cannot be put again")
            self._check_outside(target, teller)
            if i % 50 == 49:
                teller.say("done", i + 1)
        store.close()

    def _read(self, store: DiskStore, number: int, teller: Teller) -> bool:
        """Whether the chunk was read. Complains about wrong bytes."""
        try:
            result = read(store, number)
        except CorruptKVError:
            return False
        if result is False:
            self._complain(teller, _WRONG)
        return result is not None

    def _check_outside(self, target: DamageTarget, teller: Teller) -> None:
        names = {path.name for path in target.outside.parent.iterdir()} - {"elsewhere"}
        if names != {"outside", "store"} or target.outside.read_bytes() != b"precious":
            self._complain(teller, "a file outside of the store was touched")
        if unpickling.caught():
            self._complain(teller, "something was unpickled")

    def _note(self, teller: Teller, about: str) -> None:
        self._about = about
        teller.say("about", about)

    def _complain(self, teller: Teller, what: str) -> None:
        teller.say("complaints", f"{what} at {self._about}")

    # -- the index -------------------------------------------------------------------------------

    def mutate_index(self, chance: random.Random, count: int, teller: Teller) -> None:
        """Damage the index of a new store each time; read and put, then again with a new process."""
        for i in range(count):
            target = self._fresh(chance.choice(["closed", "crashed"]), chance)
            is_open = chance.random() < 0.3
            name = chance.choice(WHILE_OPEN if is_open else list(INDEX))
            self._note(teller, f"number {i}, {name}{', while open' if is_open else ''}")
            refusable = name in REFUSABLE
            if is_open:
                with contextlib.closing(DiskStore(target.root, PLENTY)) as store:
                    read(store, 0)
                    INDEX[name](target)
                    self._use(store, refusable, teller)
            else:
                INDEX[name](target)
            for _ in range(1 if is_open else 2):
                with (
                    self._named_errors(teller, refusable),
                    contextlib.closing(DiskStore(target.root, PLENTY)) as store,
                ):
                    self._use(store, refusable, teller)
            self._check_outside(target, teller)
            teller.say("done", i + 1)

    def _use(self, store: DiskStore, refusable: bool, teller: Teller) -> None:
        """Use every operation of a store."""
        for number in _NUMBERS:
            self._read(store, number, teller)
        with self._named_errors(teller, refusable):
            store.stats()
            if set(store.keys(Lab.namespace)) - {Lab.key(n) for n in (*_NUMBERS, _FRESH)}:
                self._complain(teller, "keys that were never put")
            put(store, _FRESH)
            if not self._read(store, _FRESH, teller):
                self._complain(teller, "a chunk put cannot be read")
            store.recover()
        for number in _NUMBERS:
            if not self._read(store, number, teller) and not refusable:
                self._complain(teller, f"chunk {number} not recovered")

    @contextlib.contextmanager
    def _named_errors(self, teller: Teller, allowed: bool) -> Iterator[None]:
        try:
            yield
        except StoreError as exc:
            if not allowed:
                self._complain(teller, f"{type(exc).__name__}: {exc}")

    # -- stores to begin with --------------------------------------------------------------------

    def _make_originals(self) -> None:
        """``closed``, ``crashed`` (with a WAL and the marker of a dead writer) and ``other``."""
        for name, numbers in (("closed", _NUMBERS), ("crashed", _NUMBERS), ("other", _OTHERS)):
            shutil.rmtree(self._directory / name, ignore_errors=True)

            def fill(teller: Teller, name: str = name, numbers: range = numbers) -> None:
                store = DiskStore(self._directory / name, PLENTY)
                for number in numbers:
                    put(store, number)
                if name != "crashed":
                    store.close()
                os.kill(os.getpid(), signal.SIGKILL)

            Child(fill).wait()

    def _fresh(self, name: str, chance: random.Random) -> DamageTarget:
        """A copy of an original, with a file next to it."""
        directory = self._directory / "mutated"
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(self._directory / name, directory / "store", symlinks=True)
        (directory / "outside").write_bytes(b"precious")
        return DamageTarget(
            directory / "store", self._directory / "other", directory / "outside", chance
        )
