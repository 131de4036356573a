"""Chunks and modules of a request, known from its body alone: corpus, schemas and tokenizer, no weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from blendrag.corpus.corpus import Corpus
from blendrag.corpus.manifest import Manifest
from blendrag.errors import InvalidInputError
from blendrag.store.identity import chunk_keys

if TYPE_CHECKING:
    from blendrag.engine import BlendEngine

#: Chunks whose key is remembered.
REMEMBERED = 1 << 16


class ChunkKeys:
    """Recognises the chunks of a corpus and imported modules in the bodies of requests. Thread-safe."""

    def __init__(self, engine: BlendEngine) -> None:
        """``engine``: with the schemas of the replicas; its model is not loaded."""
        self._engine = engine
        self._remembered = lru_cache(REMEMBERED)(self._key)

    def of(self, body: bytes) -> dict[str, int]:
        """Tokens of each known chunk or module of a request, by key; empty for a body that will be refused.

        Chunks that a request has the server retrieve are not known: an embedder is a model. Modules have
        routing keys (:meth:`blendrag.engine.schemas.Schemas.imported`).
        """
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError):
            return {}
        if not isinstance(fields, dict):
            return {}
        if fields.get("schema") is not None:
            return self._imported(fields)
        corpus = self._engine.corpus
        manifest = corpus.manifest_or_none if corpus is not None else None
        if corpus is None or manifest is None:
            return {}
        found = {
            match.chunk_id: None
            for text in _texts(fields)
            for match in corpus.chunk_index.find(text)
            if match.complete
        }
        keys = (self._remembered(corpus, manifest, each, i == 0) for i, each in enumerate(found))
        return dict(entry for entry in keys if entry is not None)

    def _imported(self, fields: dict[str, Any]) -> dict[str, int]:
        from blendrag.server.asking import messages_of, schema_prompt  # imports torch
        from blendrag.server.bodies import ChatBody
        from blendrag.server.refusals import Refusal

        try:
            body = ChatBody.model_validate(fields)
            return self._engine.schemas.imported(schema_prompt(body, messages_of(body)))
        except (ValidationError, InvalidInputError, Refusal):
            return {}

    def _key(
        self, corpus: Corpus, manifest: Manifest, chunk_id: str, is_first: bool
    ) -> tuple[str, int] | None:
        """``is_first``: the first chunk of a prompt has KV of the model alone."""
        try:
            ids = tuple(self._engine.tokens.encode_text(corpus.text(chunk_id)))
        except KeyError:  # removed meanwhile
            return None
        exact = manifest.recipe.is_exact
        keys = chunk_keys(manifest.namespace, manifest.prefix_ids, ids, exact)
        return keys[-1 if is_first else 0], len(ids)


def _texts(fields: Mapping[str, Any]) -> Iterator[str]:
    """The texts of a chat or a completion that may hold chunks; what has another form is left out."""
    for message in _list(fields.get("messages")):
        content = message.get("content") if isinstance(message, dict) else None
        for part in _list(content) or [content]:
            yield from _text(part, "text")
    for document in _list(fields.get("documents")):
        data = document.get("data", document) if isinstance(document, dict) else document
        yield from _text(data, "text", "snippet")
    prompt = fields.get("prompt")
    for text in _list(prompt) or [prompt]:
        yield from _text(text)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any, *names: str) -> Iterator[str]:
    """``value`` if it is a text, else the first of its fields ``names`` that is one."""
    given = [value.get(name) for name in names] if isinstance(value, dict) else [value]
    yield from [text for text in given if isinstance(text, str)][:1]
