"""The server that answers over a store: a record in its folder, for commands of the same user.

The record has a secret that only its owner can read. A server proves with it that it is the one that wrote
the record: after a crash, its port may belong to somebody else.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from blendrag.store import regular_files

FILE_NAME = "server.json"
_MAX_BYTES = 64 * 1024
#: Characters of the longest challenge that is answered.
MAX_CHALLENGE_CHARS = 64
#: Where a server can be reached that listens on all addresses.
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True)
class ServerRecord:
    """Where a server of this machine listens, and the model that it answers with."""

    host: str
    port: int
    model: str
    version: str
    """Of blendrag: commands of another one may ask in other words."""
    needs_key: bool
    name: str = ""
    """What requests to this store call it, if the server answers from several."""
    secret: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def proof(self, challenge: str) -> str:
        """What only this server answers to ``challenge``."""
        return hmac.digest(self.secret.encode(), challenge.encode(), "sha256").hex()


def loopback(address: str) -> str:
    """The loopback address at which a server on ``address`` is reached; empty if there is none."""
    found = _LOOPBACK.get(address, address)
    with suppress(ValueError):
        return found if ipaddress.ip_address(found).is_loopback else ""
    return ""


def read(root: Path) -> ServerRecord | None:
    """The record of the store at ``root``, if this user's own file has one with a loopback address."""
    path = root / FILE_NAME
    with suppress(OSError, ValidationError):
        data = regular_files.read_bytes(path, _MAX_BYTES)
        status = path.lstat()
        record = TypeAdapter(ServerRecord).validate_json(data)
        if status.st_uid == os.geteuid() and not status.st_mode & 0o077 and loopback(record.host):
            return record
    return None


@contextmanager
def written(root: Path, record: ServerRecord) -> Iterator[None]:
    """Within this context the store at ``root`` names this server, if it can be written."""
    with suppress(OSError):
        regular_files.replace(root / FILE_NAME, json.dumps(asdict(record)).encode())
    try:
        yield
    finally:
        if read(root) == record:  # not that of a server that began later
            with suppress(OSError):
                (root / FILE_NAME).unlink()
