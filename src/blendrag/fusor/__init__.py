"""Selective recompute over loaded KV, inside an unmodified model's own forward."""

from blendrag.fusor.cache import BlendCache
from blendrag.fusor.fusion import BlendRequest, Fusion, FusionCounts
from blendrag.fusor.fusor import Fusor

__all__ = ["BlendCache", "BlendRequest", "Fusion", "FusionCounts", "Fusor"]
