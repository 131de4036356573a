"""``blendrag ingest`` and ``remove``: what the corpus holds. Parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blendrag.cli import interrupt, options, output
from blendrag.cli.starting import begin, engine_for
from blendrag.cli.status import DONE, FAILED, INTERRUPTED, reporting, say
from blendrag.errors import InvalidInputError

if TYPE_CHECKING:
    from blendrag.engine import BlendEngine

Paths = Annotated[list[Path], typer.Argument(help="Files or directories.", show_default=False)]


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
        options.unset("Rendered prompt up to the first chunk; chunks are encoded behind it."),
    ] = None,
    embedder: Annotated[
        str | None, options.unset("sentence-transformers model, or minilm-offline.")
    ] = None,
    ram_bytes: options.RamBytes = None,
    disk_bytes: options.DiskBytes = None,
    encoding: options.Encoding = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    lora: options.Lora = None,
    trust_remote_code: options.TrustRemoteCode = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count and estimate; write nothing.")
    ] = False,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Precompute documents (text, Markdown, HTML, JSON lines). Safe to interrupt and to repeat."""
    begin(verbose, "nothing new was stored; repeat the command to go on")
    _require_documents(paths)
    engine = engine_for(
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
        lora=lora,
        trust_remote_code=trust_remote_code,
    )
    with engine:
        return _dry_run(engine, paths, json) if dry_run else _ingest(engine, paths, json)


def _require_documents(paths: list[Path]) -> None:
    """Refuse an empty corpus, and paths that do not exist, before anything is loaded."""
    from blendrag.text.readers import SUPPORTED_SUFFIXES, scan_inputs

    found = scan_inputs(paths)
    if not found.files:
        left_out = f" ({len(found.unsupported)} of other kinds left out)" * bool(found.unsupported)
        raise InvalidInputError(
            f"there is no document in {', '.join(map(str, paths))}{left_out}; "
            f"expected files ending in {', '.join(SUPPORTED_SUFFIXES)}"
        )


def _ingest(engine: BlendEngine, paths: list[Path], json: bool) -> int:
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


def _dry_run(engine: BlendEngine, paths: list[Path], json: bool) -> int:
    from dataclasses import asdict

    interrupt.expect("nothing was written")
    plan = engine.dry_run(paths)
    for failure in plan.failures:
        say("failed", failure)
    for skipped in plan.skipped:
        say("skipped", skipped)
    output.print_json(asdict(plan)) if json else output.print_dry_run(plan)
    return FAILED if plan.failed else DONE


@reporting
def remove(
    paths: Paths,
    model: options.Model = None,
    store: options.Store = None,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Forget documents, named as they were ingested: their texts, vectors and KV."""
    begin(verbose, "what was not removed yet is intact; repeat the command to go on")
    with engine_for(model, store) as engine:
        corpus = engine.resources.require_corpus()
        unknown = [path for path in paths if not corpus.sources_of(path)]
        known = [path for path in paths if path not in unknown]
        removed = engine.remove(known or unknown)
    for path in unknown:
        say("failed", f"{path} is not in the corpus of {engine.resources.root}")
    if json:
        output.print_json({"documents": removed, "failed": [str(path) for path in unknown]})
    else:
        typer.echo(f"{output.count(removed, 'document')} removed")
    return FAILED if unknown else DONE
