"""The harness of all benches: rounds in which every way runs once, medians, and peak memory.

Other load slows all ways down alike, so ratios within one run stay meaningful.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from blendrag.errors import BlendragError
from blendrag_lab.tables import spread

Tick = Callable[[str], None]
"""Reports progress."""

Name = TypeVar("Name", bound=Hashable)
Sample = TypeVar("Sample")


def silent(text: str) -> None:
    """Progress that is not shown."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        return cls(statistics.median(samples), min(samples), max(samples))

    def __str__(self) -> str:
        return spread(self.median, (self.low, self.high))


def run_rounds(
    ways: Mapping[Name, Callable[[], Sample]],
    rounds: int,
    tick: Tick = silent,
    warm_up: bool = True,
) -> dict[Name, list[Sample]]:
    """What every way returned in each round: its times.

    Each round starts with another way. One round before the others warms up and does not count.
    """
    names = list(ways)
    samples: dict[Name, list[Sample]] = {name: [] for name in names}
    for number in range(0 if warm_up else 1, rounds + 1):
        tick(f"round {number} of {rounds}" if number else "warming up")
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            sample = ways[name]()
            if number:
                samples[name].append(sample)
    return samples


def time_ways(
    ways: Mapping[Name, Callable[[], float]], rounds: int, tick: Tick
) -> dict[Name, Timing]:
    """The same for ways that return milliseconds."""
    return {name: Timing.of(ms) for name, ms in run_rounds(ways, rounds, tick).items()}


def milliseconds(way: Callable[[], object], device: torch.device) -> float:
    """Time of one call, including its work on the device."""
    began = clock(device)
    way()
    return (clock(device) - began) * 1e3


def clock(device: torch.device) -> float:
    """Seconds, after all work queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class MeasuredNothingError(BlendragError):
    """A way did not do what its time is reported for."""


@dataclass(frozen=True)
class WayRow:
    part: str
    way: str
    ms: Timing
    speed: float | None
    """Against the baseline of the part, 1.0 being as fast; the median of the rounds' ratios."""


def seconds_of(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure_part(
    part: str,
    ways: Mapping[str, Callable[[], float]],
    rounds: int,
    tick: Tick,
    baseline: str | None = None,
    warm_up: bool = True,
) -> list[WayRow]:
    """A row for each way; speeds are against ``baseline``, one of the ways.

    A way returns the seconds of one round, after it has checked that the work was done, because a way that
    does nothing is always the fastest.
    """
    samples = run_rounds(ways, rounds, lambda text: tick(f"{part}: {text}"), warm_up)
    rows = []
    for name, found in samples.items():
        speed = None
        if baseline is not None:
            pairs = zip(samples[baseline], found, strict=True)
            speed = statistics.median(base / own for base, own in pairs)
        rows.append(WayRow(part, name, Timing.of([1e3 * seconds for seconds in found]), speed))
    return rows


def peak_bytes(work: Callable[[], object], device: torch.device) -> int | None:
    """Bytes by which ``work`` raised the peak memory of the process, or of a CUDA device.

    ``None`` if neither Linux's high-water mark nor a CUDA allocator is available.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    try:
        with suppress(OSError, AttributeError):  # freed memory that glibc keeps is not counted
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to the present size
        before = _status_bytes("VmRSS")
        work()
        return max(0, _status_bytes("VmHWM") - before)
    except (OSError, KeyError):
        return None


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)[field].split()[0]) * 1024
