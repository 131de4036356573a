"""LangChain's own tests of a vector store, with vectors of its own embedder and of somebody else's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from langchain_core.vectorstores import VectorStore
from langchain_tests.integration_tests import VectorStoreIntegrationTests

import tiny
from langchain_blendrag import BlendVectorStore


class TestOwnVectors(VectorStoreIntegrationTests):
    """By the corpus's embedder."""

    @pytest.fixture
    def vectorstore(self, tmp_path: Path) -> Iterator[VectorStore]:
        with tiny.engine(tiny.llama(), tmp_path / "store") as engine:
            yield BlendVectorStore(engine=engine)


class TestGivenVectors(VectorStoreIntegrationTests):
    """By embeddings of LangChain's."""

    @pytest.fixture
    def vectorstore(self, tmp_path: Path) -> Iterator[VectorStore]:
        with tiny.engine(tiny.llama(), tmp_path / "store") as engine:
            yield BlendVectorStore(self.get_embeddings(), engine=engine)
