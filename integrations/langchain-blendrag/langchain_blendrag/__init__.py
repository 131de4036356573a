"""LangChain over blendrag: swap the LLM and the retriever, keep the chain.

Importing this loads neither torch nor transformers; making a wrapper does.
"""

from blendrag.plugs.shared import close_shared_engines, shared_engine
from langchain_blendrag.llms import BlendLLM
from langchain_blendrag.retrievers import BlendRetriever

__all__ = ["BlendLLM", "BlendRetriever", "close_shared_engines", "shared_engine"]
