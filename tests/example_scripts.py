"""Runs scripts and notebooks of ``examples/`` in this process, with shared libraries and embedded model."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
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


def run_notebook(name: str) -> list[str]:
    """Run the code cells of a notebook: what each printed, which must be what is stored but for figures."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for number, cell in enumerate(json.loads((EXAMPLES / name).read_text("utf-8"))["cells"]):
        if cell["cell_type"] == "code":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile("".join(cell["source"]), f"{name}[{number}]", "exec"), names)
            printed.append(out.getvalue())
            stored = "".join("".join(output["text"]) for output in cell["outputs"])
            assert _without_figures(printed[-1]) == _without_figures(stored), (printed[-1], stored)
    return printed


def _without_figures(text: str) -> str:
    return re.sub(r"\d+", "N", text)
