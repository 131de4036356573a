"""An engine over five documents of six paragraphs, for the tests of the integrations."""

from __future__ import annotations

from pathlib import Path

import tiny
from blendrag.engine import BlendEngine


def engine(root: Path) -> BlendEngine:
    """An engine with the documents ingested from files; the caller closes it."""
    docs = root / "docs"
    docs.mkdir()
    for i in range(5):
        (docs / f"d{i}.txt").write_text(tiny.document(i, paragraphs=6).text)
    made = tiny.engine(tiny.llama(), root / "store", chunk_tokens=64, max_new_tokens=8, top_k=4)
    made.ingest([docs])
    return made
