"""Ways to do the same, timed in rounds: a machine that slows down slows everybody down."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Milliseconds over the rounds."""

    median: float
    low: float
    high: float


def interleaved(
    ways: Mapping[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    tick: Callable[[str], None] = lambda text: None,
    prepare: Callable[[str], None] = lambda name: None,
) -> dict[str, Timing]:
    """Median, lowest and highest milliseconds of each way over ``rounds`` alternating rounds.

    ``prepare(name)`` runs before each piece of work, outside its time.
    """
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        tick(f"round {number + 1} of {rounds}")
        for name, way in ways.items():
            prepare(name)
            samples[name].append(milliseconds(way, device))
    return {n: Timing(statistics.median(s), min(s), max(s)) for n, s in samples.items()}


def milliseconds(way: Callable[[], object], device: torch.device) -> float:
    """What ``way`` takes, the device's work included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    way()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began) * 1e3
