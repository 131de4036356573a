"""KV that no text of the corpus refers to any more, and dropping it.

Owns which keys a text's KV may have. Does not know why a text is gone.
"""

from __future__ import annotations

import time

from blendrag.corpus.corpus import Corpus
from blendrag.engine.resources import Resources
from blendrag.store.identity import chunk_key

#: An addition that began so long ago and never ended will not end: its process was killed.
ABANDONED_S = 3600.0


def kv_keys(resources: Resources, corpus: Corpus, text: str) -> list[tuple[str, str]]:
    """Namespace and key of every KV that the text may have in the store. May load the model."""
    named = corpus.manifest.namespace
    namespaces = {named} if named else set()
    if resources.is_loaded or not named:
        namespaces.add(resources.kv_validity.namespace)
    prefix_ids, ids = corpus.manifest.prefix_ids, resources.text_ids(text)
    return [(namespace, chunk_key(namespace, prefix_ids, ids)) for namespace in sorted(namespaces)]


def drop_orphaned_kv(resources: Resources, corpus: Corpus, within_s: float = ABANDONED_S) -> int:
    """Delete the KV of chunks that were dropped, or whose addition never ended; of how many.

    Additions that began less than ``within_s`` ago may still be going on in another process.
    """
    dropped = corpus.dropped.texts(time.time() - within_s)
    if not dropped:
        return 0
    if resources.store.stats().entries:
        for text in dropped.values():
            for namespace, key in kv_keys(resources, corpus, text):
                resources.store.delete(namespace, key)
    corpus.dropped.forget(list(dropped))
    return len(dropped)
