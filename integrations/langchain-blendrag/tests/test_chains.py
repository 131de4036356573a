"""Stock chains load the stored KV of the chunks they quote."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnablePassthrough

from blendrag.engine import BlendEngine
from langchain_blendrag import BlendRetriever

QUESTION = "What does document 3 say about the town of Place32?"
TEXT = PromptTemplate.from_template("Answer from this.\n\n{context}\n\nQuestion: {input}")
CHAT = ChatPromptTemplate.from_messages(
    [("system", "Answer from this.\n\n{context}"), ("human", "{input}")]
)


@pytest.fixture
def retriever(engine: BlendEngine) -> BlendRetriever:
    return BlendRetriever(engine=engine, k=4)


def chunk_tokens(engine: BlendEngine, documents: list[Document]) -> int:
    return sum(len(engine.resources.text_ids(d.page_content)) for d in documents)


def assert_reused(metrics: dict[str, Any], engine: BlendEngine, documents: list[Document]) -> None:
    """Every document was found as a chunk, and all its tokens were loaded."""
    assert {c["chunk_id"] for c in metrics["chunks"]} == {d.metadata["chunk_id"] for d in documents}
    assert {c["outcome"] for c in metrics["chunks"]} <= {"blended", "exact"}
    assert sum(c["tokens"] for c in metrics["chunks"]) == chunk_tokens(engine, documents)
    assert metrics["reused_tokens"] >= chunk_tokens(engine, documents)


@pytest.mark.parametrize("prompt", [TEXT, CHAT], ids=["text", "chat"])
def test_a_retrieval_chain_with_a_stuff_chain_reuses_every_chunk(
    either: Any, retriever: BlendRetriever, engine: BlendEngine, seen: Any, prompt: Any
) -> None:
    chain = create_retrieval_chain(retriever, create_stuff_documents_chain(either, prompt))
    out = chain.invoke({"input": QUESTION}, config={"callbacks": [seen]})
    assert len(out["context"]) == 4
    assert_reused(seen.metrics[0], engine, out["context"])
    streamed = list(chain.stream({"input": QUESTION}))
    assert "".join(part["answer"] for part in streamed if "answer" in part) == out["answer"]


def test_a_stuff_chain_with_a_document_prompt_reuses_every_chunk(
    either: Any, retriever: BlendRetriever, engine: BlendEngine, seen: Any
) -> None:
    around = PromptTemplate.from_template("[{title}] {page_content} (from {source})")
    documents = retriever.invoke(QUESTION)
    chain = create_stuff_documents_chain(either, TEXT, document_prompt=around)
    chain.invoke({"input": QUESTION, "context": documents}, config={"callbacks": [seen]})
    assert_reused(seen.metrics[0], engine, documents)


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
        assert_reused(metrics, engine, retriever.invoke(QUESTION))


def test_a_prompt_without_a_known_chunk_has_a_note(either: Any, seen: Any) -> None:
    either.invoke("Tell me something.", config={"callbacks": [seen]})
    assert seen.metrics[0]["chunks"] == ()
    assert "no known chunk was recognised" in seen.metrics[0]["notes"][0]
