"""Which model to use with a store if the user names none: the one that the store was ingested with."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from blendrag.config import settings
from blendrag.corpus.corpus import Corpus
from blendrag.corpus.database import DIRECTORY, FILE_NAME
from blendrag.corpus.manifest import check_recorded
from blendrag.errors import InvalidInputError

#: A model that only the store names must have one of these files.
SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")

T = TypeVar("T")


def model_for(
    model: T | None, root: Path, trust_remote_code: bool = False, for_ingest: bool = False
) -> T | str:
    """The model asked for, else that of ``BLENDRAG_MODEL``, else the one that the store at ``root`` names.

    Raises :class:`CorpusError` without a store, and :class:`InvalidInputError` if the store names no model
    or if code would be run from a model that only the store names.
    """
    given = given_model(model, trust_remote_code)
    if given is not None:
        return given
    if for_ingest and not (root / DIRECTORY / FILE_NAME).exists():
        raise _unnamed(root)
    return model_of_store(root)


def model_of_store(root: Path) -> str:
    """The model that the store at ``root`` names. Raises as :func:`model_for`."""
    with Corpus.open(root, read_only=True) as corpus:
        manifest = corpus.manifest_or_none
    if manifest is None:
        raise _unnamed(root)
    return recorded_model(manifest.model, root)


def given_model(model: T | None, trust_remote_code: bool = False) -> T | str | None:
    """The model asked for, else that of ``BLENDRAG_MODEL``.

    Raises :class:`InvalidInputError` if there is none, but its code is trusted.
    """
    if model is not None:
        return model
    if (default := settings().model) is not None:
        return default
    if trust_remote_code:
        raise InvalidInputError(
            "trust_remote_code was given without a model; a store cannot choose which code is run, so name "
            "the model too"
        )
    return None


def recorded_model(named: str, root: Path) -> str:
    """``named``, which only the store at ``root`` or its remote names.

    Raises :class:`InvalidInputError` if loading it could run code.
    """
    check_recorded(named, root, "model")
    folder = Path(named)
    if folder.is_dir() and not any((folder / name).exists() for name in SAFETENSORS):
        raise InvalidInputError(
            f"store {root} names the model {named!r}, which has no {SAFETENSORS[0]}; other weights are "
            f"loaded only if you name the model yourself: {named}"
        )
    if (folder / "adapter_config.json").exists():
        raise InvalidInputError(
            f"store {root} names the model {named!r}, an adapter of another model; it is loaded only if "
            f"you name it yourself: {named}"
        )
    return named


def _unnamed(root: Path) -> InvalidInputError:
    return InvalidInputError(
        f"store {root} names no model yet, expected one to fill it with; add --model with a hub id, a "
        "directory or a GGUF file, such as --model Qwen/Qwen2.5-0.5B-Instruct (--model demo is a toy: it "
        "answers only questions about its own corpus)"
    )
