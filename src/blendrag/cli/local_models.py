"""The models on this machine: which files make one, where they are looked for, and how large they are.

Imports no torch, and runs nothing of a model. Whether one can be blended is measured (``blendrag verify``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from blendrag.config import DEMO_MODEL
from blendrag.demo import demo_model_path
from blendrag.demo.smollm2 import smollm2_path
from blendrag.errors import InvalidInputError
from blendrag.store import regular_files

#: The option that takes a model.
Use = Literal["--model", "--embedder", "--reranker"]
#: Ends of the names of classes that write text.
_WRITERS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
_WEIGHTS = (".safetensors", ".bin")
#: Folders below a directory that is searched.
MAX_DEPTH = 3
MAX_CONFIG_BYTES = 4 * regular_files.MIB


@dataclass(frozen=True)
class LocalModel:
    """A model that a command can be given."""

    name: str
    """As the option takes it."""
    use: Use
    kind: str
    """Its class in transformers, or GGUF."""
    size_bytes: int
    place: str
    is_complete: bool = True
    """Whether its weights are there."""


def shipped() -> Iterator[LocalModel]:
    """The embedded model, SmolLM2 and MiniLM, as far as their packages are installed."""
    from blendrag.corpus.embedder import MINILM_OFFLINE, packaged_minilm

    yield from _in_folder(demo_model_path(), DEMO_MODEL)
    if (file := smollm2_path()) is not None:
        yield _gguf(file, str(file))
    if (folder := packaged_minilm()) is not None:
        yield from _in_folder(folder, MINILM_OFFLINE)


def cached() -> tuple[list[LocalModel], Path]:
    """Those in the hub's local cache, and where that is."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    cache = Path(constants.HF_HUB_CACHE)
    try:
        repositories = scan_cache_dir(cache).repos
    except CacheNotFound:
        return [], cache
    found = [
        model
        for each in repositories
        if each.repo_type == "model" and each.revisions
        for model in _of_repository(each)
    ]
    return sorted(found, key=lambda model: model.name.casefold()), cache


def _of_repository(repository: Any) -> Iterator[LocalModel]:
    """The models of the revision that is loaded without another being named, else of the latest."""
    revision = repository.refs.get("main") or max(
        repository.revisions, key=lambda each: each.last_modified
    )
    folder, name = Path(revision.snapshot_path), str(repository.repo_id)
    yield from _in_folder(folder, name)
    for file in sorted(folder.rglob("*.gguf")):
        yield _gguf(file, f"{name}:{file.relative_to(folder)}")


def below(directory: Path) -> list[LocalModel]:
    """Those in ``directory`` and its folders. Raises :class:`InvalidInputError`."""
    if not directory.is_dir():
        raise InvalidInputError(
            f"--folder {directory} is no directory, expected one that has models in it"
        )
    root = directory.resolve()
    found = []
    for folder, folders, files in os.walk(root):
        depth = len(Path(folder).relative_to(root).parts)
        folders[:] = sorted(name for name in folders if name[0] != "." and depth < MAX_DEPTH)
        models = [*_in_folder(Path(folder), folder)]
        if models:
            folders.clear()  # its parts
        ggufs = (Path(folder) / name for name in sorted(files) if name.endswith(".gguf"))
        found += [*models, *(_gguf(file, str(file)) for file in ggufs)]
    return found


def _in_folder(folder: Path, name: str) -> Iterator[LocalModel]:
    """The model whose config is in ``folder``, unless blendrag has no use for it."""
    config = _config(folder)
    is_embedder = (folder / "modules.json").exists()
    kinds = [str(each) for each in _listed(config.get("architectures"))]
    kind = next((each for each in kinds if each.endswith(_WRITERS)), "")
    ranks = any(each.endswith("ForSequenceClassification") for each in kinds)
    use: Use = "--embedder" if is_embedder else "--reranker" if ranks else "--model"
    if not config or not (is_embedder or ranks or kind):
        return
    files = [file for file in folder.rglob("*") if file.is_file() and file.suffix != ".gguf"]
    size_bytes = sum(map(_size, files))
    is_complete = any(file.suffix in _WEIGHTS for file in files)
    shown = kind if use == "--model" else (kinds[0] if kinds else str(config.get("model_type")))
    yield LocalModel(name, use, shown, size_bytes, str(folder), is_complete)


def _listed(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list) else ()


def _config(folder: Path) -> Mapping[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(
            regular_files.read_bytes(folder / "config.json", MAX_CONFIG_BYTES, follow=True)
        )
        if isinstance(found, dict):
            return found
    return {}


def _gguf(file: Path, name: str) -> LocalModel:
    return LocalModel(name, "--model", "GGUF", _size(file), str(file))


def _size(file: Path) -> int:
    """Bytes of a file, or of what a link leads to; 0 if that is gone."""
    with suppress(OSError):
        return file.stat().st_size
    return 0
