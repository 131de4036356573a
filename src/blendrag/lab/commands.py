"""``blendrag bench`` and ``blendrag eval``: commands of the extra ``blendrag[lab]``."""

from __future__ import annotations

from importlib.util import find_spec

import typer

from blendrag.cli.starting import begin
from blendrag.cli.status import DONE, INTERRUPTED, reporting
from blendrag.lab.evaluation.command import evaluate

#: What the extra installs.
REQUIREMENTS = ("matplotlib", "rouge_score")


@reporting
def bench(context: typer.Context) -> int:
    """Measure times and memory; see blendrag bench --help."""
    begin(verbose=False, if_interrupted="the measurement was abandoned")
    from blendrag.lab.bench.cli import app as benchmarks

    command = typer.main.get_command(benchmarks)
    status = command.main(context.args, prog_name="blendrag bench", standalone_mode=False)
    if status == INTERRUPTED:  # typer turns Ctrl-C into this status without a message
        raise KeyboardInterrupt
    return status if isinstance(status, int) else DONE


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``. Raises :class:`ImportError` without the extra."""
    missing = [name for name in REQUIREMENTS if find_spec(name) is None]
    if missing:
        raise ImportError(f"{', '.join(missing)} missing; pip install 'blendrag[lab]'")
    app.command("eval")(evaluate)
    app.command(
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(bench)
