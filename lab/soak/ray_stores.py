"""Documents, a model and engines for an ingest on Ray, and what its stores hold."""

from __future__ import annotations

import hashlib
import sqlite3
from pathlib import Path
from typing import Any

import tiny
from blendrag.engine import BlendEngine


def save_model(folder: Path, **changes: Any) -> Path:
    tiny.llama(**changes).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def write_documents(folder: Path, count: int, begin: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(begin, begin + count):
        (folder / f"d{number:04}.txt").write_text(tiny.document(number).text)
    return folder


def engine(model: Path, root: Path, **changes: Any) -> BlendEngine:
    """One whose embedder counts words."""
    made = BlendEngine(model, root, chunk_tokens=128, learn=False, **changes)
    made.use_embedder(tiny.WordEmbedder())
    return made


def payloads(root: Path) -> dict[str, tuple[str, str]]:
    """Name and digest of the payload of every key. Each put has a name of its own."""
    found = {}
    for path in root.glob("kv/*/*/*.kv"):
        key = path.name.partition(".")[0]
        assert key not in found, f"{key} was put twice"
        found[key] = path.name, hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def digests(root: Path) -> dict[str, str]:
    return {key: digest for key, (_, digest) in payloads(root).items()}


def rows(root: Path) -> list[Any]:
    """Everything that the corpus says of documents, chunks and vectors."""
    with sqlite3.connect(root / "corpus" / "corpus.sqlite") as file:
        return [
            file.execute(f"SELECT * FROM {table} ORDER BY 1").fetchall()
            for table in ("document", "chunk", "passage", "anchor")
        ]
