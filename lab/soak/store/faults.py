"""Operations of a store during which system calls fail, the process is killed, or the power goes.

Every call fails once, one by one. Afterwards all acknowledged chunks must be there bit-exact, the error
must have been one of ours, and the same store object and a new one must work.
"""

from __future__ import annotations

import contextlib
import errno
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from blendrag.errors import BlendragError
from blendrag.store.disk import DiskStore
from lab.soak.store.audit import PLENTY, SoakReport, Verdict, audit, make_chunks, put, read
from lab.soak.store.children import ChildReport, Teller, summary
from lab.soak.store.power import Disk, outcomes
from lab.soak.store.tracer import SystemCall, Traced
from store.kv_lab import Lab

#: All chunks that the operations put, and one that the audit puts.
NUMBERS, FRESH = range(1, 8), 9
_FEW = 3 * Lab.entry_bytes

# -- operations --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operation:
    """One operation to be disturbed."""

    build: Callable[[Path], object]
    """Makes the store that it begins with."""
    act: Callable[[DiskStore, Teller], object]
    required: tuple[int, ...]
    """Chunks that must be there afterwards, as well as the acknowledged ones."""
    limit_bytes: int = PLENTY
    opens: bool = False
    """Whether opening the store is part of the operation."""
    evicts: bool = False
    """Whether acknowledged chunks except the last may be evicted."""
    may_lose: int = 0
    """Chunks that one fault may cost: a file that could not be read is set aside."""

    def prepare(self, root: Path, attempts: int, teller: Teller) -> Callable[[], None]:
        """For the child: get ready, and return the action to disturb.

        A second attempt, undisturbed and with the same store, must succeed.
        """
        opening = partial(DiskStore, root, self.limit_bytes)
        store = None if self.opens else opening()

        def action() -> None:
            for attempt in range(attempts):
                try:
                    if store is not None:
                        self.act(store, teller)
                    else:
                        with contextlib.closing(opening()) as opened:
                            self.act(opened, teller)
                except BlendragError as exc:
                    kind = "complaints" if attempt else "errors"
                    teller.say(kind, f"{type(exc).__name__}: {exc}")
                except Exception as exc:
                    teller.say("complaints", f"no named error: {summary(exc)}")

        return action


def _filled(*numbers: int, limit_bytes: int = PLENTY) -> Callable[[Path], None]:
    def build(root: Path) -> None:
        make_chunks([*NUMBERS, FRESH])
        with contextlib.closing(DiskStore(root, limit_bytes)) as store:
            for number in numbers:
                put(store, number)
            if limit_bytes != PLENTY:
                store.pin(Lab.namespace, Lab.key(1))

    return build


def _crashed(root: Path) -> None:
    """Three chunks, one of them not in the index, and what two dead writers left."""
    _filled(1, 2, 3)(root)
    path = Lab.file(root, 1)
    data = path.read_bytes()
    with contextlib.closing(DiskStore(root, PLENTY)) as store:
        store.delete(Lab.namespace, Lab.key(1))
    path.write_bytes(data)
    for owner in ("0" * 16, "1" * 16):
        (root / "tmp" / f"{owner}.writer").touch(0o600)
        (root / "tmp" / f"{owner}.{'2' * 16}.part").write_bytes(b"half a payload")


def _with_database(change: Callable[[Path], object]) -> Callable[[Path], None]:
    def build(root: Path) -> None:
        _filled(1, 2, 3)(root)
        (database,) = (root / "index").glob("*.db")
        change(database)

    return build


def _put(*numbers: int) -> Callable[[DiskStore, Teller], None]:
    def act(store: DiskStore, teller: Teller) -> None:
        for number in numbers:
            put(store, number, teller)

    return act


def _pin(store: DiskStore, teller: Teller) -> None:
    store.pin(Lab.namespace, Lab.key(1))
    put(store, 4, teller)


def _read_all(store: DiskStore, teller: Teller) -> None:
    for number in (1, 2, 3):
        if read(store, number) is False:
            teller.say("complaints", f"chunk {number} is wrong")
    if set(store.keys(Lab.namespace)) - {Lab.key(number) for number in (1, 2, 3)}:
        teller.say("complaints", "keys that were never put")
    store.stats()


_FILLED, _ALL, _RECOVER = _filled(1, 2, 3), (1, 2, 3), lambda store, teller: store.recover()
OPERATIONS = {
    "create and close": Operation(
        lambda root: make_chunks([*NUMBERS, FRESH]), _put(1), (), opens=True
    ),
    "put": Operation(_FILLED, _put(4, 5), _ALL),
    "evict": Operation(
        _filled(1, 2, 3, limit_bytes=_FEW), _put(4, 5, 6), (1,), limit_bytes=_FEW, evicts=True
    ),
    "open after a crash": Operation(_crashed, _read_all, _ALL, opens=True, may_lose=1),
    "recover after a crash": Operation(_crashed, _RECOVER, _ALL, opens=True),
    "recover without index": Operation(_with_database(Path.unlink), _RECOVER, _ALL, opens=True),
    "recover a damaged index": Operation(
        _with_database(lambda path: path.write_bytes(b"no database" * 1000)),
        _RECOVER,
        _ALL,
        opens=True,
    ),
    "delete": Operation(
        _FILLED, lambda store, teller: store.delete(Lab.namespace, Lab.key(1)), (2, 3)
    ),
    "pin": Operation(_FILLED, _pin, _ALL),
    "read": Operation(_FILLED, _read_all, _ALL, may_lose=1),
}

