"""Temporary directories of benches, which are removed even if Ctrl-C ends the process at once."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from blendrag.cli import interrupt


@contextlib.contextmanager
def scratch(parent: Path | None = None) -> Iterator[Path]:
    """An empty directory in ``parent``, by default the system's directory for temporary files."""
    made = Path(tempfile.mkdtemp(prefix="blendrag-scratch-", dir=parent))
    remove = partial(shutil.rmtree, made, ignore_errors=True)
    interrupt.cleanups.append(remove)
    try:
        yield made
    finally:
        remove()
        interrupt.cleanups.remove(remove)
