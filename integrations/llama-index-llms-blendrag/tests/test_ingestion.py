"""Pipelines and indexes keep nodes, vectors and KV consistent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.schema import Document, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from places import document, entries_of, keys, text_about

import scripted
from blendrag.engine import BlendEngine
from llama_index.llms.blendrag import (
    BlendEmbedding,
    BlendNodeParser,
    BlendPrecompute,
    BlendVectorStore,
)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[BlendEngine]:
    with scripted.engine((), tmp_path / "kv", chunk_tokens=64) as engine:
        yield engine


@pytest.fixture
def store(engine: BlendEngine) -> BlendVectorStore:
    return BlendVectorStore(engine=engine)


@pytest.fixture
def index(engine: BlendEngine, store: BlendVectorStore) -> VectorStoreIndex:
    return VectorStoreIndex.from_vector_store(
        store,
        embed_model=BlendEmbedding(engine=engine),
        transformations=[BlendNodeParser(engine=engine, count_metadata=False)],
    )


def pipeline(engine: BlendEngine, strategy: DocstoreStrategy, **more: Any) -> IngestionPipeline:
    parts = [BlendNodeParser(engine=engine, count_metadata=False), BlendEmbedding(engine=engine)]
    given = {"vector_store": BlendVectorStore(engine=engine), **more}
    return IngestionPipeline(
        transformations=parts,
        docstore=SimpleDocumentStore(),
        docstore_strategy=strategy,
        **given,
    )


# -- pipelines ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
async def test_upserts_change_kv_and_keep_missing_documents(
    engine: BlendEngine, is_async: bool
) -> None:
    made = pipeline(engine, DocstoreStrategy.UPSERTS)

    async def run(*documents: Document) -> Sequence[Any]:
        given = list(documents)
        return await made.arun(documents=given) if is_async else made.run(documents=given)

    await run(document("Bay"), document("Cape"))
    before, kept = entries_of(engine, "Bay"), entries_of(engine, "Cape")
    assert all(engine.library.has_kv([*before, *kept]).values())
    held = keys(engine)
    assert await run(document("Bay"), document("Cape")) == []  # unchanged: nothing is run
    await run(document("Bay", "Now the company of Bay builds no ships at all any more, anywhere."))
    assert entries_of(engine, "Cape") == kept
    after = entries_of(engine, "Bay")
    assert len(after) == 1
    assert not set(after) & set(before)
    assert engine.library.has_kv(after) == {after[0]: True}
    assert keys(engine) == held - len(before) + 1  # the KV of the old text is gone


def test_upserts_and_delete_removes_the_kv_of_missing_documents(engine: BlendEngine) -> None:
    made = pipeline(engine, DocstoreStrategy.UPSERTS_AND_DELETE)
    made.run(documents=[document("Bay"), document("Cape")])
    held, gone = keys(engine), len(entries_of(engine, "Cape"))
    made.run(documents=[document("Bay")])
    assert entries_of(engine, "Cape") == []
    assert keys(engine) == held - gone
    assert engine.library.search("ships of Cape", 3)[0].entry.parent == "Bay"


# -- indexes ------------------------------------------------------------------------------------


def test_an_index_adds_refreshes_and_deletes_kv(
    engine: BlendEngine, index: VectorStoreIndex
) -> None:
    index.insert(document("Bay"))
    index.insert(document("Cape"))
    held, gone = keys(engine), len(entries_of(engine, "Bay"))
    changed = document("Bay", "Now the company of Bay builds no ships at all any more, anywhere.")
    assert index.refresh_ref_docs([changed, document("Cape")]) == [True, False]
    assert keys(engine) == held - gone + 1
    index.delete_ref_doc("Bay")
    assert entries_of(engine, "Bay") == []
    assert keys(engine) == held - gone


def test_an_index_is_made_from_documents(engine: BlendEngine, store: BlendVectorStore) -> None:
    made = VectorStoreIndex.from_documents(
        [document("Bay"), document("Cape")],
        storage_context=StorageContext.from_defaults(vector_store=store),
        embed_model=BlendEmbedding(engine=engine),
        transformations=[BlendNodeParser(engine=engine)],
    )
    nodes = made.as_retriever(similarity_top_k=2).retrieve("What did Cape build?")
    assert {found.node.ref_doc_id for found in nodes} == {"Cape"}
    assert all(-1 <= (found.score or 0) <= 1.0001 for found in nodes)


# -- precomputing for other vector stores -------------------------------------------------------


def test_precompute_returns_nodes_unchanged_and_stores_their_kv(engine: BlendEngine) -> None:
    nodes = [TextNode(text=text_about(place)) for place in ("Bay", "Cape")]
    before = [node.model_copy(deep=True) for node in nodes]
    assert list(BlendPrecompute(engine=engine)(nodes)) == nodes == before
    assert all(engine.library.has_kv([node.node_id for node in nodes]).values())
    assert engine.library.search("ships", 3) == []  # someone else's vector store finds them


async def test_precompute_drops_the_earlier_version_of_a_document(engine: BlendEngine) -> None:
    step = BlendPrecompute(engine=engine)
    parser = BlendNodeParser(engine=engine)
    step(parser([document("Bay"), document("Cape")]))
    held, old = keys(engine), entries_of(engine, "Bay")
    changed = document("Bay", "The company of Bay builds no ships at all any more, anywhere.")
    await step.acall(parser([changed]))
    assert keys(engine) == held - len(old) + 1
    assert len(step.delete_ref_doc("Bay")) == 1
    assert entries_of(engine, "Bay") == []
    keeps = BlendPrecompute(engine=engine, whole_documents=False)
    keeps(parser([document("Cape", "Another part of the document about the town of Cape.")]))
    assert len(entries_of(engine, "Cape")) > 2


def test_a_pipelines_cache_does_not_hide_missing_kv(engine: BlendEngine) -> None:
    step = BlendPrecompute(engine=engine)
    nodes = [TextNode(id_="Bay", text=text_about("Bay"))]
    made = IngestionPipeline(transformations=[step])
    made.run(nodes=nodes)
    engine.library.delete(["Bay"])
    made.run(nodes=nodes)
    assert engine.library.has_kv(["Bay"]) == {"Bay": True}
