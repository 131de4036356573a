"""Real models pass the gate."""

from __future__ import annotations

from blendrag.model import ModelAdapter
from blendrag.verify import verify


def test_a_real_model_is_blendable(real_adapter: ModelAdapter) -> None:
    result = verify(real_adapter)
    assert result.blendable, result.reason
