"""What ``blendrag store stats`` says of the corpus beside a store: its size, and whose KV it is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from blendrag.errors import BlendragError

if TYPE_CHECKING:
    from blendrag.corpus.corpus import CorpusCheck


@dataclass(frozen=True)
class CorpusFacts:
    """A corpus as it is, or what keeps it from being read."""

    documents: int = 0
    chunks: int = 0
    size_bytes: int = 0
    model: str | None = None
    namespace: str | None = None
    """Where the KV of its chunks is, as far as the last ingest wrote it down."""
    fault: str | None = None

    @staticmethod
    def of(root: Path) -> CorpusFacts | None:
        """The corpus of the store at ``root``, opened for reading only; ``None`` if there is none."""
        directory = root / "corpus"
        if not directory.is_dir():
            return None
        from blendrag.corpus.corpus import Corpus

        size_bytes = _size_bytes(directory)
        try:
            with Corpus.open(root, read_only=True) as corpus:
                manifest = corpus.manifest if corpus.has_manifest else None
                return CorpusFacts(
                    documents=len(corpus.sources()),
                    chunks=len(corpus),
                    size_bytes=size_bytes,
                    model=manifest.model if manifest else None,
                    namespace=manifest.namespace or None if manifest else None,
                )
        except BlendragError as exc:
            return CorpusFacts(size_bytes=size_bytes, fault=str(exc))


def check_beside(root: Path, repair: bool) -> CorpusCheck | None:
    """Check the corpus of the store at ``root``, and mend it; ``None`` if there is none."""
    from blendrag.corpus.database import FILE_NAME

    if not os.path.lexists(root / "corpus" / FILE_NAME):
        return None
    from blendrag.corpus.corpus import CorpusCheck, check_corpus

    try:
        return check_corpus(root, repair)
    except BlendragError as exc:
        return CorpusCheck(rows=0, damaged=1, faults=(str(exc),), repaired=False)


def _size_bytes(directory: Path) -> int:
    try:
        with os.scandir(directory) as entries:
            return sum(entry.stat(follow_symlinks=False).st_size for entry in entries)
    except OSError:
        return 0
