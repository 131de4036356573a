"""Which storage device to keep the KV on, and what that costs (CacheBlend §5.1, figure 10b).

At a fixed ratio, the cheapest of the devices that add no latency: whose loads hide behind the recompute,
but for the first layer's, which nothing can hide, if it takes no longer than computing one. The cost is
the paper's C_store: bytes times price.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blendrag.errors import InvalidInputError
from blendrag.planning.choice import HIDDEN_SLACK
from blendrag.planning.forecast import Estimator, Prompt
from blendrag.planning.profile import Profile, Tier
from blendrag.store import regular_files

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip
_SPEED = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([kmgt]?i?b)/s\s*", re.IGNORECASE)
NAME, THROUGHPUT, PRICE = "name", "throughput", "price_per_gb_month"
#: Characters of a value that makes no sense, in the sentence that refuses it.
SHOWN = 40
EXPECTED = f"{NAME}, {THROUGHPUT} (bytes per second, or '500 MB/s') and {PRICE}"


@dataclass(frozen=True)
class Device:
    """Something that KV could be kept on."""

    name: str
    bytes_per_s: float
    price_per_gb_month: float
    """Of 10⁹ bytes."""


@dataclass(frozen=True)
class Rated:
    """A device and what it would do."""

    device: Device
    ttft_s: float
    waiting_s: float
    """How much longer than if everything were in place from the start."""
    hides: bool
    """Whether that is no more than :meth:`Estimator.first_load_s`, and what estimates are off by."""
    cost_per_month: float


@dataclass(frozen=True)
class StorageChoice:
    """All devices in the order given; ``best`` is ``None`` where each adds latency."""

    rated: tuple[Rated, ...]
    best: Rated | None
    fastest: Rated


def choose_storage(
    profile: Profile,
    prompt: Prompt,
    counts: Callable[[int], Sequence[float]],
    devices: Sequence[Device],
    corpus_bytes: float,
) -> StorageChoice:
    """``prompt``'s parts as if they lay on each device; ``counts`` recomputed in layers 1…L-1.

    Raises :class:`InvalidInputError` without devices.
    """
    if not devices:
        raise InvalidInputError("the list of devices is empty, expected one at least; add one")
    rated = tuple(_rate(profile, prompt, counts, device, corpus_bytes) for device in devices)
    hiding = [each for each in rated if each.hides]
    cheapest = min(
        hiding, key=lambda each: (each.device.price_per_gb_month, each.ttft_s), default=None
    )
    return StorageChoice(rated, cheapest, min(rated, key=lambda each: each.ttft_s))


def _rate(
    profile: Profile,
    prompt: Prompt,
    counts: Callable[[int], Sequence[float]],
    device: Device,
    corpus_bytes: float,
) -> Rated:
    tier = Tier(device.name, device.bytes_per_s)
    there = replace(profile, tiers=(tier,))
    parts = tuple(replace(part, tier=device.name) for part in prompt.parts)
    estimator = Estimator(there, prompt, parts)
    recomputed = counts(estimator.candidates)
    predicted, waiting_s = estimator.at(recomputed), estimator.waiting_s(recomputed)
    allowed_s = estimator.first_load_s(recomputed) + HIDDEN_SLACK * predicted.compute_s
    cost = corpus_bytes / 1e9 * device.price_per_gb_month
    return Rated(device, predicted.ttft_s, waiting_s, waiting_s <= allowed_s, cost)


# -- lists of devices -----------------------------------------------------------------------------


def read_devices(path: Path) -> tuple[Device, ...]:
    """Devices of a JSON list or a TOML file of ``[[devices]]``. Raises :class:`InvalidInputError`."""
    try:
        text = regular_files.read_text(path, regular_files.MIB, follow=True)
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8"
        raise InvalidInputError(
            f"device list {path} cannot be read ({reason}); expected a JSON or TOML file"
        ) from exc
    try:
        found = tomllib.loads(text) if path.suffix.lower() == ".toml" else json.loads(text)
    except (ValueError, RecursionError) as exc:
        kind = "TOML" if path.suffix.lower() == ".toml" else "JSON"
        raise InvalidInputError(
            f"device list {path} is no {kind} ({exc}); expected devices of {EXPECTED}"
        ) from exc
    entries = found.get("devices") if isinstance(found, dict) else found
    if not isinstance(entries, list) or not entries:
        raise InvalidInputError(
            f"device list {path} holds no devices, expected a list of them (in TOML: [[devices]]), each "
            f"with {EXPECTED}"
        )
    devices = tuple(_device(entry, i, path) for i, entry in enumerate(entries, 1))
    names = [device.name for device in devices]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidInputError(
            f"device list {path} names {twice!r} twice, expected each once; rename one"
        )
    return devices


def _device(entry: Any, number: int, path: Path) -> Device:
    where = f"device {number} of {path}"
    if not isinstance(entry, Mapping) or set(entry) != {NAME, THROUGHPUT, PRICE}:
        shown = ", ".join(map(str, entry)) if isinstance(entry, Mapping) else repr(entry)
        raise InvalidInputError(
            f"{where} has {shown or 'nothing'}, expected {EXPECTED}, and no more"
        )
    name = entry[NAME]
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise InvalidInputError(
            f"{where} has {NAME} {_short(name)}, expected a text on one line; name it"
        )
    speed = throughput_of(entry[THROUGHPUT])
    if speed is None or not 0 < speed < math.inf:
        raise InvalidInputError(
            f"{where} ({name}) has {THROUGHPUT} {_short(entry[THROUGHPUT])}, expected bytes per second "
            "above 0, or a text such as '500 MB/s'"
        )
    price = _number(entry[PRICE])
    if price is None or not 0 <= price < math.inf:
        raise InvalidInputError(
            f"{where} ({name}) has {PRICE} {_short(entry[PRICE])}, expected a number of 0 or more"
        )
    return Device(name, speed, price)


def _number(value: Any) -> float | None:
    """Of JSON or TOML, whose integers may be longer than any float; ``None`` for what is none."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _short(value: Any) -> str:
    if isinstance(value, int) and abs(value) >= 10**SHOWN:  # too long for repr, perhaps
        return f"a number of more than {SHOWN} digits"
    shown = repr(value)
    return shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}…"


def throughput_of(value: Any) -> float | None:
    """Bytes per second: a number, or a text such as ``"500 MB/s"``; ``None`` for what is neither."""
    if not isinstance(value, str):
        return _number(value)
    match = _SPEED.fullmatch(value)
    return float(match[1]) * _UNITS[match[2].upper()] if match else None
