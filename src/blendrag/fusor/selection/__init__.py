"""Selection policies by name: ``query``, ``hkvd``, ``boundary(k)``, …"""

from __future__ import annotations

import re

from blendrag.errors import InvalidInputError
from blendrag.fusor.selection.base import Fetch, LayerView, PromptGeometry, SelectionPolicy
from blendrag.fusor.selection.blend import BlendPolicy
from blendrag.fusor.selection.boundary import BoundaryPolicy
from blendrag.fusor.selection.controls import FullPolicy, ReusePolicy
from blendrag.fusor.selection.hkvd import HKVDPolicy
from blendrag.fusor.selection.hkvd_once import HKVDOncePolicy
from blendrag.fusor.selection.query import QueryPolicy
from blendrag.fusor.selection.query_hkvd import QueryHKVDPolicy
from blendrag.fusor.selection.random import RandomPolicy
from blendrag.fusor.selection.schedule import Schedule

__all__ = [
    "POLICIES",
    "Fetch",
    "LayerView",
    "PromptGeometry",
    "Schedule",
    "SelectionPolicy",
    "make_policy",
    "policy_names",
]

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


def make_policy(text: str | SelectionPolicy) -> SelectionPolicy:
    """The policy of ``"hkvd"``, ``"boundary(32)"``, … Raises :class:`InvalidInputError`."""
    if isinstance(text, SelectionPolicy):
        return text
    match = re.fullmatch(r"([a-z+-]+)(?:\((\d{1,9})\))?", text.strip())
    policy = POLICIES.get(match[1]) if match else None
    if match is None or policy is None or (match[2] and policy.k is None):
        raise InvalidInputError(f"policy {text!r} is not one of {policy_names()}")
    return policy(int(match[2])) if match[2] else policy()


def policy_names() -> str:
    """All names that :func:`make_policy` accepts, for a sentence."""
    names = (name if policy.k is None else f"{name}(k)" for name, policy in POLICIES.items())
    return f"{', '.join(names)} (k in tokens)"
