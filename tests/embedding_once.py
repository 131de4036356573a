"""For tests that open many engines in one process, which would load the same embedder and embed the same
documents each time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from blendrag.corpus import embedder as embedders
from blendrag.corpus.embedder import Embedder

#: Embedders, copies of their tokenizers, and vectors that were loaded, made and computed.
KNOWN: dict[Any, Any] = {}


@contextmanager
def each_text_is_embedded_once() -> Iterator[None]:
    """For a module, not for the session: tests of other modules must load their own."""
    load, copy, embed = Embedder._open, embedders.uncapped_copy, Embedder._pooled

    def load_once(self: Embedder, name: str, local_files_only: bool = False) -> Any:
        how = (name, local_files_only, self._recorded, self._trust_remote_code)
        if how not in KNOWN:
            KNOWN[how] = load(self, name, local_files_only)
        return KNOWN[how]

    def copy_once(tokenizer: Any) -> Any:
        if ("copy", tokenizer) not in KNOWN:
            KNOWN["copy", tokenizer] = copy(tokenizer)
        return KNOWN["copy", tokenizer]

    def embed_once(self: Embedder, encode: Any, windows: list[Any], *how: Any) -> Any:
        what = (self.name, encode.__name__, str(windows))
        if what not in KNOWN:
            KNOWN[what] = embed(self, encode, windows, *how)
        return KNOWN[what]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Embedder, "_open", load_once)
        patch.setattr(embedders, "uncapped_copy", copy_once)
        patch.setattr(Embedder, "_pooled", embed_once)
        yield
