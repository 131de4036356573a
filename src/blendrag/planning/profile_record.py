"""Profiles remembered beside the store, where the gate's verdict is kept, and what each holds for.

One file per namespace (model, weights, dtype, encoding), in it one profile per machine, device, thread
count and library versions: a store that several machines share keeps one for each.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers

from blendrag.errors import InvalidInputError
from blendrag.model.adapter import ModelAdapter
from blendrag.planning.profile import VERSION, Conditions, Profile
from blendrag.store import regular_files

#: Size limit of a namespace's file.
MAX_BYTES = 16 * regular_files.MIB
#: Profiles kept of one namespace; the oldest goes first.
KEPT = 16
#: What is said of a profile that another version of blendrag keeps there, or that is damaged.
UNREADABLE = "a form that this version cannot read"
#: What an entry that is no profile may raise, whatever it holds.
DAMAGE = (
    ArithmeticError,
    AttributeError,
    InvalidInputError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


def conditions_of(adapter: ModelAdapter, namespace: str) -> Conditions:
    """What a profile made now would hold for."""
    return Conditions(
        namespace=namespace,
        model=adapter.model_id,
        dtype=adapter.layout.dtype,
        device=_device_name(adapter.device),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        blendrag=_own_version(),
        machine=f"{platform.node() or 'unnamed'} ({cores()} cores)",
    )


def cores() -> int:
    """That this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _own_version() -> str:
    try:
        return version("blendrag")
    except PackageNotFoundError:  # run from its sources
        return "unknown"


def recall(root: Path, wanted: Conditions) -> Profile | None:
    """The profile measured under exactly these conditions."""
    kept = _kept(root, wanted.namespace)
    return next((p for p in kept if p.conditions == wanted), None)


def differing(root: Path, wanted: Conditions) -> str:
    """How the profile kept of this namespace differs from ``wanted``, in words; empty if there is none.

    Of several the one that differs least; :data:`UNREADABLE` where there is one and none can be read.
    """
    others = [wanted.differences(p.conditions) for p in _kept(root, wanted.namespace)]
    if others:
        least = min(others, key=len)
        return ", ".join(least)
    entries = _entries(root, wanted.namespace)
    return UNREADABLE if entries is None or any(_read(e) is None for e in entries) else ""


def remember(root: Path, profile: Profile) -> None:
    """Keep ``profile`` in place of an earlier one of the same conditions. Raises :class:`OSError`.

    Entries that another version of blendrag may read stay as they are.
    """
    wanted = profile.conditions
    others = [e for e in _entries(root, wanted.namespace) or () if not _is_of(e, wanted)]
    target = path_of(root, wanted.namespace)
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    entries = [*others, profile.as_dict()][-KEPT:]
    regular_files.replace(target, json.dumps({"profiles": entries}).encode())


class Remembered:
    """The profile of what is loaded, looked up again only when the file has changed.

    Not thread-safe: for the one thread that works on the model.
    """

    def __init__(self, root: Path, conditions: Callable[[str], Conditions]) -> None:
        self._root = root
        self._conditions = conditions
        self._known: tuple[object, Profile | None, str] = (None, None, "")

    def __call__(self, namespace: str) -> tuple[Profile | None, str]:
        """The profile for now, or ``None`` and what is wrong with the one there is, if there is one."""
        stamp = (namespace, torch.get_num_threads(), _stamp(path_of(self._root, namespace)))
        if self._known[0] != stamp:
            self._known = (stamp, *self._look(namespace))
        return self._known[1:]

    def _look(self, namespace: str) -> tuple[Profile | None, str]:
        wanted = self._conditions(namespace)
        found = recall(self._root, wanted)
        return found, "" if found is not None else differing(self._root, wanted)


def path_of(root: Path, namespace: str) -> Path:
    """Where the profiles of ``namespace`` are kept."""
    return Path(root) / "verified" / f"{namespace}.profiles.json"


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino


def _kept(root: Path, namespace: str) -> list[Profile]:
    """Whatever is whole of what the file holds; nothing where it is missing or damaged."""
    found = [_read(entry) for entry in _entries(root, namespace) or ()]
    return [p for p in found if p is not None and p.conditions.namespace == namespace]


def _entries(root: Path, namespace: str) -> list[Any] | None:
    """What the file holds, readable or not; ``None`` where it is damaged as a whole."""
    try:
        entries = json.loads(regular_files.read_bytes(path_of(root, namespace), MAX_BYTES))[
            "profiles"
        ]
    except OSError:
        return []
    except DAMAGE:
        return None
    return entries if isinstance(entries, list) else None


def _read(entry: Any) -> Profile | None:
    with suppress(*DAMAGE):
        return Profile.of(entry)
    return None


def _is_of(entry: Any, conditions: Conditions) -> bool:
    """Whether this is an entry of ours under those conditions, damaged or not."""
    if not isinstance(entry, dict) or entry.get("version") != VERSION:
        return False
    return entry.get("conditions") == asdict(conditions)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _cpu_name() if device.type == "cpu" else device.type


def _cpu_name() -> str:
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
