"""Settings that a corpus was ingested with, and whether a model it names may be loaded."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import get_args

from blendrag.config import KVEncoding
from blendrag.errors import InvalidInputError
from blendrag.store.identity import NATIVE_ENCODING

#: Fields that chunks and their KV depend on. The model may change.
_BINDING = ("encoding", "chunk_tokens", "prefix_ids", "tokenizer_fingerprint")


@dataclass(frozen=True)
class Manifest:
    """What a corpus was ingested with. Every chunk is encoded after ``prefix_ids``."""

    model: str
    model_signature: str
    tokenizer_fingerprint: str
    namespace: str
    chunk_tokens: int
    prefix_ids: tuple[int, ...]
    prefix_text: str
    embedder: str
    encoding: str = NATIVE_ENCODING
    """How the chunks' KV is stored."""

    def differences(self, other: Manifest) -> dict[str, tuple[object, object]]:
        """This and the other value of each field that chunks and their KV depend on, where they differ."""
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in _BINDING}
        return {name: (ours, theirs) for name, (ours, theirs) in pairs.items() if ours != theirs}

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, value: str) -> Manifest:
        """Raises :class:`ValueError` or :class:`TypeError` for anything that no ingest wrote."""
        fields = json.loads(value)
        if not isinstance(fields, dict):
            raise TypeError("not an object")
        made = cls(**fields)
        texts = [v for k, v in fields.items() if k not in ("chunk_tokens", "prefix_ids")]
        ids = [made.chunk_tokens, *made.prefix_ids]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("a text has another type")
        if not all(type(number) is int and 0 <= number < 1 << 32 for number in ids):
            raise TypeError("a number has another type or is out of range")
        if made.chunk_tokens < 1 or made.encoding not in get_args(KVEncoding):
            raise ValueError(f"chunks of {made.chunk_tokens} tokens in {made.encoding}")
        return replace(made, prefix_ids=tuple(made.prefix_ids))


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


def check_recorded(name: str, root: Path, option: str) -> None:
    """Refuse to load a model that only the store at ``root`` names, unless the name is harmless.

    Hub ids and absolute directories outside of the store are harmless; their weights are loaded from
    safetensors. Anything else may have been put there by the store's author. ``option``: how the user can
    name the model. Raises :class:`InvalidInputError`.
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
        f"trust it, name it: {option} {name:.200}"
    )
