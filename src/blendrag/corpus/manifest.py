"""Settings that a corpus was ingested with, and whether a model it names may be loaded."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field, TypeAdapter

from blendrag.config import MAX_ENCODE_AFTER, KVEncoding
from blendrag.errors import InvalidInputError
from blendrag.store.identity import ChunkRecipe

#: Fields that chunks and their KV depend on. The model may change.
_BINDING = ("encoding", "chunk_tokens", "prefix_ids", "tokenizer_fingerprint")
_Number = Annotated[int, Field(strict=True, ge=0, lt=1 << 32)]


@dataclass(frozen=True)
class Manifest:
    """What a corpus was ingested with. Every chunk is encoded after ``prefix_ids``."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    model: str
    model_signature: str
    tokenizer_fingerprint: str
    namespace: str
    chunk_tokens: Annotated[_Number, Field(ge=1)]
    prefix_ids: tuple[_Number, ...]
    prefix_text: str
    embedder: str
    encoding: KVEncoding = "native"
    """How the chunks' KV is stored."""
    writer: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")] = ""
    """Fingerprint of the writer that encoded the KV of ``namespace``; empty if none did."""
    encode_after: Annotated[int, Field(strict=True, ge=0, le=MAX_ENCODE_AFTER)] = 0
    """Other chunks that each chunk of ``namespace`` was encoded after, at most."""

    @property
    def recipe(self) -> ChunkRecipe:
        return ChunkRecipe(self.writer, self.encode_after)

    def differences(self, other: Manifest) -> dict[str, tuple[object, object]]:
        """This and the other value of each field that chunks and their KV depend on, where they differ."""
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in _BINDING}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, value: str) -> Manifest:
        """Raises :class:`ValueError` or :class:`RecursionError` for anything that no ingest wrote."""
        return _read(value)


_WRITTEN = TypeAdapter(Manifest)


@lru_cache(maxsize=16)  # every request reads that of its corpus several times
def _read(value: str) -> Manifest:
    return _WRITTEN.validate_python(json.loads(value))


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


def check_recorded(name: str, root: Path, kind: str) -> None:
    """Refuse to load a model that only the store at ``root`` names, unless the name is harmless.

    Hub ids and absolute directories outside of the store are harmless; their weights are loaded from
    safetensors. Anything else may have been put there by the store's author. ``kind``: model or
    embedder. Raises :class:`InvalidInputError`.
    """
    if not os.path.lexists(name) and _HUB_ID.fullmatch(name):
        return
    folder = Path(name)
    reason = "a path that depends on the working directory"
    if folder.is_absolute():
        reason = "a directory inside the store"
        if not folder.resolve().is_relative_to(root.resolve()):
            return
    raise InvalidInputError(
        f"store {root} names {name!r:.200}, {reason}, which is not loaded because a store says so; if you "
        f"trust it, name it as the {kind}: {name:.200}"
    )
