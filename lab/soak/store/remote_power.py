"""Power cuts of the machine that holds a ``file://`` remote, before every change that is made there.

What was not synced is lost, kept or torn. Afterwards every object must be whole, acknowledged KV and the
acknowledged snapshot must be there, and the remote must take a new put and a new snapshot.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from blendrag.corpus.corpus import Corpus
from blendrag.corpus.shared.sharing import Keys, follow, publish
from blendrag.store.disk import DiskStore
from blendrag.store.remote.root import RemoteRoot
from blendrag.store.remote.tier import RemoteTier
from corpus.small_corpus import make_corpus, put
from lab.soak.store.audit import SoakReport, Verdict
from lab.soak.store.power import Disk, outcomes
from store.kv_lab import Lab

#: Functions of ``os`` that change something or make it durable.
_CHANGES = ("fsync", "link", "mkdir", "open", "replace", "unlink", "write")
#: Chunks that are put before a snapshot is published and after it.
FIRST, LATER, FRESH = (1, 2), (3,), 9
SECRET = "a secret of all machines"

Cut = Callable[[str], None]


@contextlib.contextmanager
def before_changes(before: Cut, disk: Disk) -> Iterator[None]:
    """Call ``before`` with each change that this thread makes, and track what is synced."""
    real = {name: getattr(os, name) for name in _CHANGES}
    is_inside, me = False, threading.get_ident()

    def changing(name: str, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_inside
        if (
            is_inside
            or threading.get_ident() != me
            or (name == "open" and not int(args[1]) & os.O_CREAT)
        ):
            return real[name](*args, **kwargs)
        is_inside = True
        try:
            before(name)
            done = real[name](*args, **kwargs)
            if name == "fsync":
                disk.sync(Path(os.readlink(f"/proc/self/fd/{args[0]}")))
            return done
        finally:
            is_inside = False

    try:
        for name in _CHANGES:
            setattr(os, name, partial(changing, name))
        yield
    finally:
        for name, function in real.items():
            setattr(os, name, function)


class Machine:
    """One that fills and publishes, and what it was told is durable."""

    def __init__(self, place: Path) -> None:
        self.bucket, self._source, self._place = place / "bucket", place / "source", place
        self.bucket.mkdir()
        make_corpus(self._source)
        self.chunks: list[int] = []
        self.serial = 0
        self.texts: dict[int, list[str]] = {0: []}
        self.disk = DiskStore(place / "local", 1 << 30)
        for number in (*FIRST, *LATER, FRESH):
            Lab.put(self.disk, number)

    def act(self) -> None:
        """Put and publish, twice."""
        with contextlib.closing(remote_of(self.bucket)) as tier:
            for numbers in (FIRST, LATER):
                for number in numbers:
                    upload(tier, self.disk, number)
                    self.chunks.append(number)
                self.texts[self.serial + 1] = texts(self._source)
                self.serial = published(self._source, self.bucket)
                with Corpus.open(self._source) as corpus:
                    put(corpus, 77)

    def audit(self, after: Path) -> Verdict:
        complaints = [
            f"{path.relative_to(after)} is torn"
            for path in after.rglob("*")
            if path.is_file() and "#" not in path.name and not is_whole(path, self.bucket)
        ]
        lost, wrong = [], []
        with contextlib.closing(remote_of(after)) as tier:
            for number in (*FIRST, *LATER):
                reader = Lab.open(tier, number)
                if reader is None:
                    lost += [number] * (number in self.chunks)
                elif not Lab.gives(reader, Lab.kv(number)):
                    wrong.append(number)
            upload(tier, self.disk, FRESH)
            reader = Lab.open(tier, FRESH)
            if reader is None or not Lab.gives(reader, Lab.kv(FRESH)):
                complaints.append("it takes no new KV")
        with tempfile.TemporaryDirectory(dir=self._place) as follower:
            serial = followed(Path(follower) / "store", after)
            if serial < self.serial:
                complaints.append(f"snapshot {self.serial} is lost, {serial} is there")
            elif serial and texts(Path(follower) / "store") != self.texts[serial]:
                complaints.append("another corpus than the published one")
            shutil.copytree(self._source, Path(follower) / "copy")
            published(Path(follower) / "copy", after)
        return Verdict(tuple(lost), tuple(wrong), tuple(complaints))


def remote_of(bucket: Path) -> RemoteTier:
    return RemoteTier(f"file://{bucket}", SECRET, 30.0)


def upload(tier: RemoteTier, disk: DiskStore, number: int) -> None:
    payload = disk.payload(Lab.namespace, Lab.key(number))
    assert payload is not None
    with payload as found:
        tier.put(*found)


def published(source: Path, bucket: Path) -> int:
    with RemoteRoot(f"file://{bucket}", SECRET, 30.0) as remote:
        keys = Keys("", frozenset[str]())
        return publish(source, remote, lambda *_: keys, lambda keys: frozenset()).serial


def followed(root: Path, bucket: Path) -> int:
    with RemoteRoot(f"file://{bucket}", SECRET, 30.0) as remote:
        found = follow(root, remote)
        return 0 if found is None else found.serial


def texts(root: Path) -> list[str]:
    with Corpus.open(root) as corpus:
        return sorted(chunk.text for s in corpus.sources() for chunk in corpus.chunks_of(s))


def is_whole(path: Path, bucket: Path) -> bool:
    """Whether an object is what was put. The pointer's versions are told apart by following it."""
    relative = path.parts[path.parts.index("after") + 1 :]
    original = bucket.joinpath(*relative)
    if relative[-1] in ("pointer", "pointer.lock"):
        return True
    if not original.exists():  # removed since, such as the object by which a clock is read
        return bool(path.stat().st_size)
    return path.read_bytes() == original.read_bytes()


def cut_everywhere(
    directory: Path, report: SoakReport, mixtures: int, seed: int, stride: int = 1
) -> None:
    """Cut the power before every ``stride``-th change of a remote, and at the end."""
    place = directory / "remote"
    place.mkdir()
    machine, chance, changes = Machine(place), random.Random(seed), 0
    disk = Disk(machine.bucket)

    def cut(what: str) -> None:
        nonlocal changes
        changes += 1
        if changes % stride and what != "the end":
            return
        for survives in outcomes(chance, mixtures):
            after = place / "after"
            shutil.rmtree(after, ignore_errors=True)
            disk.cut(after, survives)
            verdict = machine.audit(after)
            report.note("power cuts", f"remote, before {what}, change {changes}", verdict)

    with contextlib.closing(machine.disk):
        with before_changes(cut, disk):
            machine.act()
        cut("the end")
