"""What loading and computing take on one machine, and the record of it in the store.

A store used by several machines keeps one for each. :mod:`blendrag.planning.measure` measures it.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import transformers
from pydantic import Field

from blendrag.model.adapter import ModelAdapter
from blendrag.planning.machine import cores, processor_name
from blendrag.store.records import Records

Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]

MEMORY = "memory"
DISK = "disk"
#: The disk tier for a file that is not in the page cache.
COLD = "disk-cold"
REMOTE = "remote"


@dataclass(frozen=True)
class Curve:
    """Seconds of one layer over its rows, or of a prefill over its tokens.

    ``base(rows) + pair_s · rows · context + placed_s · placed``. ``base`` interpolates the measurements and
    never falls. ``context``: the mean number of keys a row sees. ``placed``: loaded tokens moved to their
    positions.
    """

    rows: tuple[Finite, ...]
    """Ascending, not empty."""
    seconds: tuple[Finite, ...]
    """As many, never falling."""
    row_s: Finite
    """Seconds of each row beyond the last measured."""
    pair_s: Finite = 0.0
    placed_s: Finite = 0.0

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in pairwise(self.rows))
        falling = any(a > b for a, b in pairwise(self.seconds))
        if not 0 < len(self.rows) == len(self.seconds) or not rising or falling:
            raise ValueError(f"no curve: {self.seconds} seconds over {self.rows} rows")

    def base(self, rows: float) -> float:
        """Everything but attention and moving keys."""
        beyond = max(0.0, rows - self.rows[-1])
        return float(np.interp(rows, self.rows, self.seconds)) + self.row_s * beyond

    def __call__(self, rows: float, context: float, placed: float = 0.0) -> float:
        moved = self.placed_s * placed
        return moved + (self.base(rows) + self.pair_s * rows * context if rows > 0 else 0.0)


@dataclass(frozen=True)
class Tier:
    """Where KV is read from, through the store's verified read."""

    name: str
    bytes_per_s: Positive
    """Throughput in bytes as stored."""
    read_s: Finite = 0.0
    """Latency of each read: one layer of one chunk."""
    busy: Share = 0.0
    """Share of the reading time for which a core works (copying, checksums, decoding)."""

    def seconds(self, size_bytes: float, reads: int = 1) -> float:
        """T_load of ``size_bytes`` in ``reads`` reads."""
        return size_bytes / self.bytes_per_s + reads * self.read_s


@dataclass(frozen=True)
class Conditions:
    """What a profile holds for."""

    namespace: str
    """Namespace of the KV store: model, weights, dtype, attention implementation, encoding."""
    model: str
    dtype: str
    device: str
    threads: int
    torch: str
    transformers: str
    blendrag: str
    machine: str

    def differences(self, other: Conditions) -> tuple[str, ...]:
        return tuple(
            f"{f.name} {getattr(other, f.name)}"
            for f in fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        )


@dataclass(frozen=True)
class Profile:
    """Times of one model on one machine. All layers but the last are taken to be alike."""

    conditions: Conditions
    prefill: Curve
    """Stock prefill over tokens; a row sees half of them."""
    layer: Curve
    """One decoder layer over computed rows, through the fusor."""
    last: Curve
    """The last layer, which computes K and V of all rows and the rest of one."""
    scout: Curve
    """One layer of the scout pass."""
    peek_s: Finite
    """Per row: K and V of layer 1 and their deviation, for a policy that needs deviations."""
    shift_s: Finite
    """Per layer and chunk token that is moved, for a policy that moves what it does not recompute."""
    fixed_s: Finite
    """Outside of the layers: embedding, logits, ``generate`` itself."""
    tiers: Annotated[tuple[Tier, ...], Field(min_length=1)]
    device_bytes_per_s: Positive | None
    """Host to device; ``None`` if the model computes on the host."""
    is_shared: bool
    """Whether reading takes cores from computing."""
    chunk_tokens: Annotated[int, Field(ge=1)]
    layer_bytes: Annotated[tuple[Annotated[int, Field(gt=0)], ...], Field(min_length=1)]
    """Per layer, of one stored chunk of ``chunk_tokens``."""
    took_s: Finite
    version: Literal[5] = 5
    """Version of the form of these figures."""

    @property
    def layers(self) -> int:
        return len(self.layer_bytes)

    def prefill_s(self, tokens: int) -> float:
        return self.prefill(tokens, tokens / 2)

    def tier(self, name: str) -> Tier | None:
        """The tier of that name; a cold disk that could not be measured counts as a warm one."""
        found = {tier.name: tier for tier in self.tiers}
        return found.get(name) or (found.get(DISK) if name == COLD else None)


def profiles(root: Path, namespace: str) -> Records[Profile]:
    """Profiles kept in the store at ``root``, one for each machine, device and set of versions."""
    name = f"{namespace}.profiles"
    return Records(root, name, "profiles", Profile, ("version", "conditions"))


def recall_profile(root: Path, wanted: Conditions) -> tuple[Profile | None, str]:
    """The profile measured under exactly these conditions, else how the closest one differs, in words."""
    kept = profiles(root, wanted.namespace)
    found = [(wanted.differences(profile.conditions), profile) for profile in kept.entries()]
    if not found:
        return None, "another version of blendrag" if kept.unchecked() else ""
    differences, closest = min(found, key=lambda each: len(each[0]))
    return None if differences else closest, ", ".join(differences)


class ProfileCache:
    """The profile of the loaded model, read again when its file changes. Not thread-safe."""

    def __init__(self, root: Path, conditions: Callable[[str], Conditions]) -> None:
        self._root = root
        self._conditions = conditions
        self._stamp: object = None
        self._known: tuple[Profile | None, str] = (None, "")

    def __call__(self, namespace: str) -> tuple[Profile | None, str]:
        """See :func:`recall_profile`, for the conditions of now."""
        stamp = (namespace, torch.get_num_threads(), profiles(self._root, namespace).stamp)
        if self._stamp != stamp:
            self._known = recall_profile(self._root, self._conditions(namespace))
            self._stamp = stamp
        return self._known


def conditions_of(adapter: ModelAdapter, namespace: str) -> Conditions:
    """What a profile measured now would hold for."""
    try:
        own = version("blendrag")
    except PackageNotFoundError:  # run from its sources
        own = "unknown"
    return Conditions(
        namespace=namespace,
        model=adapter.model_id,
        dtype=adapter.layout.dtype,
        device=_device_name(adapter.device),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        blendrag=own,
        machine=f"{platform.node() or 'unnamed'} ({cores()} cores)",
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type if device.type != "cpu" else processor_name()
