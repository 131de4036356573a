"""Which storage device to keep the KV on, and what it costs (CacheBlend §5.1, figure 10b)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from blendrag.fusor.selection import Schedule, make_policy
from blendrag.planning.choice import HIDDEN_SLACK
from blendrag.planning.estimate import Estimator, LoadEstimate, PromptParts, StoredPart
from blendrag.planning.profile import DISK, Profile, Tier

#: Fresh tokens of a usual prompt: a question in its template.
QUESTION_TOKENS = 32


@dataclass(frozen=True)
class Device:
    name: str
    bytes_per_s: float
    price_per_gb_month: float
    """In dollars, of 10⁹ bytes."""


#: AWS volumes: list prices in us-east-1 and most throughput included in them, without extra charges.
DEVICES = (
    Device("EBS st1 (hard disk)", 500e6, 0.045),
    Device("EBS gp3 (SSD)", 125e6, 0.08),
    Device("EBS io2 (SSD)", 4e9, 0.125),
)


@dataclass(frozen=True)
class RatedDevice:
    device: Device
    ttft_s: float
    waiting_s: float
    """How much longer than if everything were loaded from the start."""
    hides: bool
    """Whether the prompt waits for no more than its first layer."""
    cost_per_month: float
    """C_store: bytes times price."""


@dataclass(frozen=True)
class StorageChoice:
    """All devices in the order given; ``best`` is ``None`` if each adds latency."""

    rated: tuple[RatedDevice, ...]
    best: RatedDevice | None
    fastest: RatedDevice


def choose_storage(
    profile: Profile,
    policy: str,
    ratio: float,
    chunks: int,
    corpus_bytes: float,
    devices: Sequence[Device] = DEVICES,
) -> StorageChoice:
    """The cheapest device that adds no latency to a usual prompt of ``chunks`` chunks at ``ratio``."""

    def rated(device: Device) -> RatedDevice:
        on_device = replace(profile, tiers=(Tier(DISK, device.bytes_per_s),))
        estimate, counts = usual_estimate(on_device, policy, ratio, chunks)
        predicted, waiting_s = estimate.at(counts), estimate.waiting_s(counts)
        allowed_s = estimate.first_load_s(counts) + HIDDEN_SLACK * predicted.compute_s
        cost = corpus_bytes / 1e9 * device.price_per_gb_month
        return RatedDevice(device, predicted.ttft_s, waiting_s, waiting_s <= allowed_s, cost)

    every = tuple(map(rated, devices))
    hiding = (each for each in every if each.hides)
    best = min(hiding, key=lambda each: (each.device.price_per_gb_month, each.ttft_s), default=None)
    return StorageChoice(every, best, min(every, key=lambda each: each.ttft_s))


def usual_prompt(profile: Profile, policy: str, chunks: int) -> PromptParts:
    """``chunks`` stored chunks as long as the corpus makes them, and a question."""
    selecting, tokens = make_policy(policy), profile.chunk_tokens
    tier = profile.tier(DISK) or profile.tiers[0]  # the disk of a read-only store was not timed
    parts = tuple(
        StoredPart(i * tokens, (i + 1) * tokens, tier.name, profile.layer_bytes)
        for i in range(chunks)
    )
    scouted = selecting.attention_layers(profile.layers).stop
    return PromptParts(
        chunks * tokens + QUESTION_TOKENS, parts, selecting.needs_deviation, scouted,
        selecting.moves_others,
    )  # fmt: skip


def usual_estimate(
    profile: Profile, policy: str, ratio: float, chunks: int
) -> tuple[LoadEstimate, Sequence[float]]:
    """A usual prompt with everything loaded, and the tokens that ``policy`` recomputes in layers 1…L-1."""
    estimate = Estimator(profile, usual_prompt(profile, policy, chunks)).loading()
    counts_of, constant = make_policy(policy).layer_counts, Schedule("constant")
    return estimate, counts_of(constant, ratio, estimate.candidates, profile.layers, chunks)
