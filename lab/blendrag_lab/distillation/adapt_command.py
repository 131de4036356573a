"""``blendrag adapt``: train a writer for a model and a corpus."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blendrag.cli import interrupt, options
from blendrag.cli.lifecycle import DONE, begin, reporting
from blendrag.cli.output import console, count, duration, echo, print_json, say
from blendrag.cli.progress import StatusLine
from blendrag.config import absolute_model, settings
from blendrag.errors import InvalidInputError

if TYPE_CHECKING:
    from blendrag_lab.distillation.report import AdaptReport
    from blendrag_lab.distillation.trainer import Progress, Score

#: A backward pass cannot be interrupted, and the checkpoint is written after it.
GRACE_S = 120.0


@reporting
@options.takes(
    "model",
    "store",
    "dtype",
    "device",
    "trust_remote_code",
    "embedder",
    "encode_after",
    "chunk_tokens",
    "top_k",
)
def adapt(
    context: typer.Context,
    documents: Annotated[
        list[Path] | None,
        options.optional("Train on this file or directory, not on a store; repeatable."),
    ] = None,
    questions: Annotated[
        list[Path] | None,
        options.optional(
            "A file of questions, one a line, or of JSON records {question, ctxs}; repeatable. "
            "[default: the model asks]"
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(help="Directory for the writer, and for checkpoints until it is finished."),
    ] = Path("blendrag-writer"),
    steps: Annotated[int, options.number("Training steps.", 1, kind=int)] = 200,
    batch: Annotated[int, options.number("Prompts in each step.", 1, kind=int)] = 4,
    start: Annotated[
        Path | None,
        options.optional("Begin with the weights of this writer of the same model.", "--from"),
    ] = None,
    rank: Annotated[
        int | None,
        options.number("Rank of the LoRA. [default: 16, or that of --from]", 1, 1024, kind=int),
    ] = None,
    learning_rate: Annotated[
        float, options.number("Highest learning rate.", 0, 1, above=True)
    ] = 5e-4,
    plot: Annotated[
        Path | None, options.optional("Draw losses and measurements into this PNG.")
    ] = None,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Train a writer, a LoRA for encoding chunks.

    With it, answers over stored KV are closer to full prefill; the model that answers stays as it is. Then:
    blendrag ingest --writer DIR. After Ctrl-C, the same command goes on.
    """
    begin(verbose, "nothing was trained yet; repeat the command to go on")
    options.require_plot(plot)
    _require_folder(out)
    from blendrag.model.loading import load_adapter
    from blendrag.model.writer import Writer
    from blendrag_lab.distillation.adapt import adapt as train
    from blendrag_lab.distillation.adapt import require_unfinished
    from blendrag_lab.distillation.sources import corpus_of
    from blendrag_lab.distillation.trainer import Recipe

    require_unfinished(out)
    begun = None if start is None else Writer.load(start)
    if begun is not None and rank not in (None, begun.rank):
        raise InvalidInputError(
            f"--from {start} is a writer of rank {begun.rank}, not {rank}; leave --rank out"
        )
    rank = rank or (begun.rank if begun is not None else Recipe.rank)
    recipe = Recipe(steps=steps, batch=batch, rank=rank, learning_rate=learning_rate)
    given = context.params
    store = _store(given["store"], documents, questions)
    if store is not None and not questions:
        options.require_documents(store)
    name = _model(given["model"], store, bool(given["trust_remote_code"]))
    with StatusLine(f"loading {name}") as line:
        defaults = settings()
        adapter = load_adapter(
            name,
            given["dtype"] or defaults.dtype,
            given["device"] or defaults.device,
            trust_remote_code=bool(given["trust_remote_code"]),
        )
        line.show("reading documents")
        corpus = corpus_of(
            adapter.tokens,
            store,
            documents or (),
            questions or (),
            lambda text: say("failed", text),
            **options.given(
                given, ("top_k", "chunk_tokens", "embedder", "encode_after", "trust_remote_code")
            ),
        )

        def show(progress: Progress, before: Score) -> None:
            steps_kept = f"{count(progress.step, 'step')} kept in {out}"
            interrupt.expect(f"{steps_kept}; repeat the command to go on", GRACE_S)
            line.show(_line(progress, recipe.steps, before), progress.step, recipe.steps)

        kept = f"steps finished before are kept in {out}; repeat the command to go on"
        interrupt.expect(kept, GRACE_S)
        report = train(
            adapter,
            corpus,
            recipe,
            out,
            say=lambda text, done, total: line.show(f"{text} ({done} of {total})"),
            note=lambda text: say("note", text),
            watch=show,
            start=begun,
        )
    if report.progress.skipped:
        say("note", _skipped(report))
    if plot is not None:
        from blendrag_lab.distillation.plot import write_plot

        write_plot(report, plot)
    if json:
        print_json(report.as_dict())
    else:
        _print(report)
    return DONE


def _line(progress: Progress, steps: int, before: Score) -> str:
    text = f"step {progress.step} of {steps}"
    if progress.skipped:
        text += f" ({progress.skipped} skipped)"
    if recent := [loss for loss in progress.losses[-8:] if loss is not None]:
        text += f", loss {sum(recent) / len(recent):.4f}"
    without = f"{before.typical_kl:.4f} without a writer"
    if progress.best is None:
        return f"{text}, held-out KL {without}"
    step, score = progress.best
    return f"{text}, held-out KL {score.typical_kl:.4f} (step {step}), {without}"


def _skipped(report: AdaptReport) -> str:
    steps = count(report.progress.skipped, "step")
    return f"{steps} had no finite loss and changed nothing; training ended because {report.ending}"


def _print(report: AdaptReport) -> None:
    from rich.table import Table

    from blendrag_lab.distillation.report import HEADER, NO_HELP, rows_of

    table = Table(box=None, pad_edge=False)
    for name in HEADER:
        table.add_column(name, justify="right" if name else "left")
    for row in rows_of(report):
        table.add_row(*row)
    console(width=120).print(table)
    progress = report.progress
    skipped = f" ({progress.skipped} skipped)" if progress.skipped else ""
    echo(
        f"{count(progress.step, 'step')}{skipped} in {duration(progress.seconds)}, the best after step "
        f"{report.best_step}; KL in nats per answer token, nothing recomputed",
        f"use it: blendrag ingest DOCUMENTS --model {report.model} --writer {report.out}"
        f"{report.ingest_options}"
        if report.helps
        else f"{NO_HELP} Train with more --steps or on more documents.",
    )


def _require_folder(out: Path) -> None:
    place = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise InvalidInputError(
            f"--out {out} cannot be written, expected a directory, new or of an interrupted run, in a "
            "writable place"
        )


def _store(
    store: Path | None, documents: list[Path] | None, records: list[Path] | None
) -> Path | None:
    """The store whose corpus is trained on: the default one where neither documents nor records are given."""
    if store is not None and documents:
        raise InvalidInputError(
            f"--store {store} with --documents, expected one of them; leave one out"
        )
    if store is None and not documents and not records:
        return settings().store
    return store


def _model(model: str | None, store: Path | None, trusts_code: bool) -> str:
    from blendrag.corpus.recorded_model import given_model, model_for

    found = (
        given_model(model, trusts_code) if store is None else model_for(model, store, trusts_code)
    )
    if found is None:
        raise InvalidInputError(
            "no model is named, expected one to train a writer for; add --model with a hub id or a directory"
        )
    return absolute_model(found)
