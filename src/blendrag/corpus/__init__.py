"""The corpus next to a store: documents, their chunks and vectors on disk, and retrieval from them.

Knows neither models nor KV. sentence-transformers and faiss are imported on first use.
"""
