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
    from blendrag.engine import BlendEngine

__version__ = "0.1.0"
__all__ = ["BlendEngine", "BlendragError", "__version__", "errors"]

_LAZY = {"BlendEngine": "blendrag.engine"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'blendrag' has no attribute {name!r}")
