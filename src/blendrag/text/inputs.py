"""Which files an ingest reads: those that are named, and the documents below directories."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from blendrag.errors import InvalidInputError
from blendrag.store import regular_files
from blendrag.text import office_files
from blendrag.text.decoding import BEGINNING_BYTES, is_text

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

#: Left out of directories, as git ignores them; a directory that is named is searched.
EXCLUDED = (".*", "__pycache__", "node_modules")


class Inputs(NamedTuple):
    """The files found in a list of paths, each once."""

    files: list[Path]
    skipped: dict[str, list[str]]
    """Files of directories that are not read, by reason."""


class Patterns(NamedTuple):
    """Which files of directories are read, as in ``.gitignore``, relative to each directory."""

    include: tuple[str, ...] = ()
    """Only these; empty: all."""
    exclude: tuple[str, ...] = ()
    """Not these, nor :data:`EXCLUDED`."""


ALL = Patterns()


def scan_inputs(paths: Sequence[Path], patterns: Patterns = ALL, most: int = sys.maxsize) -> Inputs:
    """The files named, and the documents below the directories named (recursive, sorted).

    ``most``: no further directory is searched once there are so many files.

    Skips KV stores, and does not follow links to directories, out of the directory, or to files left out of
    it. A file named explicitly is always returned: reading it then reports why it cannot be read. Raises
    :class:`InvalidInputError` for a path that does not exist, a directory that cannot be listed, and a bad
    pattern.
    """
    include, exclude = _compiled(patterns.include), _compiled((*EXCLUDED, *patterns.exclude))
    files: dict[Path, None] = {}
    skipped: dict[Path, str] = {}
    for path in map(Path, paths):
        try:
            is_directory, exists = path.is_dir(), path.exists() or path.is_symlink()
        except OSError as exc:
            raise InvalidInputError(
                f"{path} cannot be accessed ({exc.strerror}); check its name and the permissions of "
                "the directories above it, or leave it out"
            ) from exc
        if is_directory:
            for found in _files_below(path, include, exclude) if len(files) < most else ():
                if why := _leads_away(found, path, exclude) or _why_skipped(found):
                    skipped[found] = why
                else:
                    files[found] = None
                    if len(files) >= most:
                        break
        elif exists:
            files[path] = None
        else:
            raise InvalidInputError(
                f"{path} does not exist, expected a file or a directory; check the spelling"
            )
    by_reason: dict[str, list[str]] = {}
    for path, why in skipped.items():
        if path not in files:
            by_reason.setdefault(why, []).append(str(path))
    return Inputs(list(files), by_reason)


def _compiled(patterns: Sequence[str]) -> GitIgnoreSpec:
    from pathspec import GitIgnoreSpec

    try:
        return GitIgnoreSpec.from_lines(patterns)
    except ValueError as exc:
        raise InvalidInputError(
            f"{', '.join(patterns)}: {exc}; expected patterns as in .gitignore, such as '*.md' or 'old/'"
        ) from exc


def _files_below(directory: Path, include: GitIgnoreSpec, exclude: GitIgnoreSpec) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise InvalidInputError(
            f"{error.filename} cannot be listed ({error.strerror}); "
            "change its permissions or leave it out"
        ) from error

    for folder, folders, names in os.walk(directory, onerror=refuse):
        inside = Path(folder).relative_to(directory)
        folders[:] = sorted(
            name
            for name in folders
            if not (exclude.match_file(f"{inside / name}/") or _is_store(Path(folder, name)))
        )
        for name in sorted(names):
            path = inside / name
            if not exclude.match_file(path) and (not len(include) or include.match_file(path)):
                yield directory / path


def _leads_away(path: Path, directory: Path, exclude: GitIgnoreSpec) -> str:
    """Why a link in a directory is not followed, or empty: who made the directory has not chosen other
    files of this machine."""
    if not path.is_symlink():
        return ""
    try:
        target = path.resolve(strict=True).relative_to(directory.resolve())
    except ValueError:
        return "a link out of the directory"
    except (OSError, RuntimeError):  # reading it reports why
        return ""
    return "a link to a file that is left out" if exclude.match_file(target) else ""


def _why_skipped(path: Path) -> str:
    """Why a file in a directory is no document, or empty."""
    if not path.is_file():
        return "not a file"
    try:
        with os.fdopen(regular_files.open_regular(path, follow=True), "rb") as file:
            beginning = file.read(BEGINNING_BYTES)
    except OSError:
        return ""  # reading it reports why
    if beginning is None:  # a queue of the kernel, such as /proc/kmsg
        return "not a file"
    if not beginning.strip():
        return "empty"
    if kind := office_files.kind_of(path, beginning):
        lacks = office_files.lacks_reader(kind)
        return f"{kind}, which needs {office_files.INSTALL}" if lacks else ""
    is_binary = office_files.is_unread(path, beginning) or not is_text(beginning)
    return "binary" if is_binary else ""


def _is_store(directory: Path) -> bool:
    try:
        mark = regular_files.read_bytes(directory / "format", regular_files.MIB)
    except OSError:
        return False
    return mark.startswith(b"blendrag-kv ")
