"""Paths → files to be read: which of a directory are taken, and which are left out. Reads no document."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from blendrag.errors import InvalidInputError
from blendrag.text.readers.formats import SUPPORTED_SUFFIXES

#: How the file ``format`` in the directory of a KV store begins.
_STORE_FORMAT = b"blendrag-kv "


class Inputs(NamedTuple):
    """What a list of paths amounts to."""

    files: list[Path]
    """To be read, in order, each once."""
    unsupported: list[Path]
    """Found in a directory with a suffix that no reader takes: not read, to be reported."""


def find_inputs(paths: Sequence[Path]) -> list[Path]:
    """Files to read: :func:`scan_inputs` without what was skipped."""
    return scan_inputs(paths).files


def scan_inputs(paths: Sequence[Path]) -> Inputs:
    """Files named, and supported files below directories named (recursive, sorted).

    Hidden files and directories and KV stores are left out, and directories that are links are not
    entered. A file named outright is always returned, so that reading it says why it cannot be read.
    Raises :class:`InvalidInputError` for a path that does not exist or a directory that cannot be
    listed.
    """
    files: dict[Path, None] = {}
    unsupported: dict[Path, None] = {}
    for path in map(Path, paths):
        try:
            is_directory, is_there = path.is_dir(), path.exists() or path.is_symlink()
        except OSError as exc:
            raise InvalidInputError(
                f"{path} cannot be looked at ({exc.strerror}); check its name and the permissions of "
                "the directories above it, or leave it out"
            ) from exc
        if is_directory:
            for found in _below(path):
                (files if found.suffix.lower() in SUPPORTED_SUFFIXES else unsupported)[found] = None
        elif is_there:
            files[path] = None
        else:
            raise InvalidInputError(
                f"{path} does not exist, expected a file or a directory; check the spelling"
            )
    return Inputs(list(files), [path for path in unsupported if path not in files])


def _below(directory: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise InvalidInputError(
            f"{error.filename} cannot be listed ({error.strerror}); "
            "change its permissions or leave it out"
        ) from error

    for folder, folders, names in os.walk(directory, onerror=refuse):
        folders[:] = sorted(
            name for name in folders if not (name.startswith(".") or _is_store(Path(folder, name)))
        )
        yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))


def _is_store(directory: Path) -> bool:
    mark = directory / "format"
    try:
        if not mark.is_file():
            return False
        with mark.open("rb") as file:
            return file.read(len(_STORE_FORMAT)) == _STORE_FORMAT
    except OSError:
        return False
