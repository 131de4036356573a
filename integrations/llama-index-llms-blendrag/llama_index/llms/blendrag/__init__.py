"""LlamaIndex over blendrag: swap the LLM and the retriever, keep the query engine.

Importing this loads neither torch nor transformers; making a wrapper does.
"""

from blendrag.plugs.shared import close_shared_engines, shared_engine
from llama_index.llms.blendrag.base import BlendLLM
from llama_index.llms.blendrag.retrievers import BlendRetriever

__all__ = ["BlendLLM", "BlendRetriever", "close_shared_engines", "shared_engine"]
