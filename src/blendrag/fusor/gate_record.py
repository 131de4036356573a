"""A verdict of the gate, and how it is kept beside the store: per namespace, libraries and device."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import transformers

from blendrag.store import regular_files

Verdict = Literal["blendable", "refused"]
#: Size limit of a record's file.
MAX_BYTES = regular_files.MIB


@dataclass(frozen=True)
class Verification:
    """What the gate measured; differences are absolute, of logits.

    ``greedy_equal``: the first greedy tokens (:data:`gate.GREEDY_TOKENS`) over the blended cache equal stock.
    """

    verdict: Verdict
    reason: str
    layers: tuple[str, ...]
    max_logit_diff: float | None = None
    subset_logit_diff: float | None = None
    perturbed_logit_diff: float | None = None
    greedy_equal: bool | None = None
    prompt_tokens: int = 0
    fast_attention: bool = False

    @property
    def blendable(self) -> bool:
        return self.verdict == "blendable"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def environment(device: torch.device) -> str:
    """What a verdict holds for beside the model: another library or device is another verdict."""
    return f"torch {torch.__version__}, transformers {transformers.__version__}, {device.type}"


def remembered(root: Path, namespace: str, device: torch.device) -> Verification | None:
    """The verification of ``namespace`` kept in the store at ``root`` for this environment."""
    try:
        fields = json.loads(regular_files.read_bytes(_file(root, namespace), MAX_BYTES))
        if fields.pop("environment") != environment(device):
            return None
        kept = Verification(**{**fields, "layers": tuple(fields["layers"])})
        return kept if kept.verdict in get_args(Verdict) and isinstance(kept.reason, str) else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def remember(root: Path, namespace: str, device: torch.device, result: Verification) -> None:
    """Keep ``result``. Raises :class:`OSError`."""
    target = _file(root, namespace)
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fields = {**result.as_dict(), "environment": environment(device)}
    regular_files.replace(target, json.dumps(fields).encode())


def _file(root: Path, namespace: str) -> Path:
    return Path(root) / "verified" / f"{namespace}.json"
