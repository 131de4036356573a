"""What all benches share on the command line: their options, and how a function becomes a command."""

from __future__ import annotations

import inspect
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer
from rich.text import Text

from blendrag.cli.options import Device, Dtype, Json, number, require_plot
from blendrag.cli.output import console, print_json
from blendrag.model import ModelAdapter
from blendrag.planning.machine import cores
from blendrag.planning.profile import conditions_of
from blendrag_lab.plots import write_png
from blendrag_lab.tables import ResultTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "Count",
    "Device",
    "Dtype",
    "Geometry",
    "Json",
    "Plot",
    "Ratio",
    "Rounds",
    "Tier",
    "number",
]

Geometry = Annotated[
    str | None, typer.Option(help="Random weights of a known shape, e.g. qwen2.5-0.5b.")
]
Count = Annotated[int, number("", 1, kind=int)]
Ratio = Annotated[float, number("Recompute ratio r.", 0, 1)]
Rounds = Annotated[int, number("Rounds; results are medians.", 1, kind=int)]
Tier = Annotated[
    str, typer.Option(help="memory, disk, cold (page cache dropped) or a throughput, e.g. 0.5GB/s.")
]
Plot = Annotated[Path | None, typer.Option(help="Draw the result to this PNG.", show_default=False)]

#: Options that say where results go, not what is measured.
DESTINATIONS = ("as_json", "plot")
#: In place of a default: the command does not have this option.
OMIT = object()

Result = TypeVar("Result")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Bench:
    """A bench's command, the type of its results, and how they are shown."""

    command: Callable[..., None]
    call: Callable[..., Any]
    """The measurement, given what the command takes as keywords."""
    groups: Mapping[str, Any]
    """Parameters that are dataclasses, whose fields are options; ``call`` also takes them whole."""
    result: Any
    table: Callable[[Any], ResultTable]
    figure: Callable[[Any], Figure] | None


#: Filled by :func:`bench` when a bench's module is imported.
BENCHES: dict[str, Bench] = {}


def bench(
    table: Callable[[Result], ResultTable],
    figure: Callable[[Result], Figure] | None = None,
    **defaults: Any,
) -> Callable[[F], F]:
    """Make a command of a function that measures; its parameters are the command's options.

    The fields of a parameter that is a dataclass are options too. ``defaults`` are this command's defaults
    of such fields, and :data:`OMIT` leaves an option out. The command passes a ``tick`` that shows
    progress, prints the result as ``table`` or JSON, and with ``figure`` has the option ``--plot``.
    """

    def decorate(measure: F) -> F:
        signature = inspect.signature(measure, eval_str=True)
        own = [p for p in signature.parameters.values() if p.name != "tick"]
        groups: dict[str, Any] = {p.name: p.annotation for p in own if is_dataclass(p.annotation)}

        def call(**given: Any) -> Any:
            for name, group in groups.items():
                known = {field.name for field in fields(group)}
                preset = {n: v for n, v in defaults.items() if n in known and v is not OMIT}
                named = {field: given.pop(field) for field in known & given.keys()}
                if name not in given:
                    given[name] = group(**{**preset, **named})
            return measure(**given)

        def command(
            context: typer.Context, as_json: bool, plot: Path | None = None, **given: Any
        ) -> None:
            require_plot(plot)
            with console(err=True).status("loading") as status:
                result = call(**given, tick=lambda text: status.update(Text(text)))
            if as_json:
                about = {"command": command_line(context), **asdict(result)}
                print_json(about, indent=2)
            else:
                table(result).print()
            if plot is not None and figure is not None:
                write_png(figure(result), plot)

        options = [Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context)]
        for parameter in own:
            if parameter.name not in groups:
                options.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))
                continue
            hints = get_type_hints(groups[parameter.name], include_extras=True)
            for field in fields(groups[parameter.name]):
                default = defaults.get(field.name, field.default)
                if default is not OMIT:
                    options.append(_option(field.name, hints[field.name], default))
        if figure is not None:
            options.append(_option("plot", Plot, None))
        options.append(_option("as_json", Json, False))
        command.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in options}
        BENCHES[measure.__name__] = Bench(
            command, call, groups, signature.return_annotation, table, figure
        )
        return measure

    return decorate


def _option(name: str, annotation: Any, default: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def command_line(context: typer.Context) -> str:
    """The command to type, with the options that were given, without :data:`DESTINATIONS`."""
    words = ["blendrag", "bench", context.info_name or ""]
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE" and name not in DESTINATIONS:
            words.append(max(parameter.opts, key=len))
            value = context.params[name]
            words += [] if isinstance(value, bool) else [without_place(str(value))]
    return shlex.join(words)


def without_place(text: str) -> str:
    """An absolute path without its directories, which are this machine's; other texts unchanged."""
    return os.path.basename(text) if os.path.isabs(text) else text


def machine_of(adapter: ModelAdapter) -> str:
    """The machine that the loaded model runs on: dtype, hardware and versions, without the host's name."""
    now = conditions_of(adapter, adapter.identity.namespace)
    return (
        f"{now.dtype} on {now.device}, {now.threads} of {cores()} CPU cores; torch {now.torch}, transformers "
        f"{now.transformers}"
    )
