"""Which library may speak on stderr: ours always, others only with ``--verbose``."""

from __future__ import annotations

import logging
import os
import warnings

import typer

_SILENT = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}
_CHATTY = (
    "transformers", "sentence_transformers", "huggingface_hub", "peft", "torch", "faiss",
    "torchao", "torch.utils._pytree",  # torchao 0.18 warns at every import, about GPU kernels and its enums
)  # fmt: skip


class _Echo(logging.Handler):
    """Our warnings, as the sentences they are."""

    def emit(self, record: logging.LogRecord) -> None:
        typer.echo(f"{record.levelname.lower()}: {record.getMessage()}", err=True)


def set_up(verbose: bool) -> None:
    """Call before torch or transformers is imported: they read their environment then."""
    ours = logging.getLogger("blendrag")
    ours.handlers[:] = [_Echo()]
    ours.propagate = False
    ours.setLevel(logging.INFO if verbose else logging.WARNING)
    if verbose:
        return
    for name, value in _SILENT.items():
        os.environ.setdefault(name, value)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
