"""Two chunks of the embedded model's corpus in a store without vectors."""

from __future__ import annotations

from pathlib import Path

import pytest

from blendrag.demo import demo_corpus_path
from blendrag.engine import BlendEngine
from blendrag.engine.library import Entry

NAMES = ("anna-bell.txt", "hans-ellis.txt")


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return [(demo_corpus_path() / name).read_text().split("\n\n")[0] for name in NAMES]


@pytest.fixture(scope="session")
def store(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("keys") / "store"
    with BlendEngine("demo", root, learn=False) as engine:
        entries = [Entry(name, text) for name, text in zip(NAMES, texts, strict=True)]
        engine.library.add(entries, embed=False)
    return root
