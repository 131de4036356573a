"""What a corpus was ingested with."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from blendrag.identity import NATIVE_ENCODING


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

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, value: str) -> Manifest:
        fields = json.loads(value)
        return replace(cls(**fields), prefix_ids=tuple(fields["prefix_ids"]))
