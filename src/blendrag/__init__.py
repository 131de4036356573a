"""RAG with local Hugging Face models that never prefills the same chunk twice.

Importing this package imports neither torch nor transformers; the names below are loaded on first
use (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from blendrag import errors
from blendrag.errors import BlendragError

if TYPE_CHECKING:
    from blendrag.engine import Answer, BlendEngine, Options
    from blendrag.text.readers import Document

__version__ = "0.1.0"
__all__ = [
    "Answer", "BlendEngine", "BlendragError", "Document", "Options", "__version__", "errors",
]  # fmt: skip

_LAZY = {
    "Answer": "blendrag.engine",
    "BlendEngine": "blendrag.engine",
    "Document": "blendrag.text.readers",
    "Options": "blendrag.engine",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'blendrag' has no attribute {name!r}")
