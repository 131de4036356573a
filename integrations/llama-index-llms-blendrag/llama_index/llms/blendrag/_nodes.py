"""LlamaIndex nodes ↔ entries of blendrag's corpus, and metadata filters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.schema import (
    BaseNode,
    MetadataMode,
    NodeRelationship,
    RelatedNodeInfo,
    TextNode,
)
from llama_index.core.vector_stores.types import FilterCondition, MetadataFilters
from llama_index.core.vector_stores.utils import (
    build_metadata_filter_fn,
    metadata_dict_to_node,
    node_to_metadata_dict,
)

if TYPE_CHECKING:
    from blendrag.engine.library import Entry

#: Metadata key of what LlamaIndex needs to create a node again.
CONTENT = "_node_content"


def to_entry(node: BaseNode) -> Entry:
    """The node's text by its id, with its document as the parent. Does not modify ``node``."""
    from blendrag.engine.library import Entry

    return Entry(
        id=node.node_id,
        text=node.get_content(metadata_mode=MetadataMode.NONE),
        metadata=node_to_metadata_dict(node, remove_text=True),
        parent=node.ref_doc_id or "",
        # as LlamaIndex's own embedding models see it: metadata, then text
        title=node.get_metadata_str(mode=MetadataMode.EMBED).strip(),
        start=getattr(node, "start_char_idx", None) or 0,
    )


def to_node(
    text: str, metadata: Mapping[str, Any], *, id_: str, source: str, start: int, end: int | None
) -> BaseNode:
    """The node an entry was made of, or a new node for a chunk of an ingested document.

    ``text`` is exactly the stored text, by which the LLM recognises the chunk. Metadata of ingested
    documents is neither embedded nor written into prompts.
    """
    if CONTENT in metadata:
        return metadata_dict_to_node(dict(metadata), text=text)
    return TextNode(
        id_=id_,
        text=text,
        metadata=dict(metadata),
        start_char_idx=start,
        end_char_idx=end,
        relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=source)},
        excluded_llm_metadata_keys=list(metadata),
        excluded_embed_metadata_keys=list(metadata),
    )


def accepts(
    filters: MetadataFilters | None,
    node_ids: Sequence[str] | None = None,
    doc_ids: Sequence[str] | None = None,
) -> Callable[[Entry], bool] | None:
    """Whether an entry passes, as a function; ``None`` if all do."""
    if filters is None and node_ids is None and doc_ids is None:
        return None

    def accept(entry: Entry) -> bool:
        return (
            (node_ids is None or entry.id in node_ids)
            and (doc_ids is None or entry.parent in doc_ids)
            and (filters is None or _match(filters, entry.metadata))
        )

    return accept


def _match(filters: MetadataFilters, metadata: Mapping[str, Any]) -> bool:
    """LlamaIndex's matching, which does not support nesting, applied to nested filters."""
    condition = filters.condition or FilterCondition.AND
    results = [
        _match(one, metadata)
        if isinstance(one, MetadataFilters)
        else build_metadata_filter_fn(lambda _: metadata, MetadataFilters(filters=[one]))("")
        for one in filters.filters
    ]
    if condition == FilterCondition.NOT:
        return not any(results)
    return any(results) if condition == FilterCondition.OR else all(results)
