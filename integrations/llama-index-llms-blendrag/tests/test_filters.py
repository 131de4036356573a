"""LlamaIndex's metadata filters choose what is found, as LlamaIndex's own matching would."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores.types import (
    ExactMatchFilter,
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
)
from llama_index.core.vector_stores.utils import build_metadata_filter_fn
from places import text_about

import tiny
from blendrag.engine import BlendEngine
from blendrag.errors import InvalidInputError
from llama_index.llms.blendrag import BlendEmbedding, BlendRetriever, BlendVectorStore

METADATA: dict[str, dict[str, Any]] = {
    "Bay": {"year": 1, "author": "Kim", "tags": ["sea", "old"], "note": ""},
    "Cape": {"year": 2, "author": "Lee", "tags": ["sea"], "note": "About Kim"},
    "Dale": {"year": 3, "author": "kim lee", "tags": [], "ratio": 0.5},
    "Elm": {"ratio": 2.5},
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    """An engine over these nodes and an ingested file, which has none of these fields."""
    root = tmp_path_factory.mktemp("filters")
    (root / "ingested.txt").write_text(tiny.document(1, paragraphs=2).text)
    with tiny.engine(tiny.llama(num_hidden_layers=2), root / "store", chunk_tokens=64) as made:
        made.ingest([root / "ingested.txt"])
        nodes = [TextNode(id_=n, text=text_about(n), metadata=m) for n, m in METADATA.items()]
        BlendVectorStore(engine=made).add(nodes)
        yield made


@pytest.fixture
def store(engine: BlendEngine) -> BlendVectorStore:
    return BlendVectorStore(engine=engine)


def found(store: BlendVectorStore, filters: MetadataFilters) -> list[str]:
    asked = VectorStoreQuery(query_str="ships", similarity_top_k=20, filters=filters)
    return sorted(name for name in store.query(asked).ids or () if name in METADATA)


OPERATORS: list[tuple[str, Any, FilterOperator]] = [
    ("author", "Kim", FilterOperator.EQ),
    ("year", 2, FilterOperator.EQ),
    ("author", "Kim", FilterOperator.NE),
    ("year", 1, FilterOperator.GT),
    ("year", 2, FilterOperator.GTE),
    ("ratio", 1, FilterOperator.LT),
    ("author", "Lee", FilterOperator.LTE),
    ("author", ["Kim", "Lee"], FilterOperator.IN),
    ("year", [1, 3], FilterOperator.NIN),
    ("tags", ["old", "new"], FilterOperator.ANY),
    ("tags", ["old", "sea"], FilterOperator.ALL),
    ("tags", "sea", FilterOperator.CONTAINS),
    ("author", "Kim", FilterOperator.TEXT_MATCH),
    ("author", "KIM", FilterOperator.TEXT_MATCH_INSENSITIVE),
    ("note", None, FilterOperator.IS_EMPTY),
]


def without_a_field(operator: FilterOperator) -> bool:
    """Whether this LlamaIndex finds nodes that lack the field, as it did not in 0.14.19."""
    lacking = MetadataFilters(filters=[MetadataFilter(key="a", value=["b"], operator=operator)])
    return bool(build_metadata_filter_fn(lambda _: {}, lacking)("node"))


@pytest.mark.parametrize(("key", "value", "operator"), OPERATORS)
def test_every_operator_matches_as_in_llama_index(
    store: BlendVectorStore, key: str, value: Any, operator: FilterOperator
) -> None:
    if operator in (FilterOperator.NE, FilterOperator.NIN) and not without_a_field(operator):
        pytest.skip("this LlamaIndex finds no node that lacks the field")
    filters = MetadataFilters(filters=[MetadataFilter(key=key, value=value, operator=operator)])
    matches = build_metadata_filter_fn(METADATA.__getitem__, filters)
    assert found(store, filters) == sorted(filter(matches, METADATA))


def test_every_operator_is_tested() -> None:
    assert {operator for *_, operator in OPERATORS} == {*FilterOperator}


def test_conditions_nest(store: BlendVectorStore) -> None:
    late = MetadataFilter(key="year", value=2, operator=FilterOperator.GTE)
    kim = ExactMatchFilter(key="author", value="Kim")
    either = MetadataFilters(filters=[kim, late], condition=FilterCondition.OR)
    neither = MetadataFilters(filters=[kim, late], condition=FilterCondition.NOT)
    sea = MetadataFilter(key="tags", value="sea", operator=FilterOperator.CONTAINS)
    assert found(store, either) == ["Bay", "Cape", "Dale"]
    assert found(store, neither) == ["Elm"]
    assert found(store, MetadataFilters(filters=[either, sea])) == ["Bay", "Cape"]
    assert found(store, MetadataFilters(filters=[])) == sorted(METADATA)


def test_an_index_and_a_retriever_search_what_passes(
    store: BlendVectorStore, engine: BlendEngine
) -> None:
    sea = MetadataFilter(key="tags", value="sea", operator=FilterOperator.CONTAINS)
    filters = MetadataFilters(filters=[sea])
    index = VectorStoreIndex.from_vector_store(store, BlendEmbedding(engine=engine))
    by_index = index.as_retriever(similarity_top_k=2, filters=filters).retrieve("Dale")
    by_corpus = BlendRetriever(engine=engine, similarity_top_k=2, filters=filters).retrieve("Dale")
    for nodes in (by_index, by_corpus):
        assert {"sea" in node.metadata["tags"] for node in nodes} == {True}
        assert len(nodes) == 2, "all that pass are found, however far"
    assert [n.node_id for n in store.get_nodes(["Dale", "Cape", "Bay"], filters)] == ["Cape", "Bay"]
    assert {n.node_id for n in store.get_nodes(filters=filters)} == {"Bay", "Cape"}


@pytest.mark.parametrize(
    ("one", "says"),
    [
        (
            MetadataFilter(key="yaer", value=1),
            "^filters names the field 'yaer', which no document has",
        ),
        (MetadataFilter(key="year", value="1"), "'year' with '1', but it holds numbers"),
        (MetadataFilter(key="year", value=None), "is_empty finds documents without"),
        (MetadataFilter(key="year", value=[1]), "expected a text or a number"),
        (MetadataFilter(key="year", value=1, operator=FilterOperator.IN), "a list of values"),
        (MetadataFilter(key="tags", value="a", operator=FilterOperator.ANY), "a list of values"),
    ],
)
def test_a_filter_that_cannot_match_is_one_clear_sentence(
    store: BlendVectorStore, one: MetadataFilter, says: str
) -> None:
    with pytest.raises(InvalidInputError, match=says) as raised:
        found(store, MetadataFilters(filters=[one]))
    assert tiny.one_sentence(str(raised.value))


def test_another_kind_of_filter_is_refused(engine: BlendEngine) -> None:
    with pytest.raises(InvalidInputError, match="is a dict, expected LlamaIndex's MetadataFilters"):
        BlendRetriever(engine=engine, filters={"year": 1})  # type: ignore[arg-type]
