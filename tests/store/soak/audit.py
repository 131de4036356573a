"""Whether a store is still what it must be, found out in a child, so that a crash or hang is seen.

Owns the numbered chunks of all of this package and the comparison of their bytes. Chunks are made
in the parent: a forked child runs no torch operator.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
import traceback
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kv_lab import Lab

from blendrag.errors import StoreError
from blendrag.store import DiskStore
from blendrag.store.kv import ChunkKV

#: No limit that any of this reaches.
PLENTY = 1 << 30
#: What a child may take for what takes milliseconds.
PATIENCE_S = 60.0

_kvs: dict[int, ChunkKV] = {}
_bytes: dict[int, list[bytes]] = {}
_out = [
    torch.empty(Lab.layout.layer_shape(layer, Lab.tokens), dtype=Lab.layout.torch_dtype)
    for layer in range(len(Lab.layout.layers))
]


def make_chunks(numbers: Iterable[int]) -> None:
    """Make these chunks, once. In the parent, before the fork."""
    for number in numbers:
        if number not in _kvs:
            _kvs[number] = Lab.kv(number)
            _bytes[number] = [layer.numpy().tobytes() for layer in _kvs[number].layers]


def put(store: DiskStore, number: int) -> None:
    store.put(Lab.namespace, Lab.key(number), _kvs[number])


def read(store: DiskStore, number: int) -> bool | None:
    """Whether an entry gives exactly the bytes that were put; ``None`` is a miss.

    Bytes in doubt raise :class:`CorruptKVError`, which is for the caller to judge.
    """
    reader = Lab.open(store, number)
    if reader is None:
        return None
    with contextlib.closing(reader):
        for layer, (out, expected) in enumerate(zip(_out, _bytes[number], strict=True)):
            reader.read_layer(layer, out)
            if out.numpy().tobytes() != expected:
                return False
    return True


@dataclass(frozen=True)
class Verdict:
    """What was found in one store."""

    lost: tuple[int, ...] = ()
    """Acknowledged and not there."""
    wrong: tuple[int, ...] = ()
    """There with bytes that were never put: the unforgivable one."""
    complaints: tuple[str, ...] = ()
    """Everything else that a store must not do, hangs and crashes included."""
    found: int = 0

    @property
    def is_good(self) -> bool:
        return not (self.lost or self.wrong or self.complaints)


def in_child(action: Callable[[], Any], timeout_s: float = PATIENCE_S) -> tuple[Any, str | None]:
    """What ``action`` returns, by way of JSON, and how the child failed to say it, if it did."""
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(source)
        _answer(action, sink)
    os.close(sink)
    try:
        said = _read_all(source, timeout_s)
    finally:
        os.close(source)
        if child:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if said is None:
        return None, f"hang: no answer within {timeout_s} s"
    if not said:
        return None, "crash: the child died without an answer"
    answer, error = json.loads(said)
    return answer, error


def _answer(action: Callable[[], Any], sink: int) -> None:
    """The child's whole life. A Ctrl-C is for its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    said: tuple[Any, str | None] = (None, "crash: never said anything")
    try:
        said = (action(), None)
    except BaseException as exc:
        said = (None, f"crash: {summary(exc)}")
    finally:
        with os.fdopen(sink, "w") as file:
            json.dump(said, file)
        os._exit(0)


def summary(error: BaseException) -> str:
    """An exception nobody expected: what it says, and where in the store it was raised."""
    frames = [
        f"{Path(frame.filename).name}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if "blendrag" in frame.filename
    ]
    return f"{type(error).__name__}: {error} at {' '.join(frames[-4:])}"


def _read_all(source: int, timeout_s: float) -> bytes | None:
    """All that is written until the other end closes; ``None`` if it does not in time."""
    parts: list[bytes] = []
    deadline = time.monotonic() + timeout_s
    while select.select([source], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(source, 1 << 16)
        if not part:
            return b"".join(parts)
        parts.append(part)
    return None


def audit(
    root: Path,
    required: Collection[int],
    candidates: Collection[int],
    limit_bytes: int = PLENTY,
    fresh: int | None = None,
) -> Verdict:
    """Open the store at ``root``, read all that may be there, and put one more chunk.

    ``required`` must be there; the other ``candidates`` may be; ``fresh`` is put to see that the
    store can be used, and must be there afterwards. Nobody else uses the store.
    """
    make_chunks([*candidates, *required, *([] if fresh is None else [fresh])])
    answer, error = in_child(
        lambda: _inspect(root, sorted({*candidates, *required}), limit_bytes, fresh)
    )
    if error is not None:
        return Verdict(complaints=(error,))
    states: dict[str, bool | None] = answer["states"]
    return Verdict(
        lost=tuple(n for n in sorted(required) if states[str(n)] is None),
        wrong=tuple(int(n) for n, state in states.items() if state is False),
        complaints=tuple(answer["complaints"]),
        found=sum(state is True for state in states.values()),
    )


def _inspect(root: Path, numbers: list[int], limit_bytes: int, fresh: int | None) -> Any:
    store = DiskStore(root, limit_bytes)
    complaints = []
    left = os.listdir(root / "tmp")
    if left:
        complaints.append(f"temporaries left after opening: {left}")
    states: dict[int, bool | None] = {}
    for number in numbers:
        try:
            states[number] = read(store, number)
        except StoreError as exc:
            states[number] = None
            complaints.append(f"chunk {number}: {exc}")
    complaints += _mismatches(store, states, limit_bytes)
    if fresh is not None:
        put(store, fresh)
        if read(store, fresh) is not True:
            complaints.append("a chunk put afterwards cannot be read")
    store.close()
    return {"states": states, "complaints": complaints}


def _mismatches(store: DiskStore, states: dict[int, bool | None], limit_bytes: int) -> list[str]:
    """What index, files and counters say that does not fit together."""
    found = {Lab.key(number) for number, state in states.items() if state is not None}
    files = Lab.payloads(store.root)
    size_bytes = sum(path.stat().st_size for path in files)
    stats = store.stats()
    pairs = {
        "keys": (set(store.keys(Lab.namespace)), found),
        "keys of files": ({path.name[:64] for path in files}, found),
        "files": (len(files), len(found)),
        "entries": (stats.entries, len(found)),
        "bytes": (stats.size_bytes, size_bytes),
        "quarantined": (stats.quarantined, 0),
        "bytes over the limit": (max(0, size_bytes - limit_bytes), 0),
    }
    return [f"{what}: {is_}, expected {must}" for what, (is_, must) in pairs.items() if is_ != must]
