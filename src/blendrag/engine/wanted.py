"""What an engine asks of the corpus it ingests into, and whether one that is there has it.

Owns the settings that a corpus is made with and keeps. Does not open one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from blendrag.config import Settings
from blendrag.corpus.embedder import GIVEN, absolute_embedder, same_embedder
from blendrag.corpus.manifest import Manifest
from blendrag.errors import InvalidInputError
from blendrag.model.tokens import Tokens


@dataclass(frozen=True)
class Wanted:
    """Settings asked for by name, and none that is merely a default; ``None`` asks for nothing."""

    prefix_text: str | None = None
    encode_prefix: bool = True
    chunk_tokens: int | None = None
    embedder: str | None = None
    encoding: str | None = None

    def __post_init__(self) -> None:
        if self.prefix_text and not self.encode_prefix:
            raise InvalidInputError(
                f"prefix_text {self.prefix_text[:40]!r} with encode_prefix=False, expected one of them: "
                "leave prefix_text out to encode chunks behind nothing"
            )

    def prefix_ids(self, tokens: Tokens) -> tuple[int, ...]:
        """What chunks of a new corpus are encoded behind."""
        if not self.encode_prefix:
            return ()
        if self.prefix_text:
            return tuple(tokens.encode_template(self.prefix_text))
        return tokens.default_prefix_ids()

    def manifest(self, model: str, tokens: Tokens, defaults: Settings) -> Manifest:
        """That of a new corpus, for which no KV was computed yet."""
        return Manifest(
            model=model,
            model_signature="",
            tokenizer_fingerprint=tokens.fingerprint,
            namespace="",
            chunk_tokens=self.chunk_tokens or defaults.chunk_tokens,
            prefix_ids=self.prefix_ids(tokens),
            prefix_text=self.prefix_text or "",
            embedder=absolute_embedder(defaults.embedder),
            encoding=defaults.kv_encoding,
        )

    def check(self, manifest: Manifest, root: Path) -> None:
        """Raise :class:`InvalidInputError` where the corpus of ``root`` was made otherwise."""
        if self.chunk_tokens is not None and self.chunk_tokens != manifest.chunk_tokens:
            raise InvalidInputError(
                f"store {root} holds chunks of {manifest.chunk_tokens} tokens, not {self.chunk_tokens}; "
                "leave --chunk-tokens out or ingest into another --store"
            )
        self.check_embedder(manifest, root)
        if self.prefix_text is not None and self.prefix_text != manifest.prefix_text:
            raise InvalidInputError(
                f"store {root} was ingested behind another prefix; "
                "leave --prefix-file out or ingest into another --store"
            )
        if self.encoding is not None and self.encoding != manifest.encoding:
            raise InvalidInputError(
                f"store {root} keeps KV in encoding {manifest.encoding}, not {self.encoding}; "
                "leave --encoding out or ingest into another --store"
            )
        if not self.encode_prefix and manifest.prefix_ids:
            raise InvalidInputError(
                f"store {root} was ingested behind a prefix of {len(manifest.prefix_ids)} tokens; "
                "leave encode_prefix=False out or ingest into another --store"
            )

    def check_embedder(self, manifest: Manifest, root: Path) -> None:
        """Raise :class:`InvalidInputError` where the vectors are of another embedder."""
        if self.embedder is None or manifest.embedder.startswith(GIVEN):
            return  # given vectors are compared with those that are given
        if not same_embedder(self.embedder, manifest.embedder):
            raise InvalidInputError(
                f"store {root} was embedded with {manifest.embedder!r}, not "
                f"{self.embedder!r}; leave --embedder out or ingest into another --store"
            )
