"""What is below a remote's URL: who may fill it, in which format, and who has signed it.

``format`` is written once: the version, and whether and with which secret things are sealed. Imports no
torch.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from contextlib import suppress

from blendrag.errors import InvalidInputError
from blendrag.store.identity import is_name
from blendrag.store.remote.objects import RemoteObjects

FORMAT_NAME = "format"
FORMAT = "blendrag-remote"
VERSION = 1
SEAL_BYTES = 32
MIN_SECRET_CHARACTERS = 16


def name_of(namespace: str, key: str) -> str:
    """Name of the object that holds a chunk."""
    return f"kv/{namespace}/{key[:2]}/{key}.kv"


def entry_of(name: str) -> tuple[str, str]:
    """Namespace and key of the chunk that an object below ``kv/`` holds; no key for any other object."""
    _, namespace, *_ = (*name.split("/"), "")
    key = name.rsplit("/", 1)[-1].removesuffix(".kv")
    return namespace, key if is_name(key) and name == name_of(namespace, key) else ""


class Seals:
    """HMACs of layers and snapshots under one secret; without a secret there are none."""

    def __init__(self, secret: str | None) -> None:
        if secret is not None and len(secret) < MIN_SECRET_CHARACTERS:
            raise InvalidInputError(
                f"BLENDRAG_REMOTE_KEY has {len(secret)} characters, expected at least "
                f"{MIN_SECRET_CHARACTERS}; take a random one, the same on all machines"
            )
        self._secret = secret.encode() if secret is not None else None

    @property
    def mark(self) -> str:
        """What the remote's format file says of the secret, from which it cannot be computed."""
        if self._secret is None:
            return "unsealed"
        return hmac.new(self._secret, b"blendrag remote", hashlib.sha256).hexdigest()

    def size_bytes(self, layers: int) -> int:
        return SEAL_BYTES * layers if self._secret is not None else 0

    def sealing(self, namespace: str, key: str, layer: int) -> hmac.HMAC | None:
        """What computes the seal of a layer from its bytes."""
        if self._secret is None:
            return None
        derived = hmac.new(self._secret, b"namespace" + namespace.encode(), hashlib.sha256)
        return hmac.new(derived.digest(), key.encode() + struct.pack("<I", layer), hashlib.sha256)

    def fits(self, seals: bytes, namespace: str, key: str, layer: int, data: memoryview) -> bool:
        sealing = self.sealing(namespace, key, layer)
        if sealing is None:
            return True
        sealing.update(data)
        begin = layer * SEAL_BYTES
        return hmac.compare_digest(sealing.digest(), seals[begin : begin + SEAL_BYTES])

    def of_snapshot(self, data: bytes) -> str:
        """The seal of what names a snapshot; without a secret a checksum, which anybody can compute."""
        if self._secret is None:
            return hashlib.sha256(data).hexdigest()
        derived = hmac.new(self._secret, b"snapshot", hashlib.sha256)
        return hmac.new(derived.digest(), data, hashlib.sha256).hexdigest()


class RemoteRoot:
    """The objects below one URL, as one who has ``secret`` reads and writes them. Thread-safe."""

    def __init__(self, url: str, secret: str | None, timeout_s: float) -> None:
        """``timeout_s``: for one read, retries included. Connects to nothing.

        Raises :class:`InvalidInputError` for a URL or a secret that cannot be used.
        """
        self.seals = Seals(secret)
        self.timeout_s = timeout_s
        self.objects = RemoteObjects(url, timeout_s)
        self.url = self.objects.url
        self._is_made = False

    def __enter__(self) -> RemoteRoot:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def make(self) -> None:
        """Write the format file unless it is there. Raises as :meth:`check`."""
        if not self._is_made:
            text = f"{FORMAT} {VERSION} {self.seals.mark}\n"
            if not self.check() and not self.objects.put(FORMAT_NAME, text.encode(), True):
                self.check()  # another machine was faster
            self._is_made = True

    def check(self) -> bool:
        """Whether there is a format file, which fits.

        Raises :class:`InvalidInputError` if it does not, :class:`StoreUnavailableError`.
        """
        begun = self.objects.read(FORMAT_NAME, 0, 256)
        piece = self.objects.wait(begun, self.timeout_s)
        if piece is None:
            return False
        words = bytes(piece.data).decode("ascii", "replace").split()
        if len(words) != 3 or words[0] != FORMAT:
            raise InvalidInputError(
                f"remote {self.url} holds a file {FORMAT_NAME!r} that blendrag did not write, expected an "
                "empty prefix or one that blendrag filled; choose another prefix"
            )
        if words[1] != str(VERSION):
            raise InvalidInputError(
                f"remote {self.url} has layout version {words[1][:16]}, expected {VERSION}; use the "
                "version of blendrag that filled it, or another prefix"
            )
        if words[2] != self.seals.mark:
            sealed, here = "KV sealed with a key", "another key"
            if words[2] == "unsealed":
                sealed, here = "unsealed KV", "a key"
            elif self.seals.mark == "unsealed":
                here = "no key"
            raise InvalidInputError(
                f"remote {self.url} holds {sealed}, and here BLENDRAG_REMOTE_KEY gives {here}; set it "
                "as on the machine that filled the remote, or choose another prefix"
            )
        return True

    def close(self) -> None:
        """End all requests. Idempotent."""
        with suppress(RuntimeError):
            self.objects.close()
