"""Selection policies by name."""

from __future__ import annotations

import re

from blendrag.config import CALIBRATED, DEFAULT_POLICY, of_variable
from blendrag.errors import InvalidOptionError
from blendrag.fusor.selection.base import SelectionPolicy
from blendrag.fusor.selection.blend import BlendPolicy
from blendrag.fusor.selection.boundary import BoundaryPolicy
from blendrag.fusor.selection.cacheblend import CacheBlendPolicy
from blendrag.fusor.selection.controls import FullPolicy, ReusePolicy
from blendrag.fusor.selection.hkvd import HKVDPolicy
from blendrag.fusor.selection.hkvd_once import HKVDOncePolicy
from blendrag.fusor.selection.query import QueryPolicy
from blendrag.fusor.selection.query_hkvd import QueryHKVDPolicy
from blendrag.fusor.selection.query_shift import QueryShiftPolicy
from blendrag.fusor.selection.random import RandomPolicy
from blendrag.wording import quoted

POLICIES: dict[str, type[SelectionPolicy]] = {
    policy.name: policy
    for policy in (
        FullPolicy,
        ReusePolicy,
        RandomPolicy,
        CacheBlendPolicy,
        HKVDPolicy,
        HKVDOncePolicy,
        BoundaryPolicy,
        QueryPolicy,
        QueryShiftPolicy,
        QueryHKVDPolicy,
        BlendPolicy,
    )
}


def make_policy(text: str | SelectionPolicy) -> SelectionPolicy:
    """The policy of ``"hkvd"``, ``"boundary(32)"``, … Raises :class:`InvalidOptionError`.

    ``calibrated`` is the default here; an engine looks up what was found for its model.
    """
    if isinstance(text, SelectionPolicy):
        return text
    name = DEFAULT_POLICY if text.strip() == CALIBRATED else text.strip()
    match = re.fullmatch(r"([a-z+-]+)(?:\((\d{1,9})(?:-(\d{1,3}))?\))?", name)
    policy = POLICIES.get(match[1]) if match else None
    if match is None or policy is None:
        raise _wrong(text)
    number, last = match[2], match[3]
    if last is not None and _has_depth(policy) and int(number) < int(last) <= 100:
        return policy(depth=(int(number), int(last)))
    if last is not None or (number and policy.k is None):
        raise _wrong(text)
    return policy(int(number)) if number else policy()


def _wrong(text: str) -> InvalidOptionError:
    named = f"{quoted(text)}{of_variable('policy', text)}"
    return InvalidOptionError("policy", f"{named} is not one of {policy_names()}")


def policy_names() -> str:
    """All names that :func:`make_policy` accepts, for a sentence."""
    names = (name if policy.k is None else f"{name}(k)" for name, policy in POLICIES.items())
    deep = " or ".join(f"{name}(a-b)" for name, policy in POLICIES.items() if _has_depth(policy))
    return f"{', '.join(names)} (k in tokens); {deep} (from a to b percent of the layers)"


def _has_depth(policy: type[SelectionPolicy]) -> bool:
    return policy.needs_attention and policy.k is None
