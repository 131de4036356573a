"""Machines that ingest, publish, collect and follow on one remote, in seeded orders of their requests.

One machine runs at a time, until its next request of the remote; then the next one is drawn. After each
request, the published snapshot must name nothing that is gone.

    make soak-remote ORDERS=2000 SEED=7
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from blendrag.corpus.corpus import Corpus
from blendrag.corpus.manifest import Manifest
from blendrag.corpus.shared import sharing, snapshots
from blendrag.corpus.shared.collection import collect_remote
from blendrag.corpus.shared.sharing import Keys, follow, publish
from blendrag.corpus.shared.snapshots import PARTS
from blendrag.errors import StoreUnavailableError
from blendrag.store.remote.claims import claim
from blendrag.store.remote.objects import Listed
from blendrag.store.remote.root import RemoteRoot
from corpus.small_corpus import MANIFEST, chunk_of, put, text_of
from store.s3 import Server, environment

NAMESPACE, SECRET = "0" * 64, "a secret of all machines"
DOCUMENTS, TEXTS = 5, 3
#: What is older than this round is so much older, and grace periods of collections.
AGE_S, GRACES_S = 1000.0, (0.0, 500.0)
#: Share of turns after which a machine is stopped, and for how many turns at most.
STOPS, LONGEST_STOP = 0.05, 100
#: How often a machine does its work in a round.
TIMES = 3
#: A machine that has not come to its next request by then hangs.
STUCK_S = 120.0


class AgeableRemote(Protocol):
    """A remote whose objects can be made older."""

    url: str

    def age(self, seconds: float) -> None: ...


class Turns:
    """Lets one of several threads run until its next :meth:`take`."""

    def __init__(self, chance: random.Random, check: Callable[[], None]) -> None:
        self._chance, self._check = chance, check
        self._go: dict[str, threading.Semaphore] = {}
        self._back = threading.Semaphore(0)
        self.taken = 0
        self.has_changed = False
        """Whether the remote was changed since the last check."""

    def take(self, name: str) -> None:
        self._back.release()
        self._go[name].acquire()

    def run(self, works: Mapping[str, Callable[[], None]]) -> None:
        """Run all to their ends. Raises what one of them raises."""
        self._go = {name: threading.Semaphore(0) for name in works}
        stopped = dict.fromkeys(works, 0)
        left, errors = set(works), list[BaseException]()

        def runs(name: str) -> None:
            self._go[name].acquire()
            try:
                works[name]()
            except BaseException as exc:
                errors.append(exc)
            left.discard(name)
            self._back.release()

        for name in works:
            threading.Thread(target=runs, args=(name,), daemon=True).start()
        while left:
            # as if by SIGSTOP: for so many turns, others go on as far as they can
            running = [each for each in sorted(left) if stopped[each] <= self.taken] or sorted(left)
            name = self._chance.choice(running)
            if self._chance.random() < STOPS:
                stopped[name] = self.taken + self._chance.randrange(LONGEST_STOP)
            self._go[name].release()
            assert self._back.acquire(timeout=STUCK_S), f"{name} hangs"
            self.taken += 1
            if self.has_changed:
                self.has_changed = False
                self._check()
        for error in errors:
            raise error


def in_turns(remote: RemoteRoot, turns: Turns, name: str) -> RemoteRoot:
    """``remote``, each of whose requests waits for its turn."""
    objects: Any = remote.objects
    waits = threading.Lock()  # those within another one do not

    def in_turn(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not waits.acquire(blocking=False):
            return real(*args, **kwargs)
        try:
            turns.take(name)
            turns.has_changed = True
            return real(*args, **kwargs)
        finally:
            waits.release()

    def listing(real: Callable[[str], Iterator[Listed]], prefix: str) -> Iterator[Listed]:
        turns.take(name)
        for number, each in enumerate(real(prefix)):
            if number % 5 == 4:
                turns.take(name)
            yield each

    for method in ("head", "get", "put", "replace", "delete"):
        setattr(objects, method, partial(in_turn, getattr(objects, method)))
    objects.listing = partial(listing, objects.listing)
    return remote


def key_of(text: str) -> str:
    return chunk_of(text).chunk_id


def object_of(key: str) -> str:
    return f"kv/{NAMESPACE}/{key[:2]}/{key}.kv"


def all_keys(manifest: Manifest, texts: Any) -> Keys:
    return Keys(NAMESPACE, frozenset(key_of(text) for text in texts))


def kv_of(remote: RemoteRoot) -> set[str]:
    listed = remote.objects.listing(f"kv/{NAMESPACE}/")
    return {each.name.rsplit("/", 1)[1].removesuffix(".kv") for each in listed}


def texts_of(root: Path) -> list[str]:
    with Corpus.open(root) as corpus:
        return sorted(chunk.text for s in corpus.sources() for chunk in corpus.chunks_of(s))


class Machines:
    """One that publishes, one that ingests, one that collects and one that follows."""

    def __init__(self, place: AgeableRemote, directory: Path, seed: int) -> None:
        self._place, self._chance = place, random.Random(seed)
        self._source, self._follower = directory / "source", directory / "follower"
        self._opened = contextlib.ExitStack()
        self._plain = self._remote()
        self.ended: Counter[str] = Counter()
        self._published: list[list[str]] = []
        with Corpus.open(self._source, create=True) as corpus:
            corpus.begin(MANIFEST)
            put(corpus, 0)
        self._share(self._plain)

    def _remote(self) -> RemoteRoot:
        return self._opened.enter_context(RemoteRoot(self._place.url, SECRET, 30.0))

    def close(self) -> None:
        self._opened.close()

    def round(self) -> None:
        """Every machine does its work a few times, in turns."""
        self._place.age(AGE_S)
        turns = Turns(self._chance, self._check)
        works: dict[str, Callable[[RemoteRoot], None]] = {
            "publisher": self._change_and_share, "ingester": self._ingest, "collector": self._collect,
            "follower": self._follow,
        }  # fmt: skip
        with contextlib.ExitStack() as closing:
            begun = {}
            for name, work in works.items():
                remote = closing.enter_context(RemoteRoot(self._place.url, SECRET, 30.0))
                begun[name] = partial(self._again, work, in_turns(remote, turns, name), turns, name)
            turns.run(begun)
        self._share(self._plain)
        self._follow(self._plain)
        assert texts_of(self._follower) == texts_of(self._source)
        self.ended["requests"] += turns.taken

    def _again(
        self, work: Callable[[RemoteRoot], None], remote: RemoteRoot, turns: Turns, name: str
    ) -> None:
        for _ in range(TIMES):
            for _ in range(self._chance.randrange(LONGEST_STOP)):
                turns.take(name)
            work(remote)

    def _check(self) -> None:
        """What is published is whole."""
        found = snapshots.current(self._plain)
        assert found is not None
        _, snapshot = found
        there = {each.name for each in self._plain.objects.listing("corpus/")}
        assert {PARTS + part.name for part in snapshot.parts} <= there
        lost = snapshots.read_keys(self._plain, snapshot) - kv_of(self._plain)
        assert not lost, f"{len(lost)} entries of KV that are published are gone"

    def _put_kv(self, remote: RemoteRoot, texts: list[str]) -> None:
        """As an ingest does: what is missing is put, and all is claimed."""
        wanted = sorted(key_of(text) for text in texts)
        there = kv_of(remote)
        for key in wanted:
            if key not in there:
                remote.objects.put(object_of(key), b"KV", if_absent=True)
        claim(remote, NAMESPACE, wanted)
        if not set(wanted) <= kv_of(remote):
            raise StoreUnavailableError("what was found is gone")

    def _change_and_share(self, remote: RemoteRoot) -> None:
        with Corpus.open(self._source) as corpus:
            for source in corpus.sources():
                if self._chance.random() < 0.4:
                    corpus.remove_source(source)
            put(corpus, self._chance.randrange(DOCUMENTS))
        try:
            self._put_kv(remote, texts_of(self._source))
            self._share(remote)
            self.ended["published"] += 1
        except StoreUnavailableError:  # a collection runs
            self.ended["refused"] += 1

    def _share(self, remote: RemoteRoot) -> None:
        def durable(keys: Keys) -> frozenset[str]:
            return keys.keys & kv_of(remote)

        self._published.append(texts_of(self._source))
        publish(self._source, remote, all_keys, durable)

    def _ingest(self, remote: RemoteRoot) -> None:
        number = self._chance.randrange(DOCUMENTS)
        with contextlib.suppress(StoreUnavailableError):
            self._put_kv(remote, [text_of(number, at) for at in range(TEXTS)])
            self.ended["ingested"] += 1

    def _collect(self, remote: RemoteRoot) -> None:
        with contextlib.suppress(StoreUnavailableError):  # somebody publishes
            done = collect_remote(remote, self._chance.choice(GRACES_S))
            self.ended["collected"] += 1
            self.ended["removed"] += done.removed

    def _follow(self, remote: RemoteRoot) -> None:
        follow(self._follower, remote)
        assert texts_of(self._follower) in self._published
        self.ended["followed"] += 1


class Folder:
    """A directory as a remote."""

    def __init__(self, root: Path) -> None:
        root.mkdir()
        self._root, self.url = root, f"file://{root}"

    def age(self, seconds: float) -> None:
        for path in self._root.rglob("*"):
            then = path.stat().st_mtime - seconds
            os.utime(path, (then, then))


class Bucket:
    """A local S3 server as a remote."""

    url = "s3://bucket/prefix"

    def __init__(self, server: Server) -> None:
        self._server = server

    def age(self, seconds: float) -> None:
        for name in self._server.written:
            self._server.written[name] -= seconds


def attack(place: AgeableRemote, directory: Path, rounds: int, seed: int) -> Counter[str]:
    """Rounds with one set of machines; what ended how. Raises ``AssertionError``."""
    sharing.AT_A_TIME = 1  # one thread of a machine takes turns
    with contextlib.closing(Machines(place, directory, seed)) as machines:
        for _ in range(rounds):
            machines.round()
        return machines.ended


def main() -> None:
    parser = argparse.ArgumentParser(prog="make soak-remote", description=__doc__)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    given = parser.parse_args()
    began, ended = time.monotonic(), {}
    memory = Path("/dev/shm")
    place_of_all = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place_of_all) as name, Server().running() as server:
        os.environ |= environment(server.server_port)
        for kind in ("directory", "s3"):
            directory = Path(name) / kind
            directory.mkdir()
            place = Folder(directory / "bucket") if kind == "directory" else Bucket(server)
            ended[kind] = dict(attack(place, directory, given.rounds, given.seed))
    seconds = round(time.monotonic() - began)
    sys.stdout.write(json.dumps({"seed": given.seed, "seconds": seconds, **ended}) + "\n")


if __name__ == "__main__":
    main()
