"""The process that reads files for :mod:`blendrag.text.limited_reading`. It limits itself before each file.

Limits are of CPU time, so that they hold on a loaded machine, and of address space. They grow with what the
reader goes through. A process that exceeds its time is ended by ``SIGPROF``, in native code too. Requests
and replies are lines of JSON.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from blendrag.errors import UnreadableDocumentError, is_out_of_memory
from blendrag.store.regular_files import MIB
from blendrag.text.readers import Document, open_documents
from blendrag.wording import first_line

#: Characters of documents in one reply.
REPLY_CHARS = 256 * 1024


class ReadingLimits(NamedTuple):
    """Limits of reading one file."""

    cpu_s: float
    memory_bytes: int

    @property
    def wall_s(self) -> float:
        """Longer than the CPU time takes on a loaded machine and from a slow disk."""
        return WALL_S + WALL_PER_CPU * self.cpu_s


#: Limits of a small file, and the highest of any file.
SMALLEST, LARGEST = ReadingLimits(3.0, 512 * MIB), ReadingLimits(300.0, 4096 * MIB)
WALL_S, WALL_PER_CPU = 60.0, 8.0
#: CPU seconds for a MiB, and bytes of memory for a byte, that a reader goes through: several times what good
#: files need.
_PER_MIB = {
    "PDF": (40.0, 16),
    "DOCX": (1.5, 32),
    "XLSX": (4.0, 32),
    "HTML": (6.0, 128),
    "JSON lines": (0.5, 16),
    "Markdown": (0.25, 16),
    "text": (0.25, 16),
}
#: A process that keeps so much more address space after a file is not used again.
SPENT_BYTES = 128 * MIB


def limits_of(kind: str, work_bytes: int) -> ReadingLimits:
    cpu_s_per_mib, memory_per_byte = _PER_MIB[kind]
    return ReadingLimits(
        min(SMALLEST.cpu_s + cpu_s_per_mib * work_bytes / MIB, LARGEST.cpu_s),
        min(SMALLEST.memory_bytes + memory_per_byte * work_bytes, LARGEST.memory_bytes),
    )


def main() -> None:
    """Read the files that are asked for until the parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    # which may ignore or block, and so have let it inherit, the signal that ends it
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    connection = socket.socket(fileno=os.dup(0))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):  # readers print warnings that repeat what files hold
        os.dup2(nowhere, fd)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory runs out, end this process and not its parent
    threading.Thread(target=_end_with_parent, args=(connection.fileno(),), daemon=True).start()
    own_bytes = _address_space_bytes()
    for line in connection.makefile("rb"):
        request = json.loads(line)
        path, directory = (request[name].encode("latin-1") for name in ("path", "directory"))
        with suppress(OSError):  # then a relative path is not found
            os.chdir(directory)
        for reply in replies(Path(os.fsdecode(path)), own_bytes):
            line = json.dumps(reply, ensure_ascii=False).encode("utf-8", "surrogatepass")
            connection.sendall(line + b"\n")
        signal.setitimer(signal.ITIMER_PROF, 0)
        if _address_space_bytes() > own_bytes + SPENT_BYTES:
            return


def replies(path: Path, own_bytes: int) -> Iterator[dict[str, Any]]:
    """``limits``, then ``documents`` in lists, then ``end``: why reading ended early, or empty.

    ``own_bytes``: address space of the process before it reads.
    """
    failure: list[str] = []
    try:
        try:
            size_bytes = os.stat(path).st_size
        except (OSError, ValueError):
            size_bytes = 0  # reading it reports why
        yield _limit(limits_of("text", size_bytes), own_bytes)
        opened = open_documents(path)
        yield _limit(limits_of(opened.kind, opened.work_bytes), own_bytes)
        for documents in _batches(opened.documents):
            yield {"documents": documents}
    except UnreadableDocumentError as bad:
        failure = [bad.path, bad.reason]
    except Exception as exc:
        if is_out_of_memory(exc):
            os._exit(OUT_OF_MEMORY)
        why = f"cannot be read ({first_line(exc)}); save it again, or convert it to text"
        failure = [str(path), why]
    yield {"end": failure}


#: Exit status of a process without memory, which can do nothing more.
OUT_OF_MEMORY = 77


def _batches(documents: Iterator[Document]) -> Iterator[list[tuple[Any, ...]]]:
    """Documents as JSON, in lists of some size. Those before an error are yielded first."""
    batch: list[tuple[Any, ...]] = []
    chars = 0
    try:
        for each in documents:
            batch.append((each.source, each.text, each.title, dict(each.metadata), each.damage))
            chars += len(each.text)
            if chars >= REPLY_CHARS:
                yield batch
                batch, chars = [], 0
    except UnreadableDocumentError:
        yield batch
        raise
    yield batch


def _limit(limits: ReadingLimits, own_bytes: int) -> dict[str, Any]:
    """Apply limits from now on."""
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_CORE):
        _, most = resource.getrlimit(kind)
        wanted = own_bytes + limits.memory_bytes if kind == resource.RLIMIT_AS else 0
        with suppress(ValueError, OSError):  # macOS knows no limit of address space
            within = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
            resource.setrlimit(kind, (within, most))
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
    return {"limits": limits, "wall_s": limits.wall_s}


def _address_space_bytes() -> int:
    """Address space of this process; 0 where the system does not tell it."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _end_with_parent(fd: int) -> None:
    """Leave when the parent is gone, in the middle of a file too."""
    watch = select.poll()
    watch.register(fd, select.POLLHUP)
    watch.poll()
    os._exit(0)
