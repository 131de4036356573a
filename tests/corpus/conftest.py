"""Shared by the tests of the corpus."""

from __future__ import annotations

import pytest

from blendrag.corpus.embedder import Embedder


@pytest.fixture(scope="session")
def embedder() -> Embedder:
    return Embedder("minilm-offline")
