"""How the model was loaded that computed the KV of a namespace, to say what differs from the loaded one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from blendrag.store.identity import ModelIdentity
from blendrag.store.records import Records

#: Ending of the names of these records.
RECORDS = "loaded"


@dataclass(frozen=True)
class LoadedAs:
    """What is recorded of a namespace when KV is first stored there."""

    identity: ModelIdentity
    torch: str
    transformers: str

    @classmethod
    def now(cls, identity: ModelIdentity) -> LoadedAs:
        return cls(identity, torch.__version__, transformers.__version__)

    def versions(self, now: LoadedAs) -> str:
        """Library versions that differ, as a clause; empty if none does."""
        pairs = [
            (name, getattr(self, name), getattr(now, name)) for name in ("torch", "transformers")
        ]
        return " and ".join(
            f"{name} {here}, not {there}" for name, there, here in pairs if here != there
        )


def records_of(root: Path, namespace: str) -> Records[LoadedAs]:
    return Records(root, f"{namespace}.{RECORDS}", "loaded", LoadedAs, ("identity",))


def recorded(root: Path, namespace: str) -> LoadedAs | None:
    """The newest record; ``None`` in stores of earlier versions."""
    found = records_of(root, namespace).entries()
    return found[-1] if found else None


def difference(then: ModelIdentity, now: ModelIdentity) -> tuple[str, str]:
    """Why ``now`` has another namespace than ``then``, and the remedy. What decides the rest goes first: in
    another dtype, or with an adapter, all weights differ, too."""
    for name, explain in _CAUSES.items():
        if getattr(then, name) != getattr(now, name):
            return explain(then, now)
    return "in another way", "ingest again"


_CAUSES: dict[str, Callable[[ModelIdentity, ModelIdentity], tuple[str, str]]] = {
    "model_id": lambda then, now: (
        "under another name", f"name it {then.model_id}, or ingest again"
    ),
    "revision": lambda then, now: (
        f"revision {now.revision or 'unknown'}, not {then.revision or 'unknown'}",
        "load that one, or ingest again",
    ),
    "adapters": lambda then, now: (
        "with an adapter" if not then.adapters
        else "with another adapter" if now.adapters else "without its adapter",
        f"{'give the same lora' if then.adapters else 'leave out lora'}, or ingest again",
    ),
    "weight_quantization": lambda then, now: (
        f"quantisation {now.weight_quantization}, not {then.weight_quantization}",
        "load it as then, or ingest again",
    ),
    "compute_dtype": lambda then, now: (
        now.compute_dtype, f"leave out dtype or give {then.compute_dtype}, or ingest again with this one",
    ),
    "attention": lambda then, now: (
        f"attention {now.attention}, not {then.attention}",
        f"give attn_implementation {then.attention}, or ingest again",
    ),
    "geometry": lambda then, now: ("its config has changed", "ingest again"),
    "tokenizer_fingerprint": lambda then, now: (
        "its tokenizer or chat template has changed", "ingest again"
    ),
    "tensors_fingerprint": lambda then, now: ("its weights have changed", "ingest again"),
    "writer": lambda then, now: (
        "with a writer" if not then.writer
        else "with another writer" if now.writer else "without its writer",
        f"{'give the same writer' if then.writer else 'give writer none'}, or ingest again",
    ),
    "encode_after": lambda then, now: (
        f"encode_after {now.encode_after}, not {then.encode_after}",
        f"give encode_after {then.encode_after}, or ingest again",
    ),
    "encoding": lambda then, now: (f"KV encoding {now.encoding}, not {then.encoding}", "ingest again"),
}  # fmt: skip
