"""The commands. Each parses, calls the engine, prints; heavy imports happen inside."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import entry_points
from typing import Annotated

import typer

from blendrag import __version__
from blendrag.cli import options, output
from blendrag.cli.ask import ask
from blendrag.cli.calibrate import calibrate
from blendrag.cli.ingest import ingest, remove
from blendrag.cli.profile import profile
from blendrag.cli.starting import begin
from blendrag.cli.status import DONE, REFUSED_MODEL, reporting
from blendrag.cli.store import app as store_commands

app = typer.Typer(
    name="blendrag",
    help="Answer questions over documents with a local Hugging Face model, from precomputed KV.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"blendrag {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


@reporting
def verify(
    model: Annotated[str, typer.Argument(help="Hub id, directory, or demo.", show_default=False)],
    dtype: options.Dtype = None,
    device: options.Device = None,
    lora: options.Lora = None,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Measure whether this model's KV may be reused; exit status 3 if not."""
    begin(verbose, "the model was not verified")
    from blendrag.config import settings
    from blendrag.fusor.gate import verify as run_gate
    from blendrag.model.loading import load_adapter

    adapter = load_adapter(
        model,
        dtype or settings().dtype,
        device or settings().device,
        str(lora) if lora else None,
        trust_remote_code,
    )
    result = run_gate(adapter)
    if json:
        output.print_json(result.as_dict())
    else:
        output.print_verification(model, result)
    return DONE if result.blendable else REFUSED_MODEL


@reporting
def demo(
    store: options.Store = None,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Ingest the demo corpus and compare full prefill, reuse and blend on its questions."""
    begin(verbose, "the tour is over")
    from blendrag.demo.tour import print_tour, take_tour

    tour = take_tour(store)
    if json:
        output.print_json(tour.as_dict())
    else:
        print_tour(tour)
    return DONE


app.command()(ingest)
app.command()(remove)
app.command()(ask)
app.command()(verify)
app.command()(demo)
app.command()(calibrate)
app.command()(profile)
app.add_typer(store_commands)

# Commands of extras: each entry point is a function that takes this app and adds its commands. It raises
# ImportError where the extra is not installed.
for extra in entry_points(group="blendrag.commands"):
    with suppress(ImportError):
        extra.load()(app)
