"""``blendrag adapt``, ``bench`` and ``eval``, which the entry point ``lab`` adds to the command line."""

from __future__ import annotations

import typer

from blendrag.cli.groups import SuggestingGroup, name_values
from blendrag.cli.lifecycle import DONE, INTERRUPTED, begin, reporting

#: The command gets all arguments as they were typed.
_RAW_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    from blendrag_lab.distillation.adapt_command import adapt
    from blendrag_lab.evaluation.command import evaluate

    app.command()(adapt)
    app.command("eval")(evaluate)
    app.command(add_help_option=False, context_settings=_RAW_ARGUMENTS)(bench)


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
    from blendrag_lab.bench import SUMMARIES, load_bench

    app = typer.Typer(
        cls=SuggestingGroup,
        no_args_is_help=True,
        add_completion=False,
        help="Measure speed: interleaved rounds, medians.",
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )
    for name, summary in SUMMARIES.items():
        command = load_bench(name).command if name == chosen else lambda: None
        app.command(name, help=summary)(command)
    name_values(app)
    return app
