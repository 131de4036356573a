"""The adapter round a Hugging Face causal LM: loading, structure, identity, encoding."""

import logging

from blendrag.model.sharing import without_collection


def _import_models() -> None:
    """Import transformers' models without the warnings of torchao 0.18, if it is installed, about kernels for
    other machines and about its own enums: whoever loads a model cannot act on them."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with without_collection():
            import transformers.modeling_utils  # noqa: F401
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


_import_models()

from blendrag.model.adapter import ModelAdapter  # noqa: E402
from blendrag.model.loading import load_adapter  # noqa: E402

__all__ = ["ModelAdapter", "load_adapter"]
