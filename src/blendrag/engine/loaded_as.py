"""How the model was loaded that computed the KV of a namespace, to say what differs from the loaded one."""

from __future__ import annotations

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


def difference(then: ModelIdentity, now: ModelIdentity) -> str:
    """Why ``now`` has another namespace than ``then``: all that differs, without what follows from it. In
    another dtype, or with an adapter, all weights differ, too."""
    names = {*_CALLED, *_CHANGED}
    differ = {name for name in names if getattr(then, name) != getattr(now, name)}
    parts = []
    for name, words in _CALLED.items():
        if name in differ:
            chars = _DIGITS if name in _DIGESTS else _SHOWN_CHARS
            before, after = (str(getattr(each, name))[:chars] or "none" for each in (then, now))
            parts.append(f"{words} {after}, not {before}")
    parts += [
        words
        for name, (words, causes) in _CHANGED.items()
        if name in differ and not causes & differ
    ]
    return "; ".join(parts) or "in another way"


#: Characters of a value that are shown, and of a digest.
_SHOWN_CHARS, _DIGITS = 24, 12
_DIGESTS = {"adapters", "writer"}
_CALLED = {
    "model_id": "name",
    "revision": "revision",
    "adapters": "adapter",
    "weight_quantization": "quantisation",
    "compute_dtype": "dtype",
    "attention": "attention",
    "writer": "writer",
    "encode_after": "encode_after",
    "encoding": "KV encoding",
}
_OTHER_MODEL = {"model_id", "revision"}
#: What has no value to show, and the differences that it follows from.
_CHANGED = {
    "geometry": ("its config has changed", _OTHER_MODEL),
    "tokenizer_fingerprint": ("its tokenizer or chat template has changed", _OTHER_MODEL),
    "tensors_fingerprint": (
        "its weights have changed",
        {*_OTHER_MODEL, "adapters", "weight_quantization", "compute_dtype", "geometry"},
    ),
}
