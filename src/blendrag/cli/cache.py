"""``blendrag cache``: what is kept on this machine outside of stores, and its removal. Loads no torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from blendrag.cli import interrupt, options
from blendrag.cli.groups import ListingGroup
from blendrag.cli.lifecycle import DONE, FAILED, begin, removal_confirmed, reporting
from blendrag.cli.output import count, echo, print_json, say
from blendrag.config import CacheFolder, cache_folder, settings
from blendrag.errors import StoreUnavailableError
from blendrag.store.durable import readable_size

app = typer.Typer(
    name="cache",
    cls=ListingGroup,
    help="List or remove what is kept outside of stores. Lists it without a command.",
    rich_markup_mode=None,
)

#: What is kept, by what is removed together.
Kind = Literal[CacheFolder, "runs"]
_ABOUT: dict[str, str] = {
    "verdicts": "what was measured of models and of this machine; measured again if removed",
    "decode-weights": "packed copies of weights; made again at the next answer",
    "gguf": "unpacked GGUF files; unpacked again when they are loaded",
    "runs": "interrupted runs of blendrag eval",
    "other": "not known to this version; never removed",
}
#: Names of the files of interrupted runs.
_RUNS = "eval-*.jsonl"


@dataclass(frozen=True)
class CachedKind:
    """All files of one kind."""

    kind: str
    path: str
    files: int
    size_bytes: int


@app.command("list")
@reporting
def list_cache(json: options.Json = False, verbose: options.Verbose = False) -> int:
    """List what is kept outside of stores. Says where it is, and how large."""
    begin(verbose, "nothing was changed", loads_torch=False)
    root, found = _root(), _survey()
    if json:
        print_json({"directory": str(root), "kinds": [asdict(each) for each in found]})
        return DONE
    echo(f"{root}: {readable_size(sum(each.size_bytes for each in found))}")
    for each in found:
        files = count(each.files, "file")
        echo(f"  {each.kind}: {readable_size(each.size_bytes)}, {files}; {_ABOUT[each.kind]}")
    say("note", "downloaded models are elsewhere: blendrag models lists them")
    return DONE


@app.command()
@reporting
def clear(
    only: Annotated[
        Kind | None, options.one_of("Only this kind. [default: all but other]", Kind)
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Skip confirmation.")] = False,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Remove what is kept outside of stores. What is needed is made again."""
    begin(verbose, "nothing was removed", loads_torch=False)
    kinds = get_args(Kind) if only is None else (only,)
    chosen = [each for each in _survey() if each.kind in kinds]
    size_bytes = sum(each.size_bytes for each in chosen)
    what = f"{', '.join(each.kind for each in chosen)}, {readable_size(size_bytes)}, of {_root()}"
    if chosen and not yes and not removal_confirmed(what):
        say("note", "nothing was removed")
        return FAILED
    interrupt.expect("the rest is intact; repeat the command to go on")
    for each in chosen:
        _remove(each.kind)
    if json:
        print_json({"removed": [asdict(each) for each in chosen], "removed_bytes": size_bytes})
    else:
        echo(
            f"{count(sum(each.files for each in chosen), 'file')} removed, {readable_size(size_bytes)}"
        )
    return DONE


def _root() -> Path:
    return settings().cache.expanduser().absolute()


def _survey() -> list[CachedKind]:
    """What there is of each kind."""
    places: dict[str, list[Path]] = {kind: _places(kind) for kind in get_args(Kind)}
    known = {path for paths in places.values() for path in paths}
    with suppress(OSError):
        places["other"] = [path for path in sorted(_root().iterdir()) if path not in known]
    found = []
    for kind, paths in places.items():
        sizes = [size for path in paths for size in _sizes(path)]
        if sizes:
            path = paths[0] if kind in get_args(CacheFolder) else _root()
            found.append(CachedKind(kind, str(path), len(sizes), sum(sizes)))
    return found


def _places(kind: str) -> list[Path]:
    if kind in get_args(CacheFolder):
        return [cache_folder(kind).absolute()]  # type: ignore[arg-type]
    return sorted(_root().glob(_RUNS))


def _sizes(path: Path) -> Iterator[int]:
    """Bytes of each file below ``path``, or of the file."""
    files = (
        [path]
        if not path.is_dir() or path.is_symlink()
        else [Path(folder) / name for folder, _, names in os.walk(path) for name in names]
    )
    for file in files:
        with suppress(OSError):
            yield file.lstat().st_size


def _remove(kind: str) -> None:
    for path in _places(kind):
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except FileNotFoundError:  # another process removes it, too
            pass
        except OSError as exc:
            raise StoreUnavailableError(
                f"{exc.filename or path} cannot be removed ({exc.strerror}); the rest may be "
                "gone already; correct that and repeat the command"
            ) from exc
