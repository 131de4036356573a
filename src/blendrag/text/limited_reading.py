"""Read files in child processes, so that a hostile one costs some seconds and one sentence.

A child reads one file after another, with limits of time, memory and output. One that dies or takes too long
is replaced, and the next file goes on. Children are started when they are needed, one for each thread that
reads at the same time, are kept, and end with this process.

The child is a plain subprocess: ``multiprocessing`` would run a script without ``if __name__ == "__main__"``
again, or fork the threads of torch. Pebble and loky start processes through it, too.
"""

from __future__ import annotations

import atexit
import errno
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import spawn
from pathlib import Path
from typing import Any

from blendrag.errors import NoThreadError, UnreadableDocumentError
from blendrag.store.durable import readable_size
from blendrag.store.regular_files import MIB
from blendrag.text.reader_process import OUT_OF_MEMORY
from blendrag.text.readers import Document

#: Time for a child to start.
START_S = 120.0
#: Limit of what a child returns of one file.
MAX_REPLY_BYTES = 2048 * MIB

#: Paths are arguments: until they are set, an import would look into the working directory.
_CODE = """\
import sys
sys.path[:] = sys.argv[1:]
from blendrag.text.reader_process import main
main()
"""


def read_documents(path: Path) -> Iterator[Document]:
    """The documents of one file, in order, read in a child process.

    Raises :class:`UnreadableDocumentError`, for JSON lines only after all good lines were yielded, and
    :class:`NoThreadError` if the system starts no process.
    """
    documents, failure = _POOL.read(path)
    yield from documents
    if failure is not None:
        raise failure


class ReaderPool:
    """Children that wait for a file. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[ReaderChild] = []

    def read(self, path: Path) -> tuple[list[Document], UnreadableDocumentError | None]:
        """Documents, and why reading ended early, if it did."""
        with self._lock:
            child = self._idle.pop() if self._idle else None
        if child is not None:
            with suppress(_ChildGone):  # it was killed, or left after a large file
                return self._read(child, path)
        try:
            return self._read(ReaderChild(), path)
        except _ChildGone as gone:
            return [], UnreadableDocumentError(path, f"cannot be read: {gone}")

    def _read(
        self, child: ReaderChild, path: Path
    ) -> tuple[list[Document], UnreadableDocumentError | None]:
        try:
            found = child.read(path)
        except BaseException:
            child.close()
            raise
        if child.is_open:
            with self._lock:
                self._idle.append(child)
        return found

    def close(self) -> None:
        """End idle children; others are started if another file is read."""
        with self._lock:
            idle, self._idle = self._idle, []
        for child in idle:
            child.close()

    def forget(self) -> None:
        """In a forked process: the children belong to the process that started them."""
        for child in self._idle:
            child.disconnect()
        self._lock, self._idle = threading.Lock(), []


def _command() -> list[str]:
    """Command of a child with this process's interpreter and ``sys.path``."""
    flags = {"-I": sys.flags.isolated, "-E": sys.flags.ignore_environment}
    flags |= {"-Xutf8": sys.flags.utf8_mode, "-P": True}
    python = os.fsdecode(spawn.get_executable() or "")
    paths = [each for each in sys.path if isinstance(each, str)]
    given = [flag for flag, is_set in flags.items() if is_set]
    return [python, *given, "-c", _CODE, *paths]


def _directory() -> bytes:
    """Where relative paths begin; empty if that was removed."""
    try:
        return os.getcwdb()
    except OSError:
        return b""


def _slow(limit_s: float) -> str:
    return (
        f"takes more than {math.ceil(limit_s)} s to read, the limit for its size; split it, or convert it "
        "to plain text"
    )


class _ChildGone(Exception):
    """The child ended before it began to read, for this reason."""


class _TooMuch(Exception):
    """The replies are larger than allowed."""


