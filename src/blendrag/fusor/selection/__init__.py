"""Selection policies by name: ``query``, ``query(50-100)``, ``cacheblend``, ``boundary(k)``, …"""

from blendrag.fusor.selection.base import Fetch, LayerView, PromptGeometry, SelectionPolicy
from blendrag.fusor.selection.blending import Blending
from blendrag.fusor.selection.named import POLICIES, make_policy, policy_names
from blendrag.fusor.selection.schedule import Schedule

__all__ = [
    "POLICIES",
    "Blending",
    "Fetch",
    "LayerView",
    "PromptGeometry",
    "Schedule",
    "SelectionPolicy",
    "make_policy",
    "policy_names",
]
