"""What all benches share on the command line: options, progress, and how a result is printed."""

from __future__ import annotations

import inspect
import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer
from rich.console import Console

from blendrag.cli.options import Device, Dtype, Json
from blendrag.cli.plots import require_plot, write_png
from blendrag.lab.bench.rounds import Tick
from blendrag.lab.tables import Table
from blendrag.model import ModelAdapter
from blendrag.planning.profile import conditions_of, cores

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from blendrag.lab.bench.geometry import TimedModel

__all__ = ["Count", "Device", "Dtype", "Geometry", "Json", "Plot", "Ratio", "Rounds", "Tier"]

Geometry = Annotated[
    str | None, typer.Option(help="Random weights of a known shape, e.g. qwen2.5-0.5b.")
]
Count = Annotated[int, typer.Option(min=1)]
Ratio = Annotated[float, typer.Option(min=0.0, max=1.0, help="Recompute ratio r in [0, 1].")]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds; results are medians.")]
Tier = Annotated[
    str, typer.Option(help="memory, disk, cold (page cache dropped) or a throughput, e.g. 0.5GB/s.")
]
Plot = Annotated[Path | None, typer.Option(help="Draw the result to this PNG.", show_default=False)]

#: Options that say where results go, not what is measured.
DESTINATIONS = ("as_json", "out", "plot")
#: In place of a default: the command does not have this option.
OMIT = object()

R = TypeVar("R")
Result = TypeVar("Result")


# -- groups of options ----------------------------------------------------------------------------


def spread(**defaults: Any) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Replace every parameter that is a dataclass by its fields, which are options.

    ``defaults`` are this command's own defaults of fields; :data:`OMIT` leaves an option out.
    """

    def decorate(command: Callable[..., R]) -> Callable[..., R]:
        own = inspect.signature(command, eval_str=True).parameters.values()
        groups: dict[str, Any] = {p.name: p.annotation for p in own if is_dataclass(p.annotation)}
        options: list[Parameter] = []
        for parameter in own:
            if parameter.name in groups:
                options += _options(groups[parameter.name], defaults)
            else:
                options.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))

        @wraps(command)
        def run(**given: Any) -> R:
            for name, group in groups.items():
                named = {f.name for f in fields(group)} & given.keys()
                given[name] = group(**{field: given.pop(field) for field in named})
            return command(**given)

        run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in options}
        return run

    return decorate


def _options(group: Any, defaults: dict[str, Any]) -> Iterator[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        default = defaults.get(field.name, field.default)
        if default is not OMIT:
            kind = Parameter.KEYWORD_ONLY
            yield Parameter(field.name, kind, default=default, annotation=hints[field.name])


# -- progress and results -------------------------------------------------------------------------


def progress(text: str) -> Any:
    """Show on stderr what runs; ``update`` of the value changes the text."""
    return Console(stderr=True).status(text)


@dataclass(frozen=True)
class Machine:
    """Hardware, dtype and versions, without the host's name."""

    processor: str
    """Name of the GPU or the CPU."""
    cores: int
    """CPU cores that the process may use."""
    threads: int
    dtype: str
    """Of the model and of KV as computed."""
    torch: str
    transformers: str
    blendrag: str


def machine_of(adapter: ModelAdapter) -> Machine:
    """The machine that the loaded model runs on."""
    now = conditions_of(adapter, adapter.identity.namespace)
    return Machine(
        now.device, cores(), now.threads, now.dtype, now.torch, now.transformers, now.blendrag
    )


def show(
    result: Any,
    table: Callable[[Any], Table],
    context: typer.Context,
    as_json: bool,
    adapter: ModelAdapter | None = None,
) -> None:
    """Print a bench's result as a table, or as JSON with the command and, given a model, the machine."""
    if not as_json:
        table(result).print()
        return
    about: dict[str, Any] = {"command": command_line(context)}
    if adapter is not None:
        about["machine"] = asdict(machine_of(adapter))
    typer.echo(json.dumps({**about, **asdict(result)}, indent=2))


def run_bench(
    context: typer.Context,
    timed: TimedModel,
    measure: Callable[[ModelAdapter, Tick], Result],
    table: Callable[[Result], Table],
    as_json: bool,
    plot: Path | None = None,
    draw: Callable[[Result], Figure] | None = None,
) -> Result:
    """Load the model, measure, print the result and draw it to ``plot``."""
    require_plot(plot)
    adapter = timed.load()
    with progress("loading") as status:
        result = measure(adapter, status.update)
    show(result, table, context, as_json, adapter)
    if plot is not None and draw is not None:
        write_png(draw(result), plot)
    return result


def command_line(context: typer.Context) -> str:
    """The command to type, with the options that were given, without :data:`DESTINATIONS`."""
    words = ["blendrag", "bench", context.info_name or ""]
    for parameter in context.command.params:
        name = parameter.name or ""
        if is_given(context, name) and name not in DESTINATIONS:
            words.append(max(parameter.opts, key=len))
            value = context.params[name]
            words += [] if isinstance(value, bool) else [str(value)]
    return shlex.join(words)


def is_given(context: typer.Context, parameter: str) -> bool:
    """Whether the option was typed, even with its default value."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"
