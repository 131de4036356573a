"""The fuzzer: damage a store, then read it. Exact bytes or a miss, in bounded time, and no crash.

Owns how damage is applied in bulk and what is looked at afterwards. Damage is done and read in a
child (:mod:`watched`).
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

from kv_lab import Lab

import unpickling
from blendrag.errors import CorruptKVError, StoreError
from blendrag.store import DiskStore
from soak.audit import PLENTY, Verdict, make_chunks, put, read
from soak.damage import PAYLOAD
from soak.index_damage import INDEX, REFUSABLE, WHILE_OPEN
from soak.index_target import IndexTarget
from soak.line import Teller
from soak.payload_target import Target, put_right
from soak.report import Report
from soak.watched import Action, Watched

#: Damage done by one child.
BATCH = 500
#: One batch in so many is on the index, which takes longer by about as much.
INDEX_EVERY = 20
_NUMBERS = range(6)
_FRESH = 50
_OTHERS = range(60, 64)


class Fuzzing:
    """Batches of damage at one place, by chance, the same for the same seed."""

    def __init__(self, place: Path, seed: int) -> None:
        self._place = place
        self._seed = seed
        self._batch = 0
        self._child = Watched()
        make_chunks([*_NUMBERS, _FRESH, *_OTHERS])
        self._make_originals()

    def run(self, report: Report, mutations: int) -> None:
        """So many mutations, most of them of payloads."""
        until = report.done["mutations"] + mutations
        while (left := until - report.done["mutations"]) > 0:
            on_index = self._batch % INDEX_EVERY == 1
            action = self._damage_index if on_index else self._damage_payloads
            self._run_batch(report, min(BATCH, left), action)

    def run_on_payloads(self, report: Report, mutations: int) -> None:
        self._run_batch(report, mutations, self._damage_payloads)

    def run_on_index(self, report: Report, mutations: int) -> None:
        self._run_batch(report, mutations, self._damage_index)

    def _run_batch(self, report: Report, count: int, action: Action) -> None:
        seed = f"{self._seed}/{self._batch}"
        self._batch += 1
        heard, failure = self._child.run(action, seed, count)
        died = [f"{failure} at {self._about()}"] if failure else []
        complaints = (*heard.complaints, *died)
        wrong = tuple(1 for text in complaints if text.startswith("wrong KV"))
        rest = tuple(text for text in complaints if not text.startswith("wrong KV"))
        circumstances = f"mutations with seed {seed}: {complaints[:3]}"
        done = count if failure is None and not rest else max(1, heard.done)
        report.note("mutations", circumstances, Verdict((), wrong, rest), done)

    def _about(self) -> str:
        return self._child.about()

    # -- payloads --------------------------------------------------------------------------------

    def _damage_payloads(self, chance: random.Random, count: int, teller: Teller) -> None:
        """Damage file after file of one store, read each, put it again."""
        root, outside = self._fresh("closed")
        store = DiskStore(root, PLENTY)
        names = list(PAYLOAD)
        others = [path.read_bytes() for path in Lab.payloads(self._place / "other")]
        for i in range(count):
            number, name = chance.choice(_NUMBERS), chance.choice(names)
            self._child.note(f"number {i}, {name}")
            path = Lab.file(store, number)
            target = Target(path, path.read_bytes(), others, outside, chance)
            while_open = Lab.open(store, number) if chance.random() < 0.1 else None
            PAYLOAD[name](target)
            if while_open is not None:
                while_open.close()
            elif chance.random() < 0.02:
                store.recover()
            self._must_not_lie(store, number, teller)
            self._put_again(store, number, target, teller)
            self._nothing_outside(outside, teller)
            if i % 50 == 49:
                teller.say("done", i + 1)
        store.close()

    def _must_not_lie(self, store: DiskStore, number: int, teller: Teller) -> bool:
        """Whether the chunk was read. Tells if it was read wrong."""
        try:
            answer = read(store, number)
        except CorruptKVError:
            return False
        if answer is False:
            teller.say("complaint", f"wrong KV at {self._about()}")
        return answer is not None

    def _put_again(self, store: DiskStore, number: int, target: Target, teller: Teller) -> None:
        """What was missed is put again and read; what was read is brought back to what it was."""
        put(store, number)
        paths = list((store.root / "kv").rglob(f"{Lab.key(number)}.*.kv"))
        if paths == [target.path]:  # still there: unharmed, or harmed beyond what was read
            put_right(target.path, target.data)
        elif len(paths) != 1:
            teller.say("complaint", f"{len(paths)} files of one chunk at {self._about()}")
        if not self._must_not_lie(store, number, teller):
            teller.say("complaint", f"a chunk cannot be put again at {self._about()}")

    def _nothing_outside(self, outside: Path, teller: Teller) -> None:
        beside = {path.name for path in outside.parent.iterdir()} - {"elsewhere"}
        if beside != {"outside", "store"} or outside.read_bytes() != b"precious":
            teller.say("complaint", f"something beside the store was touched at {self._about()}")
        if unpickling.caught():
            teller.say("complaint", f"something was unpickled at {self._about()}")

    # -- the index -------------------------------------------------------------------------------

    def _damage_index(self, chance: random.Random, count: int, teller: Teller) -> None:
        """Damage the index of store after store; read all, put, read all with a fresh store."""
        for i in range(count):
            root, outside = self._fresh(chance.choice(["closed", "crashed"]))
            target = IndexTarget(
                root, self._place / "other", outside, outside.with_name("trap"), chance
            )
            is_open = chance.random() < 0.3
            name = chance.choice(WHILE_OPEN if is_open else list(INDEX))
            self._child.note(f"number {i}, {name}{', while open' if is_open else ''}")
            with contextlib.ExitStack() as stack:
                store = None
                if is_open:
                    store = stack.enter_context(contextlib.closing(DiskStore(root, PLENTY)))
                    read(store, 0)
                INDEX[name](target)
                self._use(store, root, name, teller)
            self._use(None, root, name, teller)
            self._nothing_outside(outside, teller)
            teller.say("done", i + 1)

    def _use(self, store: DiskStore | None, root: Path, name: str, teller: Teller) -> None:
        """Everything one does with a store."""
        refusable = name in REFUSABLE
        with contextlib.ExitStack() as stack:
            if store is None:
                with self._named(teller, refusable):
                    store = stack.enter_context(contextlib.closing(DiskStore(root, PLENTY)))
            if store is None:
                return
            for number in _NUMBERS:
                self._must_not_lie(store, number, teller)
            with self._named(teller, refusable):
                store.stats()
                if set(store.keys(Lab.namespace)) - {Lab.key(n) for n in (*_NUMBERS, _FRESH)}:
                    teller.say("complaint", f"keys that nobody put at {self._about()}")
                put(store, _FRESH)
                if not self._must_not_lie(store, _FRESH, teller):
                    teller.say("complaint", f"a chunk put cannot be read at {self._about()}")
                store.recover()
            for number in _NUMBERS:
                if not self._must_not_lie(store, number, teller) and not refusable:
                    teller.say("complaint", f"chunk {number} not recovered at {self._about()}")

    @contextlib.contextmanager
    def _named(self, teller: Teller, refusable: bool) -> Iterator[None]:
        """The store may refuse, by name, only where something that is not its own is in the way."""
        try:
            yield
        except StoreError as exc:
            if not refusable:
                teller.say("complaint", f"{type(exc).__name__}: {exc} at {self._about()}")

    # -- stores to begin with --------------------------------------------------------------------

    def _make_originals(self) -> None:
        """``closed`` and ``crashed`` (with a WAL and a dead writer's marker), and ``other``."""
        for name, numbers in (("closed", _NUMBERS), ("crashed", _NUMBERS), ("other", _OTHERS)):
            shutil.rmtree(self._place / name, ignore_errors=True)
            child = os.fork()
            if child == 0:
                with contextlib.suppress(BaseException):
                    store = DiskStore(self._place / name, PLENTY)
                    for number in numbers:
                        put(store, number)
                    if name != "crashed":
                        store.close()
                os.kill(os.getpid(), signal.SIGKILL)
            os.waitpid(child, 0)

    def _fresh(self, name: str) -> tuple[Path, Path]:
        """A copy of an original, and a file beside it."""
        here = self._place / "mutated"
        shutil.rmtree(here, ignore_errors=True)
        shutil.copytree(self._place / name, here / "store", symlinks=True)
        (here / "outside").write_bytes(b"precious")
        return here / "store", here / "outside"
