"""Attacks on the remote tier: flipped bits, and a server that is frozen, slow, down or cuts bodies short.

Whatever the remote does, KV has the bytes that were put or is not used, a corpus is the published one or
stays as it was, an answer is that of full prefill, and a prompt waits for a bounded time.
``make soak-remote`` runs it for long, and prints the counts as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

import tiny
from blendrag.corpus.corpus import Corpus
from blendrag.corpus.shared.sharing import Keys, follow, publish
from blendrag.errors import BlendragError
from blendrag.store.kv import KVLayout, LayerShape
from blendrag.store.remote.root import RemoteRoot
from blendrag.store.remote.tier import Pause, RemoteTier
from blendrag.store.tiered import open_store
from corpus.small_corpus import make_corpus, put
from store.kv_lab import Lab
from store.s3 import Process, Server, environment, flipped

URL, SECRET = "s3://bucket/prefix", "a secret of all machines"
#: Seconds that a prompt may wait for the remote, and what a busy machine may add.
TIMEOUT_S, SLACK_S = 1.0, 4.0
CHUNKS = 3
#: So large that a server which sends 1 MB/s cannot send a chunk in time.
LARGE = KVLayout((LayerShape(8, 64),) * 4, "float32")
LARGE_TOKENS = 256
FAULTS = ("frozen", "throttle", "503", "cut")


class AttackReport:
    """Counts of one run."""

    def __init__(self, shows_progress: bool) -> None:
        self.shows_progress, self._told = shows_progress, 0
        self.counts: Counter[str] = Counter()
        self.longest_s: dict[str, float] = {}
        self.details: list[str] = []

    def tell(self, flips: int) -> None:
        if self.shows_progress and flips // 1000 > self._told:
            self._told = flips // 1000
            sys.stdout.write(f"{flips:,} bits flipped, {self.counts['failures']} failures\n")
            sys.stdout.flush()

    def add(self, what: str) -> None:
        self.counts[what] += 1

    def fail(self, what: str) -> None:
        self.add("failures")
        self.details.append(what[-2000:])

    def waited(self, fault: str, seconds: float) -> None:
        self.longest_s[fault] = round(max(self.longest_s.get(fault, 0.0), seconds), 2)

    @property
    def is_good(self) -> bool:
        slow = {f: s for f, s in self.longest_s.items() if s > TIMEOUT_S + SLACK_S}
        return not self.counts["failures"] and not slow

    def as_json(self) -> dict[str, object]:
        return {**self.counts, "longest_wait_s": self.longest_s, "details": self.details[:5]}

    @contextlib.contextmanager
    def watching(self, what: str) -> Iterator[None]:
        """A refusal counts as such, any other exception as a failure."""
        try:
            yield
        except BlendragError:
            self.add(f"{what} refused")
        except Exception:
            self.fail(f"{what}: {traceback.format_exc()}")


def tier(timeout_s: float = TIMEOUT_S) -> RemoteTier:
    return RemoteTier(URL, SECRET, timeout_s)


def fill(directory: Path, layout: KVLayout = Lab.layout, tokens: int = Lab.tokens) -> None:
    """Put the chunks into the remote."""
    store = Lab.agree(open_store(directory / "filling", 0, 1 << 30, remote=lambda: tier(30.0)))
    with contextlib.closing(store):
        for number in range(CHUNKS):
            Lab.put(store, number, layout, tokens)
        store.flush()


# -- flipped bits ------------------------------------------------------------------------------------


def flip_kv(server: Server, flips: int, outcome: AttackReport, chance: random.Random) -> None:
    """Bits of objects, or on the way: right bytes or none."""
    paths = [path for path in server.objects if "/kv/" in path]
    number_of = {Lab.key(number): number for number in range(CHUNKS)}
    kvs = {number: Lab.kv(number) for number in range(CHUNKS)}
    at_rest = 0
    with contextlib.closing(tier()) as remote:
        while at_rest + server.flips < flips and outcome.counts["failures"] < 5:
            path = chance.choice(paths)
            number = number_of[path.rsplit("/", 1)[1].removesuffix(".kv")]
            good, is_at_rest = server.objects[path], chance.random() < 0.5
            if is_at_rest:
                server.objects[path] = flipped(good, chance)
                at_rest += 1
            else:
                server.fault = chance.choice(["flip", "flip once"])
            with outcome.watching("KV"):
                reader = Lab.open(remote, number)
                if reader is None:
                    outcome.add("KV refused")
                elif Lab.gives(reader, kvs[number]):
                    outcome.add("KV right")
                else:
                    outcome.fail(f"wrong KV of {path}")
            server.objects[path], server.fault = good, ""
            remote._doubtful.clear()  # or nothing would be read after the first flips
            remote._pause = Pause()
            outcome.tell(at_rest + server.flips)
    outcome.counts["bits flipped"] += at_rest + server.flips


def flip_corpus(
    server: Server, flips: int, outcome: AttackReport, chance: random.Random, directory: Path
) -> None:
    """Bits of a published corpus: followed as published, or refused."""
    source, root = directory / "published", directory / "following"
    if not source.exists():
        make_corpus(source)
    with RemoteRoot(URL, SECRET, 30.0) as remote:
        publish(source, remote, lambda *_: Keys("", frozenset()), lambda keys: frozenset())
        expected = texts(source)
        paths = [path for path, data in server.objects.items() if "/corpus/" in path and data]
        for turn in range(flips):
            path = chance.choice(paths)
            good = server.objects[path]
            server.objects[path] = flipped(good, chance)
            to = root / str(turn)
            with outcome.watching("corpus"):
                follow(to, remote)
                outcome.add("corpus right")
            if (to / "corpus").exists() and texts(to) not in (expected, []):
                outcome.fail(f"wrong corpus after {path}")
            server.objects[path] = good
            outcome.add("bits flipped")


def texts(root: Path) -> list[str]:
    with Corpus.open(root) as corpus:
        chunks = (chunk for source in corpus.sources() for chunk in corpus.chunks_of(source))
        return sorted(f"{chunk.chunk_id} {chunk.text}" for chunk in chunks)


# -- a server that does not do its work --------------------------------------------------------------


def read_under(fault: str, server: Process, outcome: AttackReport, directory: Path) -> None:
    """A prompt's chunks, opened first and read while the fault lasts, or all of it meanwhile."""
    kvs = [Lab.kv(number, LARGE, LARGE_TOKENS) for number in range(CHUNKS)]
    for is_open in (False, True):
        with tempfile.TemporaryDirectory(dir=directory) as place, contextlib.ExitStack() as stack:
            store = Lab.agree(open_store(Path(place) / "store", 0, 1 << 30, remote=tier))
            stack.enter_context(contextlib.closing(store))
            numbers = range(CHUNKS)
            readers = [Lab.open(store, n, LARGE, LARGE_TOKENS) for n in numbers] if is_open else []
            with server.suffering(fault):
                began = time.monotonic()
                if not is_open:
                    readers = [Lab.open(store, n, LARGE, LARGE_TOKENS) for n in numbers]
                for number, reader in enumerate(readers):
                    with outcome.watching(fault):
                        if reader is None:
                            outcome.add(f"{fault} refused")
                        elif Lab.gives(reader, kvs[number]):
                            outcome.add(f"{fault} right")
                        else:
                            outcome.fail(f"wrong KV while {fault}")
                outcome.waited(fault, time.monotonic() - began)
            for reader in readers:
                if reader is not None:
                    reader.close()


