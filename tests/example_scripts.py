"""Runs files of ``examples/`` in this process, where they share loaded libraries and the embedded model."""

from __future__ import annotations

import importlib.util
import runpy
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.append(str(EXAMPLES))  # examples import one another


def run(name: str, *arguments: str, store: Path | None = None) -> None:
    """Run an example as a script. ``store`` takes the place of its temporary store."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *arguments])
        if store is not None:
            patch.setattr(tempfile, "TemporaryDirectory", lambda: nullcontext(str(store)))
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def load(name: str) -> Any:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(Path(name).stem, EXAMPLES / name)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made
