"""The figures of one model on one machine, and what they hold for.

Owns their meaning and their JSON. How they are measured is :mod:`blendrag.planning.measure`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from blendrag.errors import InvalidInputError
from blendrag.planning.curve import Curve

#: Of this form of the figures; others are measured again.
VERSION = 4
MEMORY = "memory"
DISK = "disk"
#: The disk tier where the operating system does not hold the file in its cache.
COLD = "disk-cold"


@dataclass(frozen=True)
class Conditions:
    """What a profile holds for: anything else is another profile."""

    namespace: str
    """Of the KV store: model, weights, dtype, attention implementation, encoding."""
    model: str
    dtype: str
    device: str
    threads: int
    torch: str
    transformers: str
    blendrag: str
    machine: str

    def differences(self, other: Conditions) -> tuple[str, ...]:
        """What ``other`` is measured under and this is not, in words."""
        return tuple(
            f"{f.name} {getattr(other, f.name)}"
            for f in fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        )


@dataclass(frozen=True)
class Tier:
    """Where KV is read from, through the store's own verified read."""

    name: str
    bytes_per_s: float
    """Bytes as they are stored."""
    read_s: float = 0.0
    """On top, of each read: one layer of one chunk."""
    busy: float = 0.0
    """Share of that time for which a core works (copying, summing up, decoding), in [0, 1]."""

    def __post_init__(self) -> None:
        fine = 0 < self.bytes_per_s < float("inf") and 0 <= self.read_s < float("inf")
        if not fine or not 0 <= self.busy <= 1:
            raise InvalidInputError(
                f"tier {self.name} reads {self.bytes_per_s} bytes/s and is busy for {self.busy} of it, "
                "expected a positive throughput and a share in [0, 1]; measure again"
            )

    def seconds(self, size_bytes: float, reads: int = 1) -> float:
        """T_load: of ``size_bytes`` in that many reads."""
        return size_bytes / self.bytes_per_s + reads * self.read_s


@dataclass(frozen=True)
class Profile:
    """Seconds, bytes and rows of one model on one machine. Layers are taken to be alike, but for the last."""

    conditions: Conditions
    prefill: Curve
    """Stock prefill over tokens; a row's context is half of them."""
    layer: Curve
    """One decoder layer over computed rows, through the fusor."""
    last: Curve
    """The last one, which computes K and V of the rows and the rest of one."""
    scout: Curve
    """One layer in the scout pass, whose attention is written out."""
    peek_s: float
    """Per row: K and V of layer 1 before a policy that looks has chosen, and its looking."""
    fixed_s: float
    """Outside the layers: embedding, last logits, what ``generate`` does round a forward."""
    tiers: tuple[Tier, ...]
    device_bytes_per_s: float | None
    """Host to device; ``None`` where compute is on the host."""
    is_shared: bool
    """Whether reading takes cores from computing: then what it is busy for is added to the compute."""
    chunk_tokens: int
    layer_bytes: tuple[int, ...]
    """Of one stored chunk of ``chunk_tokens``, per layer."""
    took_s: float
    measured: Mapping[str, Any]
    """The points the curves go through, as they were measured."""

    def __post_init__(self) -> None:
        if not self.layer_bytes or not self.tiers or self.chunk_tokens < 1:
            raise InvalidInputError("a profile without layers, tiers or tokens; measure again")
        if not all(size > 0 for size in self.layer_bytes):
            raise InvalidInputError("a profile of chunks that hold nothing; measure again")
        times = (self.peek_s, self.fixed_s, self.took_s)
        if not all(0 <= x < float("inf") for x in times):
            raise InvalidInputError("a profile of times that are no times; measure again")
        if self.device_bytes_per_s is not None and not self.device_bytes_per_s > 0:
            raise InvalidInputError("a profile of a device that takes no bytes; measure again")

    @property
    def layers(self) -> int:
        return len(self.layer_bytes)

    def prefill_s(self, tokens: int) -> float:
        """T_prefill: of that many tokens, the first new one sampled."""
        return self.prefill(tokens, tokens / 2)

    def tier(self, name: str) -> Tier | None:
        """The tier of that name; a cold disk that could not be measured is taken for a warm one."""
        found = {tier.name: tier for tier in self.tiers}
        return found.get(name) or (found.get(DISK) if name == COLD else None)

    def as_dict(self) -> dict[str, Any]:
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Profile:
        """From :meth:`as_dict`. Of anything else, raises what looking at it raises, or
        :class:`InvalidInputError`."""
        if entry["version"] != VERSION:
            raise ValueError(f"version {entry['version']}")
        rest = {k: v for k, v in entry.items() if k != "version"}
        rest |= {name: _curve(entry[name]) for name in ("prefill", "layer", "last", "scout")}
        rest["conditions"] = Conditions(**entry["conditions"])
        rest["tiers"] = tuple(Tier(**tier) for tier in entry["tiers"])
        rest["layer_bytes"] = tuple(int(size) for size in entry["layer_bytes"])
        return cls(**rest)


def _curve(entry: Mapping[str, Any]) -> Curve:
    rows, seconds = (tuple(float(x) for x in entry[name]) for name in ("rows", "seconds"))
    return Curve(**{**entry, "rows": rows, "seconds": seconds})
