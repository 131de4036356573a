"""``BlendPrecompute``: last step of an ingestion pipeline with another vector store."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from llama_index.core.schema import BaseNode, TransformComponent

from blendrag.frameworks.fields import CONFIG, EngineFields
from blendrag.frameworks.streaming import to_thread
from llama_index.llms.blendrag._nodes import to_entry


class BlendPrecompute(EngineFields, TransformComponent):
    """Computes the KV of nodes and passes them on unchanged.

    For pipelines whose vectors go into another vector store; a :class:`BlendVectorStore` does not need
    it. Put it last, because it must see the texts that prompts will quote. The nodes are not found by
    blendrag's own search.

    This step is never answered from a pipeline's cache, so KV that was evicted or removed is computed
    again. Pipelines with ``num_workers`` pickle their transformations: use ``model=`` and ``store=`` then.
    Every worker loads the model.

    Example:
        ```python
        pipeline = IngestionPipeline(
            transformations=[BlendNodeParser(**names), embed_model, BlendPrecompute(**names)],
            vector_store=qdrant,
        )
        ```
    """

    model_config = CONFIG

    whole_documents: bool = True
    """Each call has all nodes of its documents: nodes of earlier versions are removed with their KV. Set
    ``False`` if the nodes of a document come in several calls."""

    @classmethod
    def class_name(cls) -> str:
        return "BlendPrecompute"

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Like LlamaIndex, but different each time: a pipeline's cache uses this as its key."""
        return super().to_dict(**kwargs) | {"run": uuid.uuid4().hex}

    @classmethod
    def from_dict(cls, data: dict[str, Any], **kwargs: Any) -> BlendPrecompute:
        return super().from_dict({k: v for k, v in data.items() if k != "run"}, **kwargs)

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """``nodes``, with their KV stored; the same objects."""
        library = self.engine.library
        entries = [to_entry(node) for node in nodes]
        library.add(entries, embed=False)
        if self.whole_documents:
            kept = {entry.id for entry in entries}
            parents = dict.fromkeys(entry.parent for entry in entries if entry.parent)
            earlier = [e.id for parent in parents for e in library.entries(parent=parent)]
            library.delete([entry_id for entry_id in earlier if entry_id not in kept])
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        return await to_thread(self.__call__, nodes, **kwargs)

    def delete_ref_doc(self, ref_doc_id: str) -> list[str]:
        """Remove a document that the other vector store removed; returns the ids of its nodes."""
        return self.engine.library.delete_parents([ref_doc_id])
