"""The documents of a KV store: texts, chunks and vectors in SQLite and FAISS, and retrieval from them.

Knows neither models nor KV. sentence-transformers and faiss are imported on first use.
"""
