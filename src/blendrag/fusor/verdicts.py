"""The gate's verdicts, kept with what is measured of models (:mod:`blendrag.model.measurements`).

A verdict depends on the model as loaded, the libraries and the device, but on no store.
"""

from __future__ import annotations

import torch

from blendrag.fusor.gate import GATE_VERSION, Verification
from blendrag.model import measurements


def recall(namespace: str, device: torch.device) -> Verification | None:
    """The verdict on the model of ``namespace`` with the installed libraries, on ``device``."""
    return measurements.recall(_key(namespace, device), Verification)


def remember(namespace: str, device: torch.device, verification: Verification) -> None:
    """Keep a verdict for :func:`recall`. If that fails, the next process runs the gate again."""
    measurements.remember(_key(namespace, device), verification.as_dict())


def _key(namespace: str, device: torch.device) -> str:
    return measurements.key_of(f"gate {GATE_VERSION}", namespace, device)
