"""Which chunks answer a question: embeddings, nearest neighbours, and the corpus kept on disk.

Knows texts, titles, sources and vectors. Does not know models, KV or the store that lies beside it.
Heavy libraries (sentence-transformers, faiss) are imported when first used.
"""

from blendrag.retriever.corpus import Corpus
from blendrag.retriever.embedder import Embedder
from blendrag.retriever.entries import Entry
from blendrag.retriever.manifest import Manifest
from blendrag.retriever.passages import StoredChunk
from blendrag.retriever.retriever import RetrievedChunk, Retriever

__all__ = ["Corpus", "Embedder", "Entry", "Manifest", "RetrievedChunk", "Retriever", "StoredChunk"]
