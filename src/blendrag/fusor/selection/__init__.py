"""Selection policies by name: ``query``, ``hkvd``, ``boundary(k)``, …"""

from __future__ import annotations

import re

from blendrag.errors import InvalidInputError
from blendrag.fusor.selection.base import LayerView, PromptGeometry, SelectionPolicy
from blendrag.fusor.selection.blend import BlendPolicy
from blendrag.fusor.selection.boundary import BoundaryPolicy
from blendrag.fusor.selection.controls import FullPolicy, ReusePolicy
from blendrag.fusor.selection.hkvd import HKVDPolicy
from blendrag.fusor.selection.hkvd_once import HKVDOncePolicy
from blendrag.fusor.selection.query import QueryPolicy
from blendrag.fusor.selection.query_hkvd import QueryHKVDPolicy
from blendrag.fusor.selection.random import RandomPolicy
from blendrag.fusor.selection.schedule import Schedule

POLICIES: dict[str, type[SelectionPolicy]] = {
    policy.name: policy
    for policy in (
        FullPolicy,
        ReusePolicy,
        RandomPolicy,
        HKVDPolicy,
        HKVDOncePolicy,
        BoundaryPolicy,
        QueryPolicy,
        QueryHKVDPolicy,
        BlendPolicy,
    )
}
#: Policies whose name may carry a number of tokens: ``boundary(16)``.
COUNTED: dict[str, type[BoundaryPolicy] | type[BlendPolicy]] = {
    BoundaryPolicy.name: BoundaryPolicy,
    BlendPolicy.name: BlendPolicy,
}

__all__ = [
    "COUNTED",
    "POLICIES",
    "LayerView",
    "PromptGeometry",
    "Schedule",
    "SelectionPolicy",
    "make_policy",
    "policy_names",
]


def make_policy(text: str | SelectionPolicy) -> SelectionPolicy:
    """``"hkvd"``, ``"boundary(32)"``, … → a policy.

    Raises :class:`InvalidInputError`.
    """
    if isinstance(text, SelectionPolicy):
        return text
    match = re.fullmatch(r"([a-z+-]+)(?:\((\d{1,9})\))?", text.strip())
    counted = match is None or not match[2] or match[1] in COUNTED
    if match is None or match[1] not in POLICIES or not counted:
        raise InvalidInputError(f"policy {text!r} is not one of {policy_names()}")
    return COUNTED[match[1]](int(match[2])) if match[2] else POLICIES[match[1]]()


def policy_names() -> str:
    """All names that :func:`make_policy` reads, for a sentence."""
    names = (f"{name}(k)" if name in COUNTED else name for name in POLICIES)
    return f"{', '.join(names)} (k in tokens)"
