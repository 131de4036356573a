"""The loading controller: what to load and what to compute for one prompt (CacheBlend §5.1).

``plan`` opens what is stored of a prompt, ``decide`` chooses by estimates what of it to load, and how much
to recompute, ``reports`` says what became of every chunk.
"""

from blendrag.controller.decide import Asked, Decided, decide, prompt_of
from blendrag.controller.plan import (
    LEADING_MAX_TOKENS,
    ChunkDecision,
    Controller,
    LoadPlan,
    nothing_loaded,
)
from blendrag.controller.reports import report

__all__ = [
    "LEADING_MAX_TOKENS",
    "Asked",
    "ChunkDecision",
    "Controller",
    "Decided",
    "LoadPlan",
    "decide",
    "nothing_loaded",
    "prompt_of",
    "report",
]
