"""The commands. Each parses, calls the engine, prints; heavy imports happen inside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from blendrag import __version__
from blendrag.cli import interrupt, options, output, quiet
from blendrag.cli.calibrate import calibrate
from blendrag.cli.eval import evaluate
from blendrag.cli.profile import profile
from blendrag.cli.status import (
    DONE,
    FAILED,
    INTERRUPTED,
    REFUSED_MODEL,
    reporting,
    say,
)
from blendrag.cli.store import app as store_commands
from blendrag.errors import InvalidInputError

app = typer.Typer(
    name="blendrag",
    help="Answer questions over documents with a local Hugging Face model, from precomputed KV.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Paths = Annotated[list[Path], typer.Argument(help="Files or directories.", show_default=False)]


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


@app.command()
@reporting
def ingest(
    paths: Paths,
    model: options.Model = None,
    store: options.Store = None,
    chunk_tokens: Annotated[
        int | None,
        typer.Option(
            min=64, max=4096, help="Largest chunk, in the model's tokens.", show_default=False
        ),
    ] = None,
    prefix_file: Annotated[
        Path | None,
        typer.Option(
            help="Rendered prompt up to the first chunk; chunks are encoded behind it.",
            show_default=False,
        ),
    ] = None,
    embedder: Annotated[
        str | None,
        typer.Option(help="sentence-transformers model, or minilm-offline.", show_default=False),
    ] = None,
    ram_bytes: options.RamBytes = None,
    disk_bytes: options.DiskBytes = None,
    encoding: options.Encoding = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    lora: options.Lora = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count and estimate; write nothing.")
    ] = False,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Precompute documents (text, Markdown, HTML, JSON lines). Safe to interrupt and to repeat."""
    _begin(verbose)
    interrupt.expect("nothing new was stored; repeat the command to go on")
    _require_documents(paths)
    engine = _engine(
        model,
        store,
        for_ingest=True,
        chunk_tokens=chunk_tokens,
        prefix_text=options.prefix_text(prefix_file),
        embedder=embedder,
        ram_bytes=ram_bytes,
        disk_bytes=disk_bytes,
        encoding=encoding,
        dtype=dtype,
        device=device,
        lora=str(lora) if lora else None,
    )
    with engine:
        return _dry_run(engine, paths, json) if dry_run else _ingest(engine, paths, json)


def _require_documents(paths: list[Path]) -> None:
    """Refuse an empty corpus, and paths that do not exist, before anything is loaded."""
    from blendrag.readers import SUPPORTED_SUFFIXES, scan_inputs

    found = scan_inputs(paths)
    if not found.files:
        left_out = f" ({len(found.unsupported)} of other kinds left out)" * bool(found.unsupported)
        raise InvalidInputError(
            f"there is no document in {', '.join(map(str, paths))}{left_out}; "
            f"expected files ending in {', '.join(SUPPORTED_SUFFIXES)}"
        )


def _ingest(engine: Any, paths: list[Path], json: bool) -> int:
    from dataclasses import asdict

    from blendrag.cli.progress import IngestProgress

    interrupt.expect("what was stored is kept; repeat the command to go on", grace_s=10.0)
    with IngestProgress() as progress:
        report = engine.ingest(paths, progress)
    progress.finish(report.failures)
    for skipped in report.skipped:
        say("skipped", skipped)
    output.print_json(asdict(report)) if json else output.print_ingest(report)
    if report.interrupted:
        say("interrupted", interrupt.sentence())
        return INTERRUPTED
    if report.stopped:
        say("error", report.stopped)
    return FAILED if report.stopped or report.failed else DONE


def _dry_run(engine: Any, paths: list[Path], json: bool) -> int:
    from dataclasses import asdict

    interrupt.expect("nothing was written")
    plan = engine.dry_run(paths)
    for failure in plan.failures:
        say("failed", failure)
    for skipped in plan.skipped:
        say("skipped", skipped)
    output.print_json(asdict(plan)) if json else output.print_dry_run(plan)
    return FAILED if plan.failed else DONE


