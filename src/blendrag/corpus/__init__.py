"""Which chunks answer a question: embeddings, nearest neighbours, and the corpus kept on disk.

Knows texts, titles, sources and vectors. Does not know models, KV or the store that lies beside it.
Heavy libraries (sentence-transformers, faiss) are imported when first used.
"""

from blendrag.corpus.corpus import Corpus
from blendrag.corpus.documents import Entry, StoredChunk
from blendrag.corpus.embedder import Embedder
from blendrag.corpus.manifest import Manifest
from blendrag.corpus.retriever import RetrievedChunk, Retriever

__all__ = ["Corpus", "Embedder", "Entry", "Manifest", "RetrievedChunk", "Retriever", "StoredChunk"]
