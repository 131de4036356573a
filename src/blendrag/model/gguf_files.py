"""Models in GGUF files: ``model.gguf`` or ``owner/repository:model.gguf``.

The quantised weights are unpacked once, to an ordinary directory in bfloat16 in the user's cache, and loaded
from there. Needs ``blendrag[gguf]``.
"""

from __future__ import annotations

import glob
import importlib.util
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import xxhash
from filelock import FileLock

from blendrag.config import cache_folder
from blendrag.errors import ModelLoadError, is_out_of_memory, is_out_of_space
from blendrag.model import gguf_header
from blendrag.store.durable import readable_size
from blendrag.wording import log_step

log = logging.getLogger(__name__)

_ON_HUB = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+):(?P<file>[^:]+\.gguf)")
#: Bytes of an unpacked weight.
_WEIGHT_BYTES = torch.bfloat16.itemsize
#: Weights and other numbers of a described model at most: for each weight in its file, and besides them.
MAX_DESCRIBED, MAX_MADE_UP = 2, 2**26


def is_gguf(name: str) -> bool:
    """Whether ``name`` is that of a GGUF file, here or on the hub."""
    return name.endswith(".gguf")


def unpacked_directory(name: str) -> Path:
    """The directory of the unpacked model; unpacks it if it is not there.

    Raises :class:`ModelLoadError` for a file that is missing, damaged or of an unknown architecture, if there
    is no room for its weights, and if the cache directory cannot be written.
    """
    file = _file_of(name)
    status = file.stat()
    of_path = f"{file.stem}-{xxhash.xxh3_64_hexdigest(str(file).encode())}"
    folder = cache_folder("gguf")
    target = folder / f"{of_path}-{status.st_size}-{status.st_mtime_ns}"
    if target.is_dir():
        return target
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(folder / f"{of_path}.lock"):
            if not target.is_dir():
                # of another version of the file, or left by a process that was killed
                for earlier in folder.glob(f"{glob.escape(of_path)}-*"):
                    shutil.rmtree(earlier, ignore_errors=True)
                _unpack(file, target)
    except OSError as exc:
        if is_out_of_memory(exc) or is_out_of_space(exc):
            raise
        raise ModelLoadError(
            f"{file.name} cannot be unpacked in {folder} ({exc.strerror or exc}); make that writable or name "
            "another directory in BLENDRAG_CACHE"
        ) from exc
    return target


def _file_of(name: str) -> Path:
    """The file at a path, or the downloaded file of a name on the hub."""
    file = Path(os.path.expanduser(name))
    if not file.is_file() and (on_hub := _ON_HUB.fullmatch(name)):
        from huggingface_hub import hf_hub_download

        try:
            file = Path(hf_hub_download(on_hub["repository"], on_hub["file"]))
        except (OSError, ValueError) as exc:
            raise ModelLoadError(
                f"{name!r} could not be loaded from the hub; expected owner/repository:file.gguf "
                f"({_first_line(exc)})"
            ) from exc
    if not file.is_file():
        raise ModelLoadError(
            f"there is no file {name}; expected a GGUF file, or owner/repository:file.gguf on the hub"
        )
    return file.resolve()


def _unpack(file: Path, target: Path) -> None:
    """``file`` as a directory of config, tokenizer and weights in bfloat16, completely or not at all."""
    weights = _weights(file)
    needed = weights * _WEIGHT_BYTES
    free = shutil.disk_usage(target.parent).free
    if needed > free:
        raise ModelLoadError(
            f"{file.name} needs {readable_size(needed)} for its unpacked weights, but {target.parent} has "
            f"{readable_size(free)} free; make room or name another directory in BLENDRAG_CACHE"
        )
    log_step(log, "unpacking %s once, %s in %s", file.name, readable_size(needed), target.parent)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{target.name}-") as scratch:
        try:
            _require_described(file, weights)
            _dequantise(file, Path(scratch))
        except ModelLoadError:
            raise
        except Exception as exc:
            if is_out_of_memory(exc) or is_out_of_space(exc):
                raise
            raise ModelLoadError(
                f"{file} cannot be unpacked: {_first_line(exc)}; expected a causal LM of an architecture "
                "that transformers reads from GGUF"
            ) from exc
        os.rename(scratch, target)
        os.mkdir(scratch)  # for the context manager to remove


def _weights(file: Path) -> int:
    """Numbers of all tensors. Raises :class:`ModelLoadError` for a damaged file."""
    if importlib.util.find_spec("gguf") is None:
        raise ModelLoadError(f"{file.name} needs the package gguf: pip install 'blendrag[gguf]'")
    try:
        return gguf_header.count_weights(file)
    except (OSError, ValueError, OverflowError) as exc:
        raise ModelLoadError(
            f"{file} is not a complete GGUF file ({_first_line(exc)}); download it again"
        ) from exc


def _require_described(file: Path, weights: int) -> None:
    """Raise :class:`ModelLoadError` if the model that the header describes is larger than the file's."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    described = sum(each.numel() for each in (*model.parameters(), *model.buffers()))
    if described > max(MAX_DESCRIBED * weights, weights + MAX_MADE_UP):
        raise ModelLoadError(
            f"{file} describes a model of {described:,} weights and holds {weights:,}; download it again"
        )


def _dequantise(file: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model: Any
    model, report = AutoModelForCausalLM.from_pretrained(
        **source,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
    )
    if missing := sorted(report["missing_keys"]):  # transformers has made them up
        raise ModelLoadError(
            f"{file} lacks {len(missing)} weights, such as {missing[0]}; expected a complete model in one "
            "file (merge the parts of a split one with llama-gguf-split --merge)"
        )
    # transformers 5.17 leaves the marks of a quantised model, which cannot be saved
    model.config.__dict__.pop("quantization_config", None)
    model.hf_quantizer, model.is_quantized = None, False
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def _first_line(exc: BaseException) -> str:
    text = str(exc).strip() or type(exc).__name__
    return text.splitlines()[0][:200]
