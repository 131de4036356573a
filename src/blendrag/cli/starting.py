"""How a command begins: who may speak, what Ctrl-C will say, which engine it works with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from blendrag.cli import interrupt, options, quiet

if TYPE_CHECKING:
    from blendrag.engine import BlendEngine


def begin(verbose: bool, if_interrupted: str) -> None:
    """Before anything heavy is imported. Raises :class:`InvalidInputError` for an environment that cannot be
    used."""
    quiet.set_up(verbose)
    options.check_environment()
    interrupt.expect(if_interrupted)


def engine_for(
    model: str | None,
    store: Path | None,
    lora: Path | None = None,
    for_ingest: bool = False,
    **given: Any,
) -> BlendEngine:
    """An engine with the model asked for, else with the store's own."""
    from blendrag.engine import BlendEngine

    adapter = str(lora) if lora else None
    return BlendEngine(options.model_for(model, store, for_ingest), store, lora=adapter, **given)
