"""Whether a picture can be drawn, found out before anything is measured for it.

Owns the checks of ``--plot`` and of other files that a measurement ends in: matplotlib is an extra, and
imported only where a picture is asked for. Does not know what is drawn, nor how it looks
(:mod:`blendrag.cli.figures`).
"""

from __future__ import annotations

import os
from pathlib import Path

from blendrag.errors import InvalidInputError


def require_place(option: str, path: Path, suffix: str) -> None:
    """Raise :class:`InvalidInputError` unless ``path`` could become a file of that kind."""
    folder = path.absolute().parent
    is_place = folder.is_dir() and os.access(folder, os.W_OK) and not path.is_dir()
    if path.suffix.lower() != suffix or not is_place:
        raise InvalidInputError(
            f"{option} {path} cannot be written, expected a file that ends in {suffix} in a directory that "
            "exists and can be written"
        )


def require_plot(path: Path | None) -> None:
    """Raise :class:`InvalidInputError` for a picture that could not be drawn into ``path``, if one is asked
    for: the place is none, or matplotlib is not installed."""
    if path is None:
        return
    require_place("--plot", path, ".png")
    require_matplotlib(f"--plot {path}")


def require_matplotlib(what: str) -> None:
    """Raise :class:`InvalidInputError` where it is not installed; ``what`` needs it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as exc:
        raise InvalidInputError(
            f"{what} needs matplotlib, which is not installed; pip install 'blendrag[plots]'"
        ) from exc
