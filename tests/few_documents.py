"""For tests of pages and examples, which need some of the embedded model's documents, not all thirty."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from blendrag.demo import demo_corpus_path

#: In the order of their names.
COUNT = 5


@contextmanager
def few_documents(folder: Path) -> Iterator[Path]:
    """``demo_corpus_path()`` is ``folder``, with the first documents."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(demo_corpus_path().iterdir())[:COUNT]:
        shutil.copy(path, folder)
    with pytest.MonkeyPatch.context() as patch:
        # not the function, which examples import by name
        patch.setattr("blendrag.demo._CORPUS", folder)
        yield folder