class ReaderChild:
    """One child process. Not thread-safe."""

    def __init__(self) -> None:
        self._socket, child_end = socket.socketpair()
        self._replies = self._socket.makefile("rb")
        with child_end:
            try:
                self.process = subprocess.Popen(
                    _command(),
                    stdin=child_end.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                )
            except (OSError, ValueError) as exc:
                self.disconnect()
                if isinstance(exc, OSError) and exc.errno in (errno.EAGAIN, errno.ENOMEM):
                    raise NoThreadError from exc
                raise _ChildGone(
                    f"no process of {sys.executable or 'Python'} can be started ({exc}); name an "
                    "interpreter with multiprocessing.set_executable"
                ) from exc
        self.is_open = True

    def read(self, path: Path) -> tuple[list[Document], UnreadableDocumentError | None]:
        """See :meth:`ReaderPool.read`. Raises :class:`_ChildGone` if the child had not begun to read."""
        documents: list[Document] = []
        limits, deadline, left_bytes = None, time.monotonic() + START_S, MAX_REPLY_BYTES
        try:
            # the child may have been started in another directory
            paths = {"path": os.fsencode(path), "directory": _directory()}
            request = {name: each.decode("latin-1") for name, each in paths.items()}
            self._socket.settimeout(START_S)
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            while True:
                reply, size_bytes = self._receive(deadline, left_bytes)
                left_bytes -= size_bytes
                if "limits" in reply:
                    limits, deadline = reply, time.monotonic() + reply["wall_s"]
                elif "documents" in reply:
                    documents += [Document(*each) for each in reply["documents"]]
                elif "end" in reply:
                    end = reply["end"]
                    return documents, UnreadableDocumentError(*end) if end else None
        except TimeoutError:
            self.close()
            wall_s = START_S if limits is None else limits["wall_s"]
            return documents, UnreadableDocumentError(path, _slow(wall_s))
        except (OSError, EOFError, ValueError, TypeError, KeyError) as exc:
            said = self.close()
            if limits is None:
                raise _ChildGone(said) from exc
            return documents, UnreadableDocumentError(path, self._why(limits))
        except _TooMuch:
            self.close()
            return documents, UnreadableDocumentError(
                path, f"holds more than {readable_size(MAX_REPLY_BYTES)} of text; split it"
            )

    def _why(self, limits: dict[str, Any]) -> str:
        """Why the child died while it read a file."""
        cpu_s, memory_bytes = limits["limits"]
        status = self.process.returncode
        if status == -signal.SIGPROF:
            return _slow(cpu_s)
        if status == OUT_OF_MEMORY:
            return (
                f"needs more than {readable_size(memory_bytes)} of memory to read, the limit for its size; "
                "split it, or convert it to plain text"
            )
        how = f"signal {-status}" if status is not None and status < 0 else f"status {status}"
        return f"ended the process that read it ({how}); save it again, or convert it to plain text"

    def _receive(self, deadline: float, limit_bytes: int) -> tuple[dict[str, Any], int]:
        """A reply, which is a line, and its size."""
        line = bytearray()
        while not line.endswith(b"\n"):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            self._socket.settimeout(left_s)
            received = len(self._replies.peek())  # one read at most, for which the time holds
            if not received:
                raise EOFError
            line += self._replies.readline(received)
            if len(line) > limit_bytes:
                raise _TooMuch
        return json.loads(line.decode("utf-8", "surrogatepass")), len(line)

    def disconnect(self) -> None:
        self._replies.close()
        self._socket.close()

    def close(self) -> str:
        """End the child at once and wait for it; why it did not begin, in one line."""
        if not self.is_open:
            return ""
        self.is_open = False
        self.disconnect()
        self.process.kill()
        with suppress(subprocess.TimeoutExpired):  # it may wait for a file system that is gone
            self.process.wait(5)
        assert self.process.stderr is not None
        with self.process.stderr as stderr:
            said = stderr.read().decode("utf-8", "replace").strip().splitlines()
        return (
            said[-1][:200] if said else f"its process ended with status {self.process.returncode}"
        )


_POOL = ReaderPool()
atexit.register(_POOL.close)
os.register_at_fork(after_in_child=_POOL.forget)
