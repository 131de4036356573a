"""What a corpus was ingested with."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from blendrag.identity import NATIVE_ENCODING

#: What chunks are cut by, and their KV kept under. Whose KV it is, is renewed as models change.
_BINDING = ("encoding", "chunk_tokens", "prefix_ids", "tokenizer_fingerprint")


@dataclass(frozen=True)
class Manifest:
    """What a corpus was ingested with. ``prefix_ids`` stand before every chunk when encoded."""

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
        """Settings that chunks and their KV depend on, by name, where this one's are not the other's."""
        return {
            name: (getattr(self, name), getattr(other, name))
            for name in _BINDING
            if getattr(self, name) != getattr(other, name)
        }

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, value: str) -> Manifest:
        fields = json.loads(value)
        return replace(cls(**fields), prefix_ids=tuple(fields["prefix_ids"]))