@app.command()
@reporting
def remove(
    paths: Paths,
    model: options.Model = None,
    store: options.Store = None,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Forget documents, named as they were ingested: their texts, vectors and KV."""
    _begin(verbose)
    interrupt.expect("what was not removed yet is intact; repeat the command to go on")
    with _engine(model, store) as engine:
        corpus = engine.resources.require_corpus()
        unknown = [path for path in paths if not corpus.sources_of(path)]
        known = [path for path in paths if path not in unknown]
        removed = engine.remove(known or unknown)
    for path in unknown:
        say("failed", f"{path} is not in the corpus of {engine.resources.root}")
    if json:
        output.print_json({"documents": removed, "failed": [str(path) for path in unknown]})
    else:
        typer.echo(f"{removed} document{'' if removed == 1 else 's'} removed")
    return FAILED if unknown else DONE


@app.command()
@reporting
def ask(
    question: Annotated[str, typer.Argument(help="The question.", show_default=False)],
    model: options.Model = None,
    store: options.Store = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Chunks to retrieve.", show_default=False)
    ] = None,
    mode: options.Mode = None,
    policy: Annotated[
        str | None, typer.Option(help="Which tokens mode blend recomputes.", show_default=False)
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            help="constant, linear, geometric[:g], first:m, calibrated or one ratio per layer.",
            show_default=False,
        ),
    ] = None,
    ratio: options.AutoRatio = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer.", show_default=False)
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0, callback=options.finite, help="0 decodes greedily.", show_default=False
        ),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="End the answer before this text; repeatable.", show_default=False),
    ] = None,
    ram_bytes: options.RamBytes = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    lora: options.Lora = None,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Answer a question over the ingested documents; the answer streams to stdout."""
    _begin(verbose)
    interrupt.expect("the answer was abandoned; the store is intact")
    options.text_argument(question, "the question")
    engine = _engine(
        model,
        store,
        ram_bytes=ram_bytes,
        dtype=dtype,
        device=device,
        lora=str(lora) if lora else None,
    )
    from blendrag.engine import Options

    asked = Options(
        mode=mode,  # type: ignore[arg-type]  # one of Mode, by its callback
        policy=policy,
        schedule=schedule,
        ratio=ratio,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        stop=tuple(stop or ()),
    )
    with engine:
        pieces = engine.ask_stream(question, top_k, asked)
        shown = False
        try:
            for piece in pieces:
                if not json:
                    typer.echo(piece, nl=False)
                    shown = True
        finally:
            pieces.abandon()
            if shown:
                typer.echo()
        answer = pieces.answer
        if json:
            output.print_json(output.answer_fields(answer))
        else:
            output.say_metrics(answer.metrics)
        interrupt.expect("the answer is complete; some chunks are not precomputed yet")
        engine.drain()  # chunks that had no KV get theirs, for the next question
    return DONE


@app.command()
@reporting
def verify(
    model: Annotated[str, typer.Argument(help="Hub id, directory, or demo.", show_default=False)],
    dtype: options.Dtype = None,
    device: options.Device = None,
    lora: options.Lora = None,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Measure whether this model's KV may be reused; exit status 3 if not."""
    _begin(verbose)
    interrupt.expect("the model was not verified")
    from blendrag.config import settings
    from blendrag.model.loading import load_adapter
    from blendrag.verify import verify as run_gate

    adapter = load_adapter(
        model,
        dtype or settings().dtype,
        device or settings().device,
        str(lora) if lora else None,
    )
    result = run_gate(adapter)
    if json:
        output.print_json(result.as_dict())
    else:
        output.print_verification(model, result)
    return DONE if result.blendable else REFUSED_MODEL


@app.command()
@reporting
def demo(
    store: options.Store = None,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Ingest the demo corpus and compare full prefill, reuse and blend on its questions."""
    _begin(verbose)
    interrupt.expect("the tour is over")
    from blendrag.demo.tour import print_tour, take_tour

    tour = take_tour(store)
    if json:
        output.print_json(tour.as_dict())
    else:
        print_tour(tour)
    return DONE


app.command("eval")(evaluate)


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
@reporting
def bench(context: typer.Context) -> int:
    """Measure times and memory; see blendrag bench --help."""
    _begin(verbose=False)
    interrupt.expect("the measurement was abandoned")
    from blendrag.bench.cli import app as benchmarks

    command = typer.main.get_command(benchmarks)
    status = command.main(context.args, prog_name="blendrag bench", standalone_mode=False)
    if status == INTERRUPTED:  # what typer makes of Ctrl-C, without a word
        raise KeyboardInterrupt
    return status if isinstance(status, int) else DONE


app.command()(calibrate)
app.command()(profile)
app.add_typer(store_commands)


def _begin(verbose: bool) -> None:
    quiet.set_up(verbose)
    options.check_environment()


def _engine(model: str | None, store: Path | None, for_ingest: bool = False, **given: Any) -> Any:
    from blendrag.engine import BlendEngine

    return BlendEngine(options.model_for(model, store, for_ingest), store, **given)
