"""``blendrag models``: the models on this machine, and downloads from the hub. Loads no torch."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from blendrag.cli import interrupt, local_models, options
from blendrag.cli.groups import ListingGroup
from blendrag.cli.lifecycle import DONE, begin, reporting
from blendrag.cli.local_models import LocalModel, Use
from blendrag.cli.output import count, echo, print_json, say
from blendrag.errors import ModelLoadError
from blendrag.store.durable import readable_size
from blendrag.wording import first_line, quoted

if TYPE_CHECKING:
    from huggingface_hub import DryRunFileInfo

app = typer.Typer(
    name="models",
    cls=ListingGroup,
    help="List or download models. Lists them without a command.",
    rich_markup_mode=None,
)

#: What is loaded of a model on the hub. The weights of other programs are not.
_LOADED = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py", "*.safetensors"]
_OTHERS = ["onnx/*", "openvino/*", "coreml/*", "original/*", "consolidated*"]
#: The weights of models that have none in safetensors.
_PICKLES = ["pytorch_model*.bin", "pytorch_model.bin.index.json"]
_GGUF = re.compile(r"(?P<repository>[^:]+):(?P<file>[^:]+\.gguf)")


@app.command("list")
@reporting
def list_models(
    folder: Annotated[
        list[Path] | None,
        options.optional("Also list the models in this directory; repeatable.", metavar="PATH"),
    ] = None,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """List the models on this machine. Some come with blendrag or packages, others are in the hub's cache."""
    begin(verbose, "nothing was changed", loads_torch=False)
    in_cache, cache = local_models.cached()
    found = [*local_models.shipped(), *in_cache]
    for each in folder or ():
        below = local_models.below(each)
        if not below:
            say("note", f"no model in --folder {each}: no config.json of one, and no GGUF file")
        found += below
    if json:
        print_json({"hub_cache": str(cache), "models": [asdict(each) for each in found]})
        return DONE
    for use in get_args(Use):
        if of_use := [each for each in found if each.use == use]:
            echo(f"{use}", *map(_row, of_use))
    of_hub = readable_size(sum(each.size_bytes for each in in_cache))
    say(
        "note",
        f"the hub's models are in {cache}, {of_hub}; whether the KV of a model can be reused is measured by "
        "blendrag verify NAME",
    )
    return DONE


def _row(model: LocalModel) -> str:
    incomplete = (
        "" if model.is_complete else f"; without weights: blendrag models pull {model.name}"
    )
    return f"  {model.name}: {model.kind}, {readable_size(model.size_bytes)}{incomplete}"