def answer_under(fault: str, server: Process, outcome: AttackReport, directory: Path) -> None:
    """With everything recomputed, the answer is that of full prefill, whatever was loaded."""
    given = {
        "ram_bytes": 0,
        "remote": URL,
        "prefix_text": tiny.BOS,
        "ratio": 1.0,
        "policy": "random",
    }
    with tempfile.TemporaryDirectory(dir=directory) as place:
        with tiny.engine(tiny.llama(), Path(place) / "one", **given) as one:
            one.ingest([tiny.document(0)])
        with tiny.engine(tiny.llama(), Path(place) / "two", **given) as two:
            two.ingest([tiny.document(0)])
            two.open()
            prompt = tiny.prompt(two, 0)
            with server.suffering(fault), outcome.watching(f"answer {fault}"):
                answer = two.generate(prompt)
            if answer.text == two.generate(prompt, mode="full").text:
                outcome.add(f"answer right while {fault}")
            else:
                outcome.fail(f"wrong answer while {fault}")


# -- a server that is killed -------------------------------------------------------------------------


def kill_server(kills: int, outcome: AttackReport, chance: random.Random, directory: Path) -> None:
    """SIGKILL at random moments of copying and publishing: what ended well is there after a restart.

    What ended with an error ends well when it is repeated.
    """
    kept = directory / "kept"
    kept.mkdir()
    make_corpus(directory / "killed corpus")
    with contextlib.closing(Process(kept)) as server:
        os.environ |= environment(server.port)
        for turn in range(kills):
            numbers = range(1000 + turn * CHUNKS, 1000 + (turn + 1) * CHUNKS)
            moment = threading.Timer(chance.uniform(0.0, 0.2), server.kill)
            moment.start()
            with outcome.watching("copies"):
                copy_and_publish(directory, numbers, turn)
            moment.join()
            server.start()
            with outcome.watching("copies again"):
                copy_and_publish(directory, numbers, turn)
                outcome.add("kills survived")
        with tempfile.TemporaryDirectory(dir=directory) as place:
            store = Lab.agree(open_store(Path(place) / "s", 0, 1 << 30, remote=lambda: tier(30.0)))
            with contextlib.closing(store):
                for number in range(1000, 1000 + kills * CHUNKS):
                    reader = Lab.open(store, number, LARGE, LARGE_TOKENS)
                    if reader is None or not Lab.gives(reader, Lab.kv(number, LARGE, LARGE_TOKENS)):
                        outcome.fail(f"chunk {number} is lost or wrong after kills")
            with RemoteRoot(URL, SECRET, 30.0) as remote:
                follow(Path(place) / "following", remote)
            if texts(Path(place) / "following") != texts(directory / "killed corpus"):
                outcome.fail("another corpus than was published last")
    if outcome.counts["kills survived"] != kills:
        outcome.fail("what was repeated after a kill did not end well")


