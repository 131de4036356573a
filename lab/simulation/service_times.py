"""How long a replica needs for a request, by the tiers that its chunks are read from.

From a machine profile that was measured, or from :func:`assumed_profile`. Tiers that were not measured are
assumed, too; results name all assumptions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from blendrag.config import DEFAULT_POLICY
from blendrag.errors import InvalidInputError
from blendrag.fusor.selection import Schedule, make_policy
from blendrag.planning.estimate import Estimator, LoadEstimate, StoredPart
from blendrag.planning.profile import (
    COLD,
    DISK,
    MEMORY,
    REMOTE,
    Conditions,
    Curve,
    Profile,
    Tier,
    profiles,
)
from blendrag.planning.storage import usual_prompt
from blendrag.store.remote.objects import IN_FLIGHT, IN_FLIGHT_FILES
from blendrag_lab.bench.geometry import GEOMETRIES

PROFILES = ".profiles"
#: Assumed devices.
ASSUMED_MEMORY = Tier(MEMORY, 20e9, 5e-6)
NVME = Tier(COLD, 5e9, 100e-6)
#: Requests under way at a time: to a directory that is mounted, and to an object store.
AT_A_TIME = {"network": IN_FLIGHT_FILES, "s3": IN_FLIGHT}
#: ``read_s``: the latency of a request, divided by how many are under way.
REMOTES = {
    "network": Tier(REMOTE, 3e9, 0.5e-3 / AT_A_TIME["network"]),
    "s3": Tier(REMOTE, 2.5e9, 30e-3 / AT_A_TIME["s3"]),
}
MEASURED = "measured"
#: Assumed computing: an 8B model in bfloat16 on a GPU that reaches half of 312 TFLOP/s.
FLOPS = 156e12
GPU_COPY_BYTES_PER_S = 25e9
#: Moving a stored key to its position reads and writes GPU memory.
MOVED_BYTES_PER_S = 1e12
CHUNK_TOKENS = 512


@dataclass(frozen=True)
class ServiceTimes:
    """Seconds to the first token of a request that need not wait, at a fixed recompute ratio."""

    profile: Profile
    """With the tiers memory, disk-cold and remote."""
    ratio: float
    top_k: int
    assumptions: tuple[str, ...]
    """In words: what was not measured."""

    @property
    def chunk_bytes(self) -> int:
        return sum(self.profile.layer_bytes)

    @property
    def full_prefill_s(self) -> float:
        """Without any stored KV."""
        return self.profile.prefill_s(usual_prompt(self.profile, "reuse", self.top_k).tokens)

    def table(self) -> dict[tuple[int, int], float]:
        """Seconds by the number of chunks in memory and on disk; the others are in the remote."""
        every = range(self.top_k + 1)
        return {(m, d): self.seconds(m, d) for m in every for d in every[: self.top_k + 1 - m]}

    def seconds(self, memory: int, disk: int) -> float:
        """With so many of the chunks in memory and on disk, by the estimates of the loading controller.

        Chunks that are computed faster than they are read, of the slowest tiers first, are computed, and read
        in the background for later requests.
        """
        tiers = [MEMORY] * memory + [COLD] * disk + [REMOTE] * (self.top_k - memory - disk)
        usual = usual_prompt(self.profile, DEFAULT_POLICY, self.top_k)
        parts = tuple(
            StoredPart(part.start, part.end, tier, part.layer_bytes)
            for part, tier in zip(usual.parts, tiers, strict=True)
        )
        estimator = Estimator(self.profile, replace(usual, parts=parts))
        return min(self._ttft_s(estimator.loading(range(n))) for n in range(self.top_k + 1))

    def _ttft_s(self, estimate: LoadEstimate) -> float:
        counts = make_policy(DEFAULT_POLICY).layer_counts(
            Schedule("constant"), self.ratio, estimate.candidates, estimate.layers, estimate.chunks
        )
        return estimate.at(counts).ttft_s


def service_times(store: Path | None, remote: str | None, ratio: float, top_k: int) -> ServiceTimes:
    """Service times by the profile kept in ``store``, or assumed without one.

    ``remote``: one of :data:`REMOTES` or :data:`MEASURED`; ``None`` takes what was measured, else the
    network. Raises :class:`InvalidInputError`.
    """
    profile = assumed_profile() if store is None else kept_profile(store)
    assumptions = [] if store is not None else [
        f"computing: an 8B model in bfloat16 at {FLOPS / 1e12:.0f} TFLOP/s"
    ]  # fmt: skip
    found = {tier.name: tier for tier in profile.tiers}
    disk = found.get(COLD) or found.get(DISK)
    if disk is None or store is None:
        disk = NVME
        assumptions.append(_described("NVMe", disk))
    if remote is None:
        remote = MEASURED if REMOTE in found else "network"
    if remote == MEASURED and REMOTE not in found:
        raise InvalidInputError(
            f"--remote {MEASURED} needs a profile with a remote, and there is none; run blendrag profile "
            f"--store … --remote URL, or give --remote {' or '.join(REMOTES)}"
        )
    if remote not in (MEASURED, *REMOTES):
        raise InvalidInputError(
            f"--remote {remote!r} is not one of {', '.join((MEASURED, *REMOTES))}"
        )
    if remote != MEASURED:
        found[REMOTE] = REMOTES[remote]
        assumptions.append(_described(remote, found[REMOTE], AT_A_TIME[remote]))
    tiers = (found[MEMORY], replace(disk, name=COLD), found[REMOTE])
    return ServiceTimes(replace(profile, tiers=tiers), ratio, top_k, tuple(assumptions))


def kept_profile(store: Path) -> Profile:
    """The latest profile in ``store``; raises :class:`InvalidInputError`."""
    files = (store / "verified").glob(f"*{PROFILES}.json")
    for path in sorted(files, key=lambda path: -path.stat().st_mtime):
        if entries := profiles(store, path.name.removesuffix(f"{PROFILES}.json")).entries():
            return entries[-1]
    raise InvalidInputError(
        f"store {store} has no machine profile, so nothing is known about its times; run blendrag profile "
        f"--store {store}, or leave out --store for assumed times"
    )


@cache
def assumed_profile() -> Profile:
    """An 8B model on a GPU: linear layers and attention by their operations."""
    hidden, _, layers, heads, kv_heads, *_ = GEOMETRIES["llama-8b"]
    head_dim = hidden // heads
    row_s = 2 * 8e9 / layers / FLOPS
    pair_s = 4 * hidden / FLOPS
    token_bytes = 2 * kv_heads * head_dim * 2  # K and V of one layer in bfloat16

    def line(row_s: float, pair_s: float, placed_s: float = 0.0) -> Curve:
        return Curve((1.0, 8192.0), (row_s, 8192 * row_s), row_s, pair_s, placed_s)

    placed_s = token_bytes / MOVED_BYTES_PER_S
    layer = line(row_s, pair_s, placed_s)
    return Profile(
        conditions=Conditions(
            "assumed", "an 8B model", "bfloat16", "an assumed GPU", 1, "", "", "", "none"
        ),
        prefill=line(layers * row_s, layers * pair_s),
        layer=layer,
        last=line(row_s / 4, 0.0, placed_s),  # K and V of all rows, the rest of one
        scout=layer,
        peek_s=0.0,
        shift_s=0.0,  # microseconds a layer
        fixed_s=5e-3,
        tiers=(ASSUMED_MEMORY, NVME),
        device_bytes_per_s=GPU_COPY_BYTES_PER_S,
        is_shared=False,
        chunk_tokens=CHUNK_TOKENS,
        layer_bytes=(CHUNK_TOKENS * token_bytes,) * layers,
        took_s=0.0,
    )


def _described(name: str, tier: Tier, in_flight: int = 1) -> str:
    latency = f"{1e3 * tier.read_s * in_flight:g} ms"
    return f"{name}: {tier.bytes_per_s / 1e9:g} GB/s, {latency} a read" + (
        f" with {in_flight} in flight" if in_flight > 1 else ""
    )


def parse_counts(option: str, text: str, low: int, high: int) -> list[int]:
    """``"1,3,10"`` or ``"1e4,1e8"``; raises :class:`InvalidInputError`."""
    found = [_number(part) for part in text.split(",")]
    if any(not (low <= n <= high and n.is_integer()) for n in found):
        raise InvalidInputError(
            f"{option} {text!r} must be whole numbers in [{low:,}, {high:,}] with commas between them"
        )
    return sorted({int(n) for n in found})


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")
