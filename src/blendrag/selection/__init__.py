"""Selection policies by name: ``full``, ``reuse``, ``hkvd``, ``query``, ``boundary(k)``."""

from __future__ import annotations

import re

from blendrag.errors import InvalidInputError
from blendrag.selection.base import LayerView, PromptGeometry, SelectionPolicy
from blendrag.selection.boundary import BoundaryPolicy
from blendrag.selection.controls import FullPolicy, ReusePolicy
from blendrag.selection.hkvd import HKVDPolicy
from blendrag.selection.query import QueryPolicy
from blendrag.selection.schedule import Schedule

POLICIES: dict[str, type[SelectionPolicy]] = {
    policy.name: policy
    for policy in (FullPolicy, ReusePolicy, HKVDPolicy, QueryPolicy, BoundaryPolicy)
}

__all__ = ["POLICIES", "LayerView", "PromptGeometry", "Schedule", "SelectionPolicy", "make_policy"]


def make_policy(text: str | SelectionPolicy) -> SelectionPolicy:
    """``"hkvd"``, ``"boundary(32)"`` … → a policy; raises :class:`InvalidInputError`."""
    if isinstance(text, SelectionPolicy):
        return text
    match = re.fullmatch(r"([a-z-]+)(?:\((\d+)\))?", text.strip())
    if match is None or match[1] not in POLICIES or (match[2] and match[1] != "boundary"):
        raise InvalidInputError(
            f"policy {text!r} is not one of full, reuse, hkvd, query, boundary(k) (k in tokens)"
        )
    if match[2]:
        return BoundaryPolicy(int(match[2]))
    return POLICIES[match[1]]()
