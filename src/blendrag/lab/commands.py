"""``blendrag bench``, ``eval`` and ``lab``: commands of the extra ``blendrag[lab]``."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import typer

from blendrag.cli.lifecycle import DONE, INTERRUPTED, begin, reporting
from blendrag.errors import InvalidInputError

#: Modules that the extra installs.
REQUIREMENTS = ("matplotlib", "rouge_score")

#: The command gets all arguments as they were typed.
_RAW_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``. Without the extra, each prints how to install it."""
    missing = [name for name in REQUIREMENTS if find_spec(name) is None]
    if missing:
        for name in ("bench", "eval", "lab"):
            add = app.command(name, add_help_option=False, context_settings=_RAW_ARGUMENTS)
            add(_unavailable(name, missing))
        return
    from blendrag.lab.evaluation.command import evaluate

    app.command("eval")(evaluate)
    app.command(add_help_option=False, context_settings=_RAW_ARGUMENTS)(bench)
    app.add_typer(_simulations(), name="lab")


@reporting
def bench(context: typer.Context) -> int:
    """Measure times and memory; see blendrag bench --help."""
    begin(verbose=False, if_interrupted="the measurement was abandoned")
    command = typer.main.get_command(_benches(context.args[0] if context.args else ""))
    status = command.main(context.args, prog_name="blendrag bench", standalone_mode=False)
    if status == INTERRUPTED:  # typer turns Ctrl-C into this status without a message
        raise KeyboardInterrupt
    return status if isinstance(status, int) else DONE


def _benches(chosen: str) -> typer.Typer:
    """All benches. Only the chosen one is imported, because importing a bench imports torch."""
    from blendrag.lab.bench import SUMMARIES, load_bench

    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        help="Measure speed: interleaved rounds, medians.",
    )
    for name, summary in SUMMARIES.items():
        command = load_bench(name).command if name == chosen else lambda: None
        app.command(name, help=summary)(command)
    return app


def _simulations() -> typer.Typer:
    from blendrag.lab.simulation.simulate import command

    app = typer.Typer(no_args_is_help=True, help="Simulate what is too large to measure.")
    app.callback()(lambda: None)  # else the only command would have no name
    app.command("simulate")(command)
    return app


def _unavailable(name: str, missing: list[str]) -> Callable[..., None]:
    @reporting
    def command(context: typer.Context) -> int:
        """Not installed: pip install 'blendrag[lab]'."""
        raise InvalidInputError(
            f"blendrag {name} needs {', '.join(missing)}; pip install 'blendrag[lab]'"
        )

    return command