@app.command()
@reporting
def pull(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="owner/name on the hub, or owner/name:file.gguf.",
            show_default=False,
        ),
    ],
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Download what is missing of a model on the hub into its local cache."""
    kept = "complete files are kept; repeat the command to go on"
    begin(verbose, kept, loads_torch=False, shows_downloads=True)
    _require_of_hub(name)
    from huggingface_hub import constants, snapshot_download

    gguf = _GGUF.fullmatch(name)
    repository = gguf["repository"] if gguf else name
    files = _planned(name, repository, gguf["file"] if gguf else None)
    whole = sum(each.file_size or 0 for each in files)
    missing = sum(each.file_size or 0 for each in files if each.will_download)
    here = f", of which {readable_size(whole - missing)} are here already" * (missing < whole)
    say("note", f"pulling {name}: {count(len(files), 'file')}, {readable_size(whole)}{here}")
    _require_room(name, Path(constants.HF_HUB_CACHE), missing)
    interrupt.expect(kept)
    names = [_exactly(each.filename) for each in files]
    try:
        place = snapshot_download(repository, allow_patterns=names)
    except Exception as exc:
        raise _failure(name, exc) from exc
    if json:
        about = {"name": name, "path": place, "files": len(files), "size_bytes": whole}
        print_json({**about, "downloaded_bytes": missing})
    else:
        echo(f"{name} is in {place}")
    return DONE


def _require_of_hub(name: str) -> None:
    """Raise :class:`ModelLoadError` for a model that a package holds, and for a path to one."""
    use = next((each.use for each in local_models.shipped() if each.name == name), None)
    if use is None and Path(name).is_absolute() and Path(name).exists():
        use = "--model"
    if use is not None:
        raise ModelLoadError(
            f"{quoted(name)} is on this machine already, expected a model of the hub; give it as "
            f"{use} {name}"
        )


def _planned(name: str, repository: str, gguf: str | None) -> list[DryRunFileInfo]:
    """The files to download. Raises :class:`ModelLoadError`."""
    every = _listed(name, repository, [_exactly(gguf)] if gguf else [*_LOADED, *_PICKLES, "*.gguf"])
    ggufs = [each for each in every if each.filename.endswith(".gguf")]
    if gguf is not None:
        if not ggufs:
            raise ModelLoadError(
                f"{repository} has no file {gguf!r} on the hub; its own are named by blendrag models pull "
                f"{repository}"
            )
        return ggufs
    others = [each for each in every if each not in ggufs]
    tensors = [each for each in others if each.filename.endswith(".safetensors")]
    pickles = [each for each in others if ".bin" in each.filename]
    if not (tensors or pickles):
        named = ", ".join(
            f"{each.filename} ({readable_size(each.file_size or 0)})" for each in ggufs
        )
        remedy = (
            f"name one of its GGUF files, as {repository}:FILE: {named}"
            if ggufs
            else "check the name"
        )
        raise ModelLoadError(f"{repository} has no weights that transformers loads; {remedy}")
    return [each for each in others if not (tensors and each in pickles)]


def _listed(name: str, repository: str, patterns: Sequence[str]) -> list[DryRunFileInfo]:
    """The files that match, without downloading any."""
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(
            repository, allow_patterns=[*patterns], ignore_patterns=_OTHERS, dry_run=True
        )
    except Exception as exc:
        raise _failure(name, exc) from exc


def _exactly(file: str) -> str:
    """The pattern that only this name matches."""
    return re.sub(r"([*?[])", r"[\1]", file)


def _require_room(name: str, cache: Path, needed_bytes: int) -> None:
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if needed_bytes > free:
        raise ModelLoadError(
            f"{name} needs {readable_size(needed_bytes)}, but {cache} has {readable_size(free)} free; make "
            "room or name another directory in HF_HUB_CACHE"
        )


def _failure(name: str, error: Exception) -> ModelLoadError | Exception:
    """What went wrong at the hub, in a sentence; other errors as they are."""
    from huggingface_hub import errors

    causes = [error]
    while (cause := causes[-1].__cause__) is not None and isinstance(cause, Exception):
        causes.append(cause)

    def is_a(*kinds: type[Exception]) -> bool:
        return any(isinstance(each, kinds) for each in causes)

    if is_a(errors.HFValidationError):
        return ModelLoadError(
            f"{quoted(name)} is no name on the hub; expected owner/name, or owner/name:file.gguf"
        )
    if is_a(errors.OfflineModeIsEnabled):
        return ModelLoadError(
            f"{name} cannot be pulled, as HF_HUB_OFFLINE keeps all programs from the hub; unset it"
        )
    if is_a(errors.GatedRepoError):
        return ModelLoadError(
            f"{name} is gated; accept its terms on its page at the hub, and log in (hf auth login)"
        )
    if is_a(errors.RepositoryNotFoundError):
        return ModelLoadError(
            f"the hub has no public model {name}; check the name, or log in if it is private (hf auth login)"
        )
    if isinstance(error, OSError | errors.DryRunError) or is_a(OSError, errors.HfHubHTTPError):
        return ModelLoadError(
            f"{name} cannot be pulled ({first_line(causes[-1])}); check the connection and repeat the "
            "command, which goes on from here"
        )
    return error
