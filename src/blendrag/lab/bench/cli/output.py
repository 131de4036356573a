"""What every bench prints as JSON: the command it was, the machine, then its figures."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from blendrag.model import ModelAdapter

#: Options that say where results go, not what is measured.
PLACES = ("as_json", "out", "plot")


def print_json(
    fields: Mapping[str, Any], context: typer.Context, adapter: ModelAdapter | None = None
) -> None:
    """``fields``, and before them the command; with ``adapter``, the machine and its software."""
    about: dict[str, Any] = {"command": command_line(context)}
    if adapter is not None:
        from blendrag.lab.bench.machine import machine_of

        about["machine"] = asdict(machine_of(adapter))
    typer.echo(json.dumps({**about, **fields}, indent=2))


def command_line(context: typer.Context) -> str:
    """The line to type, with the options that were given, without :data:`PLACES`."""
    return shlex.join(["blendrag", "bench", context.info_name or "", *_given(context)])


def is_given(context: typer.Context, parameter: str) -> bool:
    """Whether it was typed, be it as its default is."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def _given(context: typer.Context) -> Iterator[str]:
    for parameter in context.command.params:
        name = parameter.name or ""
        if not is_given(context, name) or name in PLACES:
            continue
        yield max(parameter.opts, key=len)
        value = context.params[name]
        if not isinstance(value, bool):
            yield str(value)
