"""Retrievers find stored chunks, and stock chains load the KV of those they quote."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough
from langchain_tests.integration_tests import RetrieversIntegrationTests
from pydantic import ValidationError

from blendrag.engine import BlendEngine
from blendrag.errors import InvalidInputError
from langchain_blendrag import BlendRetriever
from langchain_blendrag.retrievers import to_document
from paragraphs import assert_reused

QUESTION = "What does document 3 say about the company of Place2114?"
TEXT = PromptTemplate.from_template("Answer from this.\n\n{context}\n\nQuestion: {input}")
CHAT = ChatPromptTemplate.from_messages(
    [("system", "Answer from this.\n\n{context}"), ("human", "{input}")]
)


@pytest.fixture
def retriever(engine: BlendEngine) -> BlendRetriever:
    return BlendRetriever(engine=engine, k=4)


class TestStandardSuite(RetrieversIntegrationTests):
    """LangChain's own tests of a retriever."""

    retriever_constructor: type[BaseRetriever] = BlendRetriever
    retriever_query_example: str = QUESTION
    retriever_constructor_params: Any = None

    @pytest.fixture(autouse=True)
    def _engine(self, engine: BlendEngine) -> None:
        self.retriever_constructor_params = {"engine": engine}


async def test_a_document_is_the_chunk_and_says_where_it_is_from(engine: BlendEngine) -> None:
    retriever = BlendRetriever(engine=engine, top_k=3)
    documents = retriever.invoke(QUESTION)
    assert [d.page_content for d in documents] == [c.text for c in engine.retrieve(QUESTION, 3)]
    assert await retriever.ainvoke(QUESTION) == documents
    assert len(await retriever.ainvoke(QUESTION, k=2)) == 2
    first = documents[0].metadata
    text = Path(first["source"]).read_text()
    assert text[first["start"] : first["end"]].strip() == documents[0].page_content.strip()
    place = {"source", "title", "start", "end", "chunk_id", "rank", "score", "distance"}
    assert set(first) == place | {"file_date"}
    assert 0 <= first["distance"] <= 2
    scores = {each.metadata["rank"]: each.metadata["score"] for each in documents}
    assert scores == {each.rank: each.score for each in engine.retrieve(QUESTION, 3)}
    assert scores[1] == max(scores.values())
    paged = replace(engine.retrieve(QUESTION, 1)[0], page=7, last_page=8)
    assert to_document(paged).metadata["page_label"] == "7–8"


def test_the_search_can_be_chosen(engine: BlendEngine) -> None:
    for search in ("hybrid", "dense", "lexical"):
        documents = BlendRetriever(engine=engine, search=search, k=2).invoke(QUESTION)
        expected = engine.retrieve(QUESTION, 2, search=search)
        assert [each.id for each in documents] == [each.chunk_id for each in expected]
    assert documents[0].metadata["distance"] is None


def test_an_impossible_search_is_refused(engine: BlendEngine) -> None:
    with pytest.raises(ValidationError, match="search 'fuzzy' must be one of hybrid, dense"):
        BlendRetriever(engine=engine, search="fuzzy")
    with pytest.raises(ValidationError, match="top_k 0 must be a whole number of at least 1"):
        BlendRetriever(engine=engine, k=0)
    with pytest.raises(
        ValidationError, match=r"search_kwargs: not a field of BlendRetriever; .*, top_k, "
    ):
        BlendRetriever(engine=engine, search_kwargs={"k": 3})
    with pytest.raises(InvalidInputError, match="the question is empty"):
        BlendRetriever(engine=engine).invoke("  ")


def chunks_of(documents: list[Document]) -> dict[str, str]:
    return {document.metadata["chunk_id"]: document.page_content for document in documents}


@pytest.mark.parametrize("prompt", [TEXT, CHAT], ids=["text", "chat"])
def test_a_retrieval_chain_with_a_stuff_chain_reuses_every_chunk(
    either: Any, retriever: BlendRetriever, engine: BlendEngine, seen: Any, prompt: Any
) -> None:
    around = PromptTemplate.from_template("[{title}] {page_content} (from {source})")
    stuff = create_stuff_documents_chain(either, prompt, document_prompt=around)
    chain = create_retrieval_chain(retriever, stuff)
    out = chain.invoke({"input": QUESTION}, config={"callbacks": [seen]})
    assert len(out["context"]) == 4
    assert_reused(seen.metrics, chunks_of(out["context"]), engine)
    streamed = list(chain.stream({"input": QUESTION}))
    assert "".join(part["answer"] for part in streamed if "answer" in part) == out["answer"]


@pytest.mark.parametrize("prompt", [TEXT, CHAT], ids=["text", "chat"])
async def test_an_lcel_chain_reuses_every_chunk_sync_and_async(
    either: Any, retriever: BlendRetriever, engine: BlendEngine, seen: Any, prompt: Any
) -> None:
    def format_docs(documents: list[Document]) -> str:
        return "\n\n".join(d.page_content for d in documents)

    sources = {"context": retriever | format_docs, "input": RunnablePassthrough()}
    chain = sources | prompt | either | StrOutputParser()
    config = {"callbacks": [seen]}
    answers = [
        chain.invoke(QUESTION, config),
        "".join(chain.stream(QUESTION, config)),
        await chain.ainvoke(QUESTION, config),
        "".join([piece async for piece in chain.astream(QUESTION, config)]),
    ]
    assert len(set(answers)) == 1
    assert len(seen.metrics) == 4
    for metrics in seen.metrics:
        assert_reused([metrics], chunks_of(retriever.invoke(QUESTION)), engine)
