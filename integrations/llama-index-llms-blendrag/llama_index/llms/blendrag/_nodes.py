"""LlamaIndex nodes ↔ entries of blendrag's corpus."""

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
from llama_index.core.vector_stores.utils import metadata_dict_to_node, node_to_metadata_dict

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
    node_ids: Sequence[str] | None = None, doc_ids: Sequence[str] | None = None
) -> Callable[[Entry], bool] | None:
    """Whether an entry is one of these, as a function; ``None`` if all are."""
    if node_ids is None and doc_ids is None:
        return None

    def accept(entry: Entry) -> bool:
        return (node_ids is None or entry.id in node_ids) and (
            doc_ids is None or entry.parent in doc_ids
        )

    return accept
