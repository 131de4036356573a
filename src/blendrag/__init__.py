"""RAG with local Hugging Face models that never prefills the same chunk twice.

Importing this package imports neither torch nor transformers; the names below are loaded on first
use (PEP 562). It sets ``GOMP_SPINCOUNT`` (:func:`blendrag.openmp.sleep_soon`).
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    import fcntl  # noqa: F401  # the store's locks; missing on Windows
except ImportError:
    _runs_on = "blendrag runs on Linux and macOS; on Windows use WSL 2"
    _is_module = any("blendrag.cli" in part for part in sys.orig_argv)
    if _is_module or Path(*sys.argv[:1]).stem == "blendrag":
        raise SystemExit(f"error: {_runs_on}") from None  # the command, without a traceback
    raise ImportError(_runs_on) from None

from blendrag import errors, openmp
from blendrag.errors import BlendragError

if TYPE_CHECKING:
    from blendrag.corpus.filters import Filter
    from blendrag.engine import Answer, BlendEngine, Options
    from blendrag.text.readers import Document

__version__ = "0.1.0"
__all__ = [
    "Answer", "BlendEngine", "BlendragError", "Document", "Filter", "Options", "__version__",
    "errors",
]  # fmt: skip

_LAZY = {
    "Answer": "blendrag.engine",
    "BlendEngine": "blendrag.engine",
    "Document": "blendrag.text.readers",
    "Filter": "blendrag.corpus.filters",
    "Options": "blendrag.engine",
}


openmp.sleep_soon()


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'blendrag' has no attribute {name!r}")
