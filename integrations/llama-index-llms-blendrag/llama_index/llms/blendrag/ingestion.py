"""``BlendPrecompute``: last step of an ingestion pipeline whose nodes live in someone else's store."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from llama_index.core.schema import BaseNode, TransformComponent

from blendrag.frameworks.fields import CONFIG, EngineFields
from blendrag.frameworks.shared import to_thread
from llama_index.llms.blendrag._nodes import to_entry


class BlendPrecompute(EngineFields, TransformComponent):
    """Computes the KV of nodes and hands them on unchanged.

    For pipelines whose vectors go into another vector store; with a :class:`BlendVectorStore` it is
    not needed. Nodes are known to blendrag by their text from then on, and found by no search of its
    own. Put it last: it must see the texts that prompts will quote.

    A pipeline's cache never answers for this step, so that KV that was evicted or removed meanwhile is
    computed again; what is stored costs a look-up. Pipelines with ``num_workers`` pickle their
    transformations: make it with ``model=`` and ``store=``. Every worker then loads the model.

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
    """A call brings all nodes of the documents in it: those of earlier versions go, KV included. Set
    ``False`` to bring a document's nodes in several calls."""

    @classmethod
    def class_name(cls) -> str:
        return "BlendPrecompute"

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """As in LlamaIndex, and different each time: this is what a pipeline's cache looks up."""
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
        """Forget a document that the other vector store forgets: the ids of its nodes."""
        return self.engine.library.delete_parents([ref_doc_id])