# -- faults ------------------------------------------------------------------------------------------

#: Calls that take space on the disk, make something durable, or move bytes.
_WRITING = ("write", "pwrite", "writev", "pwritev", "ftruncate", "fallocate", "mkdir", "rename")
_SYNCING = ("fsync", "fdatasync")
_MOVING = ("read", "pread", "preadv", "write", "pwrite")
#: Moving half of the bytes is not an error.
SHORT, KILL = 0, -1


@dataclass(frozen=True)
class Fault:
    """What happens at one call: an error number, :data:`SHORT` or :data:`KILL`."""

    call: SystemCall
    what: int

    def __str__(self) -> str:
        name = {SHORT: "half", KILL: "kill"}.get(self.what) or errno.errorcode[self.what]
        return f"{name} at {self.call}"


def faults_of(call: SystemCall) -> list[Fault]:
    """All faults that can happen at a call."""
    if call.name == "unlock":  # does not fail for an open descriptor
        return [Fault(call, KILL)]
    kinds = {
        errno.ENOSPC: call.name in (*_WRITING, *_SYNCING) or call.creates,
        errno.EMFILE: call.name == "open",
        errno.ENOMEM: call.name == "mmap",
        SHORT: call.name in _MOVING,
    }
    return [Fault(call, kind) for kind in (errno.EIO, KILL, *filter(kinds.get, kinds))]


class OperationRunner:
    """Runs one operation again and again, each time on a copy of the same store."""

    def __init__(self, directory: Path, operation: Operation) -> None:
        self._operation = operation
        self._here = directory / "here"
        self._root = self._here / "store"
        self._original = directory / "original"
        shutil.rmtree(self._original, ignore_errors=True)
        self._original.mkdir()
        operation.build(self._original / self._root.name)

    def calls(self) -> list[SystemCall]:
        """The system calls of the operation, undisturbed."""
        traced = self._start(attempts=1)
        calls, heard = list(traced.calls()), traced.child.wait()
        if heard.errors or heard.complaints:
            raise AssertionError(f"fails undisturbed: {heard.errors} {heard.complaints}")
        return calls

    def run(self, fault: Fault) -> Verdict:
        traced = self._start(attempts=2)
        for call in traced.calls():
            if call.number == fault.call.number:
                if fault.what == KILL:
                    traced.child.kill()
                elif fault.what == SHORT:
                    traced.shorten()
                else:
                    traced.fail(fault.what)
                break
        heard = traced.child.heard if fault.what == KILL else traced.child.wait()
        seen = self._audit(heard, self._root)
        allowed = self._operation.may_lose if fault.what > 0 else 0
        lost = seen.lost if len(seen.lost) > allowed else ()
        return Verdict(lost, seen.wrong, (*heard.complaints, *seen.complaints))

    def cuts(
        self, chance: random.Random, mixtures: int, stride: int = 1
    ) -> Iterator[tuple[str, Verdict]]:
        """Cut the power before every ``stride``-th call that changes something, and at the end."""
        traced = self._start(attempts=1)
        disk, changes, heard = Disk(self._here), 0, traced.child.heard
        for call in traced.calls():
            if call.name in (*_WRITING, *_SYNCING, "unlink") or call.creates:
                if changes % stride == 0:
                    yield from self._cut(disk, heard, chance, mixtures, str(call))
                changes += 1
            if call.name in _SYNCING and traced.finish() == 0:
                disk.sync(self._here / call.path)
        yield from self._cut(disk, heard, chance, mixtures, "the end")
        traced.child.wait()

    def _cut(
        self, disk: Disk, heard: ChildReport, chance: random.Random, mixtures: int, where: str
    ) -> Iterator[tuple[str, Verdict]]:
        after = self._here.with_name("after")
        heard.hear()
        for survives in outcomes(chance, mixtures):
            shutil.rmtree(after, ignore_errors=True)
            disk.cut(after, survives)
            yield f"power cut before {where}", self._audit(heard, after / self._root.name)

    def _audit(self, heard: ChildReport, root: Path) -> Verdict:
        acknowledged = heard.acknowledged[-1:] if self._operation.evicts else heard.acknowledged
        required = {*self._operation.required, *acknowledged}
        return audit(root, required, NUMBERS, self._operation.limit_bytes, FRESH)

    def _start(self, attempts: int) -> Traced:
        shutil.rmtree(self._here, ignore_errors=True)
        shutil.copytree(self._original, self._here)
        return Traced(self._here, partial(self._operation.prepare, self._root, attempts))


def fail_everything(
    directory: Path, name: str, report: SoakReport, most: int | None = None
) -> None:
    """Every fault of an operation, or about ``most`` of them, evenly spread."""
    bench = OperationRunner(directory, OPERATIONS[name])
    faults = [fault for call in bench.calls() for fault in faults_of(call)]
    for fault in faults[:: 1 if most is None else -(-len(faults) // most)]:
        report.note("faults", f"{name}, {fault}", bench.run(fault))


def cut_everywhere(
    directory: Path, name: str, report: SoakReport, mixtures: int, seed: int, stride: int = 1
) -> None:
    """Power cuts at every ``stride``-th step of an operation."""
    bench = OperationRunner(directory, OPERATIONS[name])
    for where, verdict in bench.cuts(random.Random(seed), mixtures, stride):
        report.note("power cuts", f"{name}, {where}", verdict)
