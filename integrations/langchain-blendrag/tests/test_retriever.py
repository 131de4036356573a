"""``BlendRetriever``: the standard suite, and what a document of ours carries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from langchain_core.retrievers import BaseRetriever
from langchain_tests.integration_tests import RetrieversIntegrationTests
from pydantic import ValidationError

import tiny
from blendrag.engine import BlendEngine
from blendrag.errors import BlendragError, InvalidInputError
from langchain_blendrag import BlendRetriever

QUESTION = "What does document 3 say about the town of Place32?"


class TestStandardSuite(RetrieversIntegrationTests):
    """LangChain's own tests of a retriever."""

    @pytest.fixture(autouse=True)
    def _engine(self, engine: BlendEngine) -> None:
        self.engine = engine

    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return BlendRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"engine": self.engine}

    @property
    def retriever_query_example(self) -> str:
        return QUESTION


def test_a_document_is_the_chunk_and_says_where_it_is_from(engine: BlendEngine) -> None:
    documents = BlendRetriever(engine=engine).invoke(QUESTION)
    chunks = engine.retrieve(QUESTION)
    assert [d.page_content for d in documents] == [c.text for c in chunks]
    first = documents[0].metadata
    source = first["source"]
    text = Path(source).read_text()
    assert text[first["start"] : first["end"]].strip() == documents[0].page_content.strip()
    assert set(first) == {"source", "title", "start", "end", "chunk_id", "distance"}
    assert 0 <= first["distance"] <= 2


async def test_async_retrieval_equals_sync(engine: BlendEngine) -> None:
    retriever = BlendRetriever(engine=engine, top_k=3)
    assert await retriever.ainvoke(QUESTION) == retriever.invoke(QUESTION)
    assert len(await retriever.ainvoke(QUESTION, k=2)) == 2


def test_wrong_arguments_are_refused(engine: BlendEngine, tmp_path: Any) -> None:
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        BlendRetriever(engine=engine, k=0)
    with pytest.raises(ValidationError, match="Extra inputs"):
        BlendRetriever(engine=engine, search_kwargs={"k": 3})
    with pytest.raises(InvalidInputError, match="the question is empty"):
        BlendRetriever(engine=engine).invoke("  ")


async def test_an_empty_corpus_is_said_to_be_empty(tmp_path: Path) -> None:
    with tiny.engine(tiny.llama(), tmp_path / "store") as engine:
        retriever = BlendRetriever(engine=engine)
        with pytest.raises(BlendragError, match="ingest first"):
            retriever.invoke("Where?")
        with pytest.raises(BlendragError, match="ingest first"):
            await retriever.ainvoke("Where?")
