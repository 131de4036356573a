"""A verdict of the gate, and how it is kept beside the store: per namespace, libraries and device."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

Verdict = Literal["blendable", "refused"]


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
        fields = json.loads(_file(root, namespace).read_text(encoding="utf-8"))
        if fields.pop("environment") != environment(device):
            return None
        return Verification(**{**fields, "layers": tuple(fields["layers"])})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def remember(root: Path, namespace: str, device: torch.device, result: Verification) -> None:
    """Keep ``result``; written beside and renamed, so that it is whole or absent."""
    target = _file(root, namespace)
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = target.with_suffix(f".{os.getpid()}.tmp")
    fields = {**result.as_dict(), "environment": environment(device)}
    temporary.write_text(json.dumps(fields), encoding="utf-8")
    temporary.replace(target)


def _file(root: Path, namespace: str) -> Path:
    return Path(root) / "verified" / f"{namespace}.json"
