"""What there is to damage a payload with, behind the store's back. Knows no way of doing it."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Target:
    """The file to be damaged, and what else there is to do it with."""

    path: Path
    data: bytes
    """What is in it, and right."""
    others: list[bytes]
    """Payloads of other chunks, of another namespace, of another length."""
    outside: Path
    """A file beside the store that nobody may touch."""
    chance: random.Random

    def write(self, data: bytes | bytearray) -> None:
        self.path.write_bytes(data)

    def somewhere(self, size: int = 1) -> int:
        return self.chance.randrange(max(1, len(self.data) - size))


Damage = Callable[[Target], object]


def put_right(path: Path, data: bytes) -> None:
    """The payload as it was, whatever lies there now."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.write_bytes(data)
