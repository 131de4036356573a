"""Removes writers that neither stored KV nor the corpus needs any more."""

from __future__ import annotations

from pathlib import Path

from blendrag.corpus.corpus import Corpus
from blendrag.corpus.database import DIRECTORY, FILE_NAME
from blendrag.store import maintenance, writer_files


def remove_unused_writers(root: Path) -> tuple[str, ...]:
    """Fingerprints of the writers that were removed from the store at ``root``.

    Safe beside ingests: the corpus is locked while its writer is read, and whoever names another one keeps it
    afterwards, too. Raises :class:`CorpusError` and :class:`StoreUnavailableError`; then writers stay.
    """
    if not writer_files.kept_in(root):
        return ()
    found = maintenance.survey(root)
    if not (root / DIRECTORY / FILE_NAME).exists():
        return _removed(root, found.unused_writers(""))
    with Corpus.open(root) as corpus, corpus.file.writing():
        manifest = corpus.manifest_or_none
        return _removed(root, found.unused_writers(manifest.writer if manifest else ""))


def _removed(root: Path, unused: list[str]) -> tuple[str, ...]:
    for each in unused:
        writer_files.remove(root, each)
    return tuple(unused)
