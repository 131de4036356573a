"""Pipelines and indexes keep nodes, vectors and KV consistent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.schema import Document, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from places import document, text_about

from blendrag.engine import BlendEngine
from llama_index.llms.blendrag import (
    BlendEmbedding,
    BlendNodeParser,
    BlendPrecompute,
    BlendVectorStore,
)


@pytest.fixture
def engine(empty: BlendEngine) -> BlendEngine:
    return empty


def pipeline(engine: BlendEngine, strategy: DocstoreStrategy) -> IngestionPipeline:
    parts = [BlendNodeParser(engine=engine, count_metadata=False), BlendEmbedding(engine=engine)]
    return IngestionPipeline(
        transformations=parts,
        docstore=SimpleDocumentStore(),
        docstore_strategy=strategy,
        vector_store=BlendVectorStore(engine=engine),
    )


def entries_of(engine: BlendEngine, place: str) -> list[str]:
    return [entry.id for entry in engine.library.entries(parent=place)]


def keys(engine: BlendEngine) -> int:
    """Stored chunks, including the one of the engine's self-check."""
    return engine.stats().entries


SHORT = "Now the company of Bay builds no ships at all any more, anywhere."


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
    await run(document("Bay", SHORT))
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


def test_an_index_is_made_from_documents_and_adds_refreshes_and_deletes_kv(
    engine: BlendEngine,
) -> None:
    index = VectorStoreIndex.from_documents(
        [document("Bay")],
        storage_context=StorageContext.from_defaults(vector_store=BlendVectorStore(engine=engine)),
        embed_model=BlendEmbedding(engine=engine),
        transformations=[BlendNodeParser(engine=engine, count_metadata=False)],
    )
    index.insert(document("Cape"))
    nodes = index.as_retriever(similarity_top_k=2).retrieve("What did Cape build?")
    assert {found.node.ref_doc_id for found in nodes} == {"Cape"}
    assert all(-1 <= (found.score or 0) <= 1.0001 for found in nodes)
    held, gone = keys(engine), len(entries_of(engine, "Bay"))
    assert index.refresh_ref_docs([document("Bay", SHORT), document("Cape")]) == [True, False]
    assert keys(engine) == held - gone + 1
    index.delete_ref_doc("Bay")
    assert entries_of(engine, "Bay") == []
    assert keys(engine) == held - gone


def test_precompute_returns_nodes_unchanged_and_stores_their_kv(engine: BlendEngine) -> None:
    nodes = [TextNode(text=text_about(place)) for place in ("Bay", "Cape")]
    before = [node.model_copy(deep=True) for node in nodes]
    assert list(BlendPrecompute(engine=engine)(nodes)) == nodes == before
    assert all(engine.library.has_kv([node.node_id for node in nodes]).values())
    assert engine.library.search("ships", 3) == []  # someone else's vector store finds them


async def test_precompute_drops_the_earlier_version_of_a_document(engine: BlendEngine) -> None:
    step, parser = BlendPrecompute(engine=engine), BlendNodeParser(engine=engine)
    step(parser([document("Bay"), document("Cape")]))
    held, old, cape = keys(engine), entries_of(engine, "Bay"), len(entries_of(engine, "Cape"))
    await step.acall(parser([document("Bay", SHORT)]))
    assert keys(engine) == held - len(old) + 1
    assert len(step.delete_ref_doc("Bay")) == 1
    assert entries_of(engine, "Bay") == []
    keeps = BlendPrecompute(engine=engine, whole_documents=False)
    keeps(parser([document("Cape", "Another part of the document about the town of Cape.")]))
    assert len(entries_of(engine, "Cape")) == cape + 1


def test_a_pipelines_cache_does_not_hide_missing_kv(engine: BlendEngine) -> None:
    nodes = [TextNode(id_="Bay", text=text_about("Bay"))]
    made = IngestionPipeline(transformations=[BlendPrecompute(engine=engine)])
    made.run(nodes=nodes)
    engine.library.delete(["Bay"])
    made.run(nodes=nodes)
    assert engine.library.has_kv(["Bay"]) == {"Bay": True}
