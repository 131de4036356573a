"""What other distributions add to the command line, found by entry points.

``blendrag.commands``: functions that add commands to the app (blendrag-lab). ``blendrag.ray``: ``ingest`` and
``serve``, which ``--ray`` calls (blendrag-ray).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import typer

from blendrag.cli.lifecycle import reporting
from blendrag.errors import InvalidInputError

#: Commands of blendrag-lab.
LAB_COMMANDS = ("adapt", "bench", "eval")
#: A command that is not installed ignores its arguments.
_ANY_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}


def add_commands(app: typer.Typer) -> None:
    """Add installed commands to ``app``; those of blendrag-lab say what to install if it is missing."""
    installed = {found.name: found for found in entry_points(group="blendrag.commands")}
    for found in installed.values():
        found.load()(app)
    if "lab" not in installed:
        for name in LAB_COMMANDS:
            add = app.command(name, add_help_option=False, context_settings=_ANY_ARGUMENTS)
            add(_missing_command(name))


def _missing_command(name: str) -> Callable[..., None]:
    @reporting
    def command(context: typer.Context) -> int:
        """Not installed: pip install 'blendrag[lab]', or from a checkout ./lab."""
        raise InvalidInputError(
            f"blendrag {name} needs blendrag-lab, which is not installed; pip install 'blendrag[lab]', "
            "or from a checkout ./lab"
        )

    return command


def ray_function(name: str) -> Callable[..., Any]:
    """``ingest`` or ``serve`` of blendrag-ray. Raises :class:`InvalidInputError` without it."""
    for found in entry_points(group="blendrag.ray", name=name):
        function: Callable[..., Any] = found.load()
        return function
    raise InvalidInputError(
        "--ray needs blendrag-ray, which is not installed; pip install 'blendrag[ray]', "
        "or from a checkout ./integrations/blendrag-ray"
    )
