"""Selective recompute over loaded KV, inside an unmodified model's own forward."""

from blendrag.fusor.cache import BlendCache
from blendrag.fusor.fusion import BlendRequest, Fusion, FusionCounts
from blendrag.fusor.fusor import Fusor
from blendrag.fusor.packing import Prefilled, Prompt

__all__ = [
    "BlendCache",
    "BlendRequest",
    "Fusion",
    "FusionCounts",
    "Fusor",
    "Prefilled",
    "Prompt",
]
