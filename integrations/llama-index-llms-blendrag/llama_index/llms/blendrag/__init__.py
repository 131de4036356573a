"""blendrag for LlamaIndex: swap the LLM and the retriever, keep the query engine.

Importing this package does not import torch or transformers; creating a wrapper does.
"""

from blendrag.frameworks.engines import close_shared_engines, shared_engine
from llama_index.llms.blendrag.base import BlendLLM
from llama_index.llms.blendrag.embeddings import BlendEmbedding
from llama_index.llms.blendrag.events import BlendReuseEvent
from llama_index.llms.blendrag.ingestion import BlendPrecompute
from llama_index.llms.blendrag.node_parser import BlendNodeParser
from llama_index.llms.blendrag.prompts import SchemaPromptTemplate
from llama_index.llms.blendrag.retrievers import BlendRetriever
from llama_index.llms.blendrag.vector_store import BlendVectorStore

__all__ = [
    "BlendEmbedding",
    "BlendLLM",
    "BlendNodeParser",
    "BlendPrecompute",
    "BlendRetriever",
    "BlendReuseEvent",
    "BlendVectorStore",
    "SchemaPromptTemplate",
    "close_shared_engines",
    "shared_engine",
]
