"""Selective recompute over loaded KV, inside an unmodified model's own forward."""

from blendrag.fusor.cache import BlendCache
from blendrag.fusor.fusion import Fusion
from blendrag.fusor.fusor import Fusor
from blendrag.fusor.pack import PackedPrompt, Prefilled
from blendrag.fusor.request import BlendRequest, FusionCounts

__all__ = [
    "BlendCache",
    "BlendRequest",
    "Fusion",
    "FusionCounts",
    "Fusor",
    "PackedPrompt",
    "Prefilled",
]
