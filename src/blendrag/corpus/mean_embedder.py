"""A BERT whose last hidden states are averaged, as all-MiniLM is, without sentence-transformers.

Importing sentence-transformers (6.2) takes more than a second of a command that answers one question: it
imports scikit-learn, pandas and its trainer. The vectors are the same, bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class MeanEmbedder:
    """What :class:`~blendrag.corpus.embedder.Embedder` uses of a ``SentenceTransformer`` that consists of
    Transformer, Pooling (mean) and Normalize and has no prompts; on a CPU."""

    def __init__(
        self, name: str, max_seq_length: int, local_files_only: bool, **options: Any
    ) -> None:
        """``options``: of ``AutoModel.from_pretrained``."""
        from transformers import AutoModel, AutoTokenizer

        self.max_seq_length = max_seq_length
        self.tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=local_files_only)
        model = AutoModel.from_pretrained(name, local_files_only=local_files_only, **options)
        self._model: Any = model.eval()

    def get_embedding_dimension(self) -> int:
        return int(self._model.config.hidden_size)

    def encode_document(self, texts: Sequence[str], **_: Any) -> np.ndarray:
        """Unit vectors of one batch.  float32 [n, dim]"""
        import torch
        from torch.nn.functional import normalize

        # rows in the order of sentence-transformers, as products may depend on it
        order = np.argsort([-len(text) for text in texts])
        with torch.inference_mode():
            batch = self.tokenizer(
                [texts[i] for i in order],
                padding=True,
                truncation="longest_first",
                max_length=self.max_seq_length,
                return_tensors="pt",
            )
            hidden = self._model(**batch).last_hidden_state  # [n, T, dim]
            mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)  # [n, T, 1]
            means = (hidden * mask).sum(dim=1) / torch.clamp(mask.sum(dim=1), min=1e-9)  # [n, dim]
            # once as a module, once by normalize_embeddings
            vectors = normalize(normalize(means, p=2, dim=-1), p=2, dim=1)
        return np.ascontiguousarray(vectors.numpy()[np.argsort(order)])

    encode_query = encode_document
