"""``BlendVectorStore``: nodes are returned unchanged, searched, filtered and removed."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.schema import ImageNode, MediaResource, Node, TextNode
from llama_index.core.vector_stores.types import (
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
)
from places import document, text_about

from blendrag.engine import BlendEngine
from blendrag.errors import CorpusError, InvalidInputError
from llama_index.llms.blendrag import (
    BlendEmbedding,
    BlendNodeParser,
    BlendPrecompute,
    BlendRetriever,
    BlendVectorStore,
)
from paragraphs import assert_end_with


@pytest.fixture
def engine(empty: BlendEngine) -> BlendEngine:
    return empty


@pytest.fixture
def store(engine: BlendEngine) -> BlendVectorStore:
    return BlendVectorStore(engine=engine)


@pytest.fixture
def filled(store: BlendVectorStore) -> BlendVectorStore:
    for place, year in (("Bay", 1), ("Cape", 2), ("Dale", 3)):
        store.add([TextNode(id_=place, text=text_about(place), metadata={"year": year})])
    return store


def ids(store: BlendVectorStore, **query: Any) -> list[str]:
    asked = {"query_str": "ships", "similarity_top_k": 9, **query}
    return sorted(store.query(VectorStoreQuery(**asked)).ids or [])


def test_a_node_is_returned_unchanged(store: BlendVectorStore, engine: BlendEngine) -> None:
    parser = BlendNodeParser(engine=engine, count_metadata=False)
    nodes = parser.get_nodes_from_documents([document("Bay", year=1, tags=["a", "b"])])
    store.add(nodes)
    (hit,) = BlendRetriever(engine=engine, similarity_top_k=1).retrieve(nodes[0].text)
    assert hit.node in nodes
    others = [
        ImageNode(text=text_about("Bay"), image_url="http://localhost/x.png"),
        Node(text_resource=MediaResource(text=text_about("Cape"))),
    ]
    store.add(others)
    assert store.get_nodes([node.node_id for node in [nodes[0], *others]]) == [nodes[0], *others]


def test_filters_by_metadata_nest(filled: BlendVectorStore) -> None:
    late = MetadataFilter(key="year", value=2, operator=FilterOperator.GTE)
    either = MetadataFilters(
        filters=[MetadataFilter(key="year", value=1), MetadataFilter(key="year", value=3)],
        condition="or",
    )
    assert ids(filled) == ["Bay", "Cape", "Dale"]
    assert ids(filled, filters=MetadataFilters(filters=[late])) == ["Cape", "Dale"]
    assert ids(filled, filters=either) == ["Bay", "Dale"]
    assert ids(filled, filters=MetadataFilters(filters=[late, either])) == ["Dale"]
    assert ids(filled, filters=MetadataFilters(filters=[late], condition="not")) == ["Bay"]
    assert ids(filled, node_ids=["Bay"]) == ["Bay"]


def test_nodes_are_deleted_by_id_and_filter(filled: BlendVectorStore, engine: BlendEngine) -> None:
    filled.delete_nodes(["Bay"])
    filled.delete_nodes(filters=MetadataFilters(filters=[MetadataFilter(key="year", value=2)]))
    assert ids(filled) == ["Dale"]
    with pytest.raises(InvalidInputError, match="neither node_ids nor filters"):
        filled.delete_nodes()
    with pytest.raises(InvalidInputError, match="neither node_ids nor filters"):
        filled.delete_nodes(filters=MetadataFilters(filters=[]))  # which every node passes
    assert ids(filled) == ["Dale"]
    filled.clear()
    assert ids(filled) == []
    assert filled.get_nodes() == []


async def test_async_methods_do_the_same(store: BlendVectorStore) -> None:
    await store.async_add([TextNode(id_="Bay", text=text_about("Bay"))])
    asked = VectorStoreQuery(query_str="ships", similarity_top_k=1)
    assert (await store.aquery(asked)).ids == ["Bay"]
    assert [node.node_id for node in await store.aget_nodes(["Bay", "none"])] == ["Bay"]
    await store.adelete_nodes(["Bay"])
    await store.adelete("Bay")
    await store.aclear()
    assert (await store.aquery(asked)).ids == []


def test_mmr_prefers_diverse_nodes(store: BlendVectorStore) -> None:
    same = text_about("Bay")
    store.add([TextNode(id_=str(n), text=f"{same} {n}") for n in range(3)])
    store.add([TextNode(id_="other", text="The sister of the founder wrote about a fox.")])
    mmr = {"mode": VectorStoreQueryMode.MMR, "similarity_top_k": 2, "mmr_threshold": 0.2}
    assert "other" in ids(store, query_str=same, **mmr)
    assert "other" not in ids(store, query_str=same, similarity_top_k=2)


def test_embedding_name_keeps_the_vectors_of_the_index(own: BlendEngine) -> None:
    store = BlendVectorStore(engine=own, embedding_name="mine")
    index = VectorStoreIndex.from_vector_store(store, embed_model=MockEmbedding(embed_dim=7))
    index.insert_nodes([TextNode(id_="Bay", text=text_about("Bay"))])
    assert own.library.search([1.0] * 7, 1)[0].vector.shape == (7,)
    assert index.as_retriever().retrieve("ships")[0].node_id == "Bay"
    with pytest.raises(CorpusError):
        BlendVectorStore(engine=own, embedding_name="other").add(
            [TextNode(text=text_about("Cape"), embedding=[1.0] * 7)]
        )


def test_wrong_input_is_refused(store: BlendVectorStore) -> None:
    with pytest.raises(InvalidInputError, match="surrogate"):
        store.add([TextNode(id_="Bay", text=text_about("Bay") + "\ud800")])
    assert store.get_nodes() == []
    with pytest.raises(InvalidInputError, match=r"'default', 'mmr'; for .* use BlendRetriever"):
        store.query(VectorStoreQuery(query_str="x", mode=VectorStoreQueryMode.HYBRID))
    with pytest.raises(InvalidInputError, match="has no query_str"):
        store.query(VectorStoreQuery(query_embedding=[1.0]))


def test_a_closed_engine_is_an_error_in_every_call(own: BlendEngine) -> None:
    store = BlendVectorStore(engine=own)
    assert_end_with(
        own,
        lambda: store.add([TextNode(text=text_about("Cape", 1))]),
        lambda: BlendRetriever(engine=own).retrieve("ships"),
        lambda: ids(store),
        lambda: store.delete("Bay"),
        lambda: BlendEmbedding(engine=own).get_text_embedding("ships"),
        lambda: BlendEmbedding(engine=own).get_query_embedding("ships"),
        lambda: BlendPrecompute(engine=own)([TextNode(text=text_about("Cape", 1))]),
        lambda: BlendNodeParser(engine=own).split_text("ships"),
    )


def test_nodes_of_an_index_are_added_while_the_caller_goes_on(store: BlendVectorStore) -> None:
    index = VectorStoreIndex.from_vector_store(store, embed_model=MockEmbedding(4))
    nodes = [TextNode(id_=place, text=text_about(place)) for place in ("Bay", "Cape")]
    index.insert_nodes(nodes, wait=False)
    assert store.wait()
    assert store.indexing == (2, 2)
    assert {node.node_id for node in store.get_nodes()} == {"Bay", "Cape"}
