"""What a store is doing while its system calls fail or its power goes: one scenario per operation.

Each begins with a store that somebody closed, or left in pieces, and tells its parent what is
acknowledged as it goes. A second attempt, in peace and by the same store object, must succeed:
whatever failed, the store is still of use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kv_lab import Lab

from blendrag.errors import BlendragError
from blendrag.store import DiskStore
from soak.audit import PLENTY, make_chunks, put, read, summary
from soak.line import Teller

#: Everything that any scenario puts.
NUMBERS = range(1, 8)
#: Put by whoever looks at the store afterwards.
FRESH = 9
_FEW = 3 * Lab.entry_bytes


@dataclass(frozen=True)
class Scenario:
    """One operation to be disturbed."""

    name: str
    build: Callable[[Path], object]
    """Makes the store that it begins with."""
    act: Callable[[DiskStore | None, Path, Teller], object]
    """The operation. Is given an open store, unless it opens one itself."""
    required: Callable[[list[int]], set[int]]
    """What must be there, given what was acknowledged, in order."""
    limit_bytes: int = PLENTY
    opens: bool = False
    before: Callable[[DiskStore, Teller], object] = lambda store, teller: None
    """What the same store does beforehand, in peace."""
    may_lose: int = 0
    """A file that could not be read when it was asked for is set aside: one fault, one miss."""

    def prepare(self, root: Path, pipe: int, attempts: int) -> Callable[[], None]:
        """For the child: get ready. What is returned is to be disturbed."""
        teller = Teller(pipe)
        store = None
        if not self.opens:
            store = DiskStore(root, self.limit_bytes)
            self.before(store, teller)

        def action() -> None:
            for attempt in range(attempts):
                self._attempt(store, root, teller, in_peace=attempt > 0)

        return action

    def _attempt(self, store: DiskStore | None, root: Path, teller: Teller, in_peace: bool) -> None:
        try:
            self.act(store, root, teller)
        except BlendragError as exc:
            failed = f"{type(exc).__name__}: {exc}"
            teller.say("complaint" if in_peace else "error", failed)
        except Exception as exc:
            teller.say("complaint", f"no named error: {summary(exc)}")
        teller.say("attempted", None)


# -- beginnings --------------------------------------------------------------------------------------


def _filled(
    *numbers: int, limit_bytes: int = PLENTY, pinned: int | None = None
) -> Callable[[Path], None]:
    def build(root: Path) -> None:
        make_chunks([*NUMBERS, FRESH])
        store = DiskStore(root, limit_bytes)
        for number in numbers:
            put(store, number)
        if pinned is not None:
            store.pin(Lab.namespace, Lab.key(pinned))
        store.close()

    return build


def _crashed(root: Path) -> None:
    """Three chunks, one row missing, one row of nothing, and what two dead writers left."""
    _filled(1, 2, 3)(root)
    store = DiskStore(root, PLENTY)
    lost = store._reading.find(Lab.namespace, Lab.key(1))
    assert lost is not None
    store._index.drop([lost])
    store.close()
    for owner in ("0" * 16, "1" * 16):
        (root / "tmp" / f"{owner}.writer").touch(0o600)
        (root / "tmp" / f"{owner}.{'2' * 16}.part").write_bytes(b"half a payload")


def _without_index(root: Path) -> None:
    _filled(1, 2, 3)(root)
    (root / "index" / "cache.db").unlink()


def _with_an_odd_index(root: Path) -> None:
    _filled(1, 2, 3)(root)
    (root / "index" / "cache.db").write_bytes(b"no database" * 1000)


# -- operations ----------------------------------------------------------------------------------------


def _put_two(store: DiskStore | None, root: Path, teller: Teller) -> None:
    assert store is not None
    for number in (4, 5):
        teller.put(store, number)


def _put_over_the_limit(store: DiskStore | None, root: Path, teller: Teller) -> None:
    assert store is not None
    for number in (4, 5, 6):
        teller.put(store, number)


def _create(store: DiskStore | None, root: Path, teller: Teller) -> None:
    store = DiskStore(root, PLENTY)
    try:
        teller.put(store, 1)
    finally:
        store.close()


def _open(store: DiskStore | None, root: Path, teller: Teller) -> None:
    store = DiskStore(root, PLENTY)
    try:
        for number in (1, 2, 3):
            if read(store, number) is False:
                teller.say("complaint", f"chunk {number} is wrong")
    finally:
        store.close()


def _recover(store: DiskStore | None, root: Path, teller: Teller) -> None:
    store = DiskStore(root, PLENTY)
    try:
        store.recover()
    finally:
        store.close()


def _delete(store: DiskStore | None, root: Path, teller: Teller) -> None:
    assert store is not None
    store.delete(Lab.namespace, Lab.key(1))


def _pin(store: DiskStore | None, root: Path, teller: Teller) -> None:
    assert store is not None
    store.pin(Lab.namespace, Lab.key(1))
    teller.put(store, 4)


def _read_all(store: DiskStore | None, root: Path, teller: Teller) -> None:
    assert store is not None
    for number in (1, 2, 3):
        if read(store, number) is False:
            teller.say("complaint", f"chunk {number} is wrong")
    if set(store.keys(Lab.namespace)) - {Lab.key(number) for number in (1, 2, 3)}:
        teller.say("complaint", "keys that nobody put")
    store.stats()


def _close(store: DiskStore | None, root: Path, teller: Teller) -> None:
    assert store is not None
    store.close()


def _all(*numbers: int) -> Callable[[list[int]], set[int]]:
    """These, and whatever was acknowledged."""
    return lambda acknowledged: {*numbers, *acknowledged}


SCENARIOS = (
    Scenario("create", lambda root: make_chunks([*NUMBERS, FRESH]), _create, _all(), opens=True),
    Scenario("put", _filled(1, 2, 3), _put_two, _all(1, 2, 3)),
    Scenario(
        "evict",
        _filled(1, 2, 3, limit_bytes=_FEW, pinned=1),
        _put_over_the_limit,
        # after a rebuild the order of use is another, so that any chunk but these may have gone
        lambda acknowledged: {1, *acknowledged[-1:]},
        limit_bytes=_FEW,
    ),
    Scenario("open after a crash", _crashed, _open, _all(1, 2, 3), opens=True, may_lose=1),
    Scenario("recover after a crash", _crashed, _recover, _all(1, 2, 3), opens=True),
    Scenario("recover without index", _without_index, _recover, _all(1, 2, 3), opens=True),
    Scenario("recover an odd index", _with_an_odd_index, _recover, _all(1, 2, 3), opens=True),
    Scenario("delete", _filled(1, 2, 3), _delete, _all(2, 3)),
    Scenario("pin", _filled(1, 2, 3), _pin, _all(1, 2, 3)),
    Scenario("read", _filled(1, 2, 3), _read_all, _all(1, 2, 3), may_lose=1),
    Scenario(
        "close",
        _filled(1, 2, 3),
        _close,
        _all(1, 2, 3),
        before=lambda store, teller: teller.put(store, 4),
    ),
)