def copy_and_publish(directory: Path, numbers: range, turn: int) -> None:
    store = Lab.agree(open_store(directory / "copying", 0, 1 << 30, remote=lambda: tier(30.0)))
    with contextlib.closing(store):
        for number in numbers:
            if not Lab.has(store, number):
                Lab.put(store, number, LARGE, LARGE_TOKENS)
        store.flush()
    with Corpus.open(directory / "killed corpus") as corpus:
        put(corpus, 100 + turn)
    with RemoteRoot(URL, SECRET, 30.0) as remote:
        keys = Keys("", frozenset[str]())
        publish(directory / "killed corpus", remote, lambda *_: keys, lambda keys: frozenset())


# -- the program -------------------------------------------------------------------------------------


def attack(
    flips: int,
    rounds: int,
    seed: int,
    directory: Path,
    faults: tuple[str, ...] = FAULTS,
    shows_progress: bool = False,
    kills: int = 0,
) -> AttackReport:
    """``flips``: bits, a twentieth of them of a published corpus; ``rounds`` of each fault; ``kills`` of the
    server."""
    outcome, chance, before = AttackReport(shows_progress), random.Random(seed), dict(os.environ)
    try:
        with Server(seed).running() as server:
            os.environ |= environment(server.server_port)
            fill(directory)
            flip_corpus(server, flips // 20, outcome, chance, directory)
            flip_kv(server, flips - flips // 20, outcome, chance)
        if rounds:
            process = Process()
            with contextlib.closing(process):
                os.environ |= environment(process.port) | {
                    "BLENDRAG_REMOTE_TIMEOUT_S": str(TIMEOUT_S), "BLENDRAG_REMOTE_KEY": SECRET,
                }  # fmt: skip
                tiny_settings_from_environment()
                fill(directory / "large", LARGE, LARGE_TOKENS)
                for _ in range(rounds):
                    for fault in faults:
                        read_under(fault, process, outcome, directory)
                        answer_under(fault, process, outcome, directory)
        if kills:
            kill_server(kills, outcome, chance, directory)
    finally:
        os.environ.clear()
        os.environ |= before
        tiny_settings_from_environment()
    return outcome


def tiny_settings_from_environment() -> None:
    """Settings are read once per process."""
    from blendrag.config import settings

    settings.cache_clear()


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak-remote", description=__doc__)
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    sys.stdout.write(f"soak-remote with seed {given.seed}\n")
    sys.stdout.flush()
    began = time.monotonic()
    memory = Path("/dev/shm")
    place = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="blendrag-remote-", dir=place) as directory:
        outcome = attack(
            given.flips,
            given.rounds,
            given.seed,
            Path(directory),
            shows_progress=True,
            kills=given.kills,
        )
    seconds = round(time.monotonic() - began)
    counts = {"seed": given.seed, "seconds": seconds, **outcome.as_json()}
    sys.stdout.write(json.dumps(counts, indent=1) + "\n")
    return int(not outcome.is_good)


if __name__ == "__main__":
    sys.exit(main())
