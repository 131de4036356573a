"""A cross-encoder that reads question and chunk together and sorts what search found.

Slower than a search and more exact. The user names the model; a store cannot.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from blendrag.config import of_variable
from blendrag.corpus.embedder import no_progress_bars
from blendrag.corpus.embedder_files import ModelFiles
from blendrag.corpus.embedding_turns import Check, proceed
from blendrag.errors import BlendragError, InvalidInputError, ModelLoadError, is_out_of_memory

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder

#: Pairs that are scored together; between two batches a request can be given up.
BATCH_PAIRS = 8


class Reranker:
    """A sentence-transformers cross-encoder by hub id or directory; loaded on first use. Thread-safe."""

    def __init__(self, name: str, trust_remote_code: bool = False) -> None:
        self.name = name
        self._trust_remote_code = trust_remote_code
        self._model: CrossEncoder | None = None
        self._lock = threading.Lock()

    def open(self) -> None:
        """Load the model. Raises as :meth:`scores`."""
        with self._lock:
            self._loaded()

    def scores(self, question: str, texts: Sequence[str], check: Check = proceed) -> np.ndarray:
        """How well each text answers the question, larger is better.  float32 [n]

        Raises :class:`ModelLoadError` if the model cannot be loaded, and :class:`InvalidInputError` if it is
        no reranker.
        """
        found: list[np.ndarray] = []
        for at in range(0, len(texts), BATCH_PAIRS):
            pairs = [(question, text) for text in texts[at : at + BATCH_PAIRS]]
            with self._lock:
                scores = self._loaded().predict(pairs, show_progress_bar=False)
            found.append(np.asarray(scores, np.float32))
            check()
        return np.concatenate(found) if found else np.zeros(0, np.float32)

    @property
    def _shown(self) -> str:
        return f"{self.name!r}{of_variable('reranker', self.name)}"

    def _loaded(self) -> CrossEncoder:
        if self._model is None:
            try:
                try:
                    self._model = self._open(local_files_only=True)
                except BlendragError:
                    raise
                except Exception:  # not in the hub's cache
                    self._model = self._open(local_files_only=False)
            except BlendragError:
                raise
            except Exception as exc:
                if is_out_of_memory(exc):
                    raise
                raise ModelLoadError(
                    f"reranker {self._shown} cannot be loaded ({type(exc).__name__}); check the name, or "
                    "name a local directory of a sentence-transformers cross-encoder"
                ) from exc
        return self._model

    def _open(self, local_files_only: bool) -> CrossEncoder:
        from transformers import AutoConfig

        options: dict[str, Any] = {"local_files_only": local_files_only}
        files = ModelFiles(self.name, local_files_only, recorded=False)
        if self._trust_remote_code:
            options["trust_remote_code"] = True
        else:
            files.check()
        config = AutoConfig.from_pretrained(self.name, **options)
        made_for = (getattr(config, "architectures", None) or ["no class"])[0]
        # any encoder could be loaded, with a head of random weights
        if not made_for.endswith("ForSequenceClassification") or config.num_labels != 1:
            raise InvalidInputError(
                f"reranker {self._shown} is a {made_for} with {config.num_labels} outputs, expected a "
                "cross-encoder (…ForSequenceClassification with one); name another, or none"
            )
        from sentence_transformers import CrossEncoder  # takes seconds, so once the model is there

        if not self._trust_remote_code:
            options["model_kwargs"] = {"weights_only": True}
        with no_progress_bars():
            return CrossEncoder(self.name, **options)
