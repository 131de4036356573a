"""``blendrag demo``: the tour of SmolLM2 if it is installed, else that of the embedded model."""

from __future__ import annotations

from typing import Annotated, Literal

from blendrag.cli import options, output
from blendrag.cli.lifecycle import DONE, begin, reporting
from blendrag.cli.progress import StatusLine
from blendrag.demo import smollm2
from blendrag.errors import InvalidInputError

DemoModel = Literal["smollm2", "embedded"]


@reporting
def demo(
    model: Annotated[
        DemoModel | None,
        options.one_of(
            "The model. [default: smollm2 if it is installed, else embedded]", DemoModel
        ),
    ] = None,
    store: options.Store = None,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Answer questions with and without stored KV, and compare. Ingests a small corpus first."""
    begin(verbose, "the tour was not finished")
    missing = smollm2.missing()
    if model == "smollm2" and missing:
        raise InvalidInputError(f"SmolLM2 is not installed; run {' && '.join(missing)}")
    from blendrag.demo.tables import WIDTH, print_tour
    from blendrag.demo.tour import take_handbook_tour, take_tour

    with StatusLine() as progress:
        if model == "embedded" or missing:
            output.say("note", embedded_note(missing))
            tour = take_tour(store, show=progress.show)
        else:
            tour = take_handbook_tour(str(smollm2.smollm2_path()), store, progress.show)
    output.print_json(tour.as_dict()) if json else print_tour(tour, output.console(width=WIDTH))
    return DONE


def embedded_note(missing: tuple[str, ...]) -> str:
    """That the embedded model answers, and how to get SmolLM2."""
    remedy = " && ".join((*missing, "blendrag demo --model smollm2"))
    return f"this is the small embedded model; for a pretrained one: {remedy}"
