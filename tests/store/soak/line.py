"""What a child tells its parent while it works, in lines that a kill cannot cut in two.

Knows what may be said, and nothing of what it is about.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field

from blendrag.store import DiskStore
from soak.audit import put


class Teller:
    """A child's line to its parent."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def say(self, kind: str, what: object) -> None:
        os.write(self._pipe, json.dumps([kind, what]).encode() + b"\n")

    def put(self, store: DiskStore, number: int) -> None:
        """Put a chunk and acknowledge it."""
        put(store, number)
        self.say("put", number)


@dataclass
class Heard:
    """What the parent knows by now."""

    acknowledged: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    """Named ones: the store may refuse, as long as it says so."""
    complaints: list[str] = field(default_factory=list)
    beats: int = 0
    """Signs of life: anything done and told."""
    attempts: int = 0
    done: int = 0
    """How much of what was asked for."""
    _rest: bytes = b""

    def hear(self, pipe: int) -> None:
        """Take in whatever is in the pipe, which does not block."""
        try:
            while data := os.read(pipe, 1 << 16):
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    self._take(*json.loads(line))
        except BlockingIOError:
            pass

    def _take(self, kind: str, what: object) -> None:
        self.beats += 1
        if kind == "put":
            self.acknowledged.append(int(str(what)))
        elif kind == "done":
            self.done = int(str(what))
        elif kind == "attempted":
            self.attempts += 1
        elif kind == "error":
            self.errors.append(str(what))
        elif kind == "complaint":
            self.complaints.append(str(what))
