"""A bench's command, whose help names the selection policies there are."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class BenchCommand(TyperCommand):
    """Looks the policies up when help is asked for, not before: they come with torch."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for parameter in self.params:
            if parameter.name == "policy":
                parameter.help = policies()  # type: ignore[attr-defined, unused-ignore]
        super().format_help(ctx, formatter)


def policies() -> str:
    """All names that ``--policy`` takes."""
    from blendrag.fusor.selection import policy_names

    return f"{policy_names()}."
