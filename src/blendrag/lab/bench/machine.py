"""What a measurement was made on: beside its figures in the JSON, and under its table."""

from __future__ import annotations

from dataclasses import dataclass

from blendrag.model import ModelAdapter
from blendrag.planning.profile import conditions_of, cores


@dataclass(frozen=True)
class Machine:
    """Hardware, dtype and versions; no name of a host."""

    processor: str
    """The GPU's name, or the CPU's."""
    cores: int
    """Of the CPU, that the process may use."""
    threads: int
    dtype: str
    """Of the model and of KV as computed."""
    torch: str
    transformers: str
    blendrag: str


def machine_of(adapter: ModelAdapter) -> Machine:
    """That the loaded model runs on."""
    now = conditions_of(adapter, adapter.identity.namespace)
    return Machine(
        now.device, cores(), now.threads, now.dtype, now.torch, now.transformers, now.blendrag
    )
