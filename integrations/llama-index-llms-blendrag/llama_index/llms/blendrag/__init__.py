"""LlamaIndex over blendrag: swap the LLM and the retriever, keep the query engine.

Importing this loads neither torch nor transformers; making a wrapper does.
"""

from blendrag.frameworks.shared import close_shared_engines, shared_engine
from llama_index.llms.blendrag.base import BlendLLM
from llama_index.llms.blendrag.embeddings import BlendEmbedding
from llama_index.llms.blendrag.events import BlendReuseEvent
from llama_index.llms.blendrag.ingestion import BlendPrecompute
from llama_index.llms.blendrag.node_parser import BlendNodeParser
from llama_index.llms.blendrag.retrievers import BlendRetriever
from llama_index.llms.blendrag.synthesizer import BlendPromptHelper, BlendSynthesizer
from llama_index.llms.blendrag.vector_store import BlendVectorStore

__all__ = [
    "BlendEmbedding",
    "BlendLLM",
    "BlendNodeParser",
    "BlendPrecompute",
    "BlendPromptHelper",
    "BlendRetriever",
    "BlendReuseEvent",
    "BlendSynthesizer",
    "BlendVectorStore",
    "close_shared_engines",
    "shared_engine",
]
