"""A text with where it came from, and its digest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from blendrag.store.identity import digest_fields

MetadataValue = str | int | float | bool


@dataclass(frozen=True)
class Document:
    """One text with where it came from.

    ``source`` is the file's path with forward slashes; for JSON lines ``path#id`` or ``path#line``.
    """

    source: str
    text: str
    title: str
    metadata: Mapping[str, MetadataValue] = field(default_factory=dict)


def digest_of(document: Document) -> str:
    """SHA-256 over text, title and metadata: equal digests need no work on re-ingest."""
    metadata = json.dumps(dict(document.metadata), sort_keys=True)
    fields = ("document", document.title, document.text, metadata)
    return digest_fields(field.encode("utf-8", "surrogatepass") for field in fields)
