"""blendrag for LangChain: swap the LLM and the retriever, keep the chain.

Importing this package does not import torch or transformers; creating a wrapper does.
"""

from blendrag.frameworks.engines import close_shared_engines, shared_engine
from langchain_blendrag.chat_models import ChatBlend
from langchain_blendrag.llms import BlendLLM
from langchain_blendrag.prompts import SchemaPromptTemplate
from langchain_blendrag.retrievers import BlendRetriever
from langchain_blendrag.text_splitters import BlendTextSplitter
from langchain_blendrag.vectorstores import BlendVectorStore

__all__ = [
    "BlendLLM",
    "BlendRetriever",
    "BlendTextSplitter",
    "BlendVectorStore",
    "ChatBlend",
    "SchemaPromptTemplate",
    "close_shared_engines",
    "shared_engine",
]
